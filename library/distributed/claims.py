"""Who says what about a setting, and who of them counts: the words in which settings are explained."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import RunConfig
from ..config.options import flat
from .devices import Machine
from .launch_command import ACCELERATE, TORCHRUN, LaunchCommand
from .launch_file import LaunchFile

FLAG = "launch flag"


@dataclass(frozen=True)
class Claim:
    """One place and what it says."""

    place: str
    value: str
    is_filed: bool = field(default=False, compare=False)
    """Whether it stands in accelerate's own file."""


@dataclass(frozen=True)
class Verdict:
    """What holds, who decided it, and who said something as well."""

    setting: str
    value: str
    winner: str
    losers: tuple[Claim, ...] = ()
    contradiction: str = ""
    """Why what was said does not go together; empty when it does."""
    is_error: bool = False
    """Whether training refuses to start over it; otherwise it is only discouraged."""


@dataclass(frozen=True)
class Sources:
    """Every place that a setting can come from."""

    config: RunConfig | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    """Where each of our options was written; options that nobody wrote are missing."""
    launch: LaunchCommand | None = None
    file: LaunchFile | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the launcher was started with, or this process when there is none."""
    machine: Machine = field(default_factory=Machine)
    windows: bool = False

    @property
    def by_accelerate(self) -> bool:
        return self.launch is not None and self.launch.launcher == ACCELERATE

    @property
    def by_torchrun(self) -> bool:
        return self.launch is not None and self.launch.launcher == TORCHRUN

    def option(self, name: str) -> Any:
        """The value of one of our options; ``None`` when nothing is known of them."""
        return None if self.config is None else flat(self.config)[name]

    def code(self, name: str) -> Claim | None:
        """What our own flags and files say, where somebody wrote it."""
        value = self.option(name)
        return None if value is None or name not in self.places else Claim(self.places[name], word(value))

    def flag(self, name: str) -> Claim | None:
        """What stands between ``accelerate launch`` and the script."""
        given = self.launch.given if self.launch is not None else {}
        return Claim(f"{FLAG} --{name}", word(given[name])) if name in given else None

    def filed(self, name: str) -> Claim | None:
        """What accelerate's own file says."""
        if self.file is None:
            return None
        table = self.file.dynamo if name.startswith("dynamo_") else self.file.content
        return Claim(f"{self.file.path}: {name}", word(table[name]), is_filed=True) if name in table else None

    def variable(self, name: str, note: str = "") -> Claim | None:
        """What the environment says."""
        value = self.environment.get(name, "")
        return Claim(f"environment variable {name}{note}", word(value)) if value else None

    def overwritten(self, name: str) -> Claim | None:
        """The same, where ``accelerate launch`` puts its own value in its place."""
        return self.variable(name, " (accelerate launch overwrites it)")


def decide(
    setting: str, claims: Iterable[Claim | None], default: Claim, unread: Iterable[Claim | None] = ()
) -> Verdict:
    """The first claim wins; ``unread`` ones never could.  Who says something else than the winner contradicts it.

    A flag of the launcher over the launcher's own file is no contradiction: that is what such flags are for.
    """
    said = [claim for claim in claims if claim is not None]
    winner = said[0] if said else default
    losers = (*said[1:], *(claim for claim in unread if claim is not None))
    by_flag = winner.place.startswith(FLAG)
    others = [f"{loser.place} says {loser.value}" for loser in losers
              if loser.value != winner.value and not (by_flag and loser.is_filed)]  # fmt: skip
    contradiction = f"{setting}: {winner.place} says {winner.value} and counts; {', '.join(others)}" if others else ""
    return Verdict(setting, winner.value, winner.place, losers, contradiction)


def word(value: Any) -> str:
    """A value as it is compared and shown: truth values in one spelling, backends in small letters."""
    text = str(value).strip()
    return text.lower() if isinstance(value, bool) or text.lower() in ("true", "false") or text.isupper() else text
