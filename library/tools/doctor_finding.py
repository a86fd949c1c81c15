"""What one check of the doctor found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A line of the report; ``fix`` says the way out when something is not as it should be."""

    name: str
    value: str
    ok: bool = True
    fix: str = ""
    needed: bool = True
    """Whether training is impossible without it."""

    @property
    def is_broken(self) -> bool:
        return self.needed and not self.ok
