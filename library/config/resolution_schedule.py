"""At which resolution pictures are trained in which steps: ``256:1000,512:1000,native``."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from .values import Resolution

NATIVE = "native"
_ENTRY_PATTERN = re.compile(r"(?:(\d+)(?:x(\d+))?|native)(?::(\d+))?")


@dataclass(frozen=True)
class ScheduledResolution:
    """Some steps at one resolution; without a size each picture has its own, without steps it is all that are left."""

    resolution: Resolution | None
    steps: int | None

    def __str__(self) -> str:
        side = NATIVE if self.resolution is None else str(self.resolution.width)
        if self.resolution is not None and self.resolution.width != self.resolution.height:
            side = f"{self.resolution.width}x{self.resolution.height}"
        return side if self.steps is None else f"{side}:{self.steps}"


@dataclass(frozen=True)
class ResolutionSchedule:
    """The portions of a run in their order."""

    entries: tuple[ScheduledResolution, ...]

    syntax: ClassVar[str] = "SIZE:STEPS,...,SIZE or native"

    @classmethod
    def parse(cls, value: Any) -> "ResolutionSchedule":
        words = value if isinstance(value, list) else str(value).split(",")
        portions = tuple(_parse_entry(str(word).strip()) for word in words)
        for portion in portions[:-1]:
            if portion.steps is None:
                raise ValueError(f"{portion} has no number of steps; only the last may go without: {portion}:1000")
        return cls(portions)

    @property
    def largest(self) -> Resolution | None:
        """The largest size of all, by area."""
        sizes = [portion.resolution for portion in self.entries if portion.resolution is not None]
        return max(sizes, key=lambda size: size.width * size.height, default=None)

    @property
    def has_native(self) -> bool:
        """Whether pictures keep their own sizes at any time."""
        return any(portion.resolution is None for portion in self.entries)

    def __str__(self) -> str:
        return ",".join(map(str, self.entries))


def _parse_entry(word: str) -> ScheduledResolution:
    found = _ENTRY_PATTERN.fullmatch(word)
    numbers = [None if number is None else int(number) for number in found.groups()] if found else [0, 0, 0]
    width, height, steps = numbers
    if 0 in (width, height, steps):
        raise ValueError(f"{word!r} is no size with steps; expected 256:1000,512x768:500,native and the like")
    return ScheduledResolution(None if width is None else Resolution(width, height or width), steps)
