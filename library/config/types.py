"""At which resolution pictures are trained in which steps: ``256:1000,512:1000,native``."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

NATIVE = "native"


_ENTRY_PATTERN = re.compile(r"(?:(\d+)(?:x(\d+))?|native)(?::(\d+))?")


@dataclass(frozen=True)
class Resolution:
    """Width and height in pixels: ``512`` or ``"512,768"``; in TOML also ``[512, 768]``."""

    width: int
    height: int

    syntax: ClassVar[str] = "SIZE or WIDTH,HEIGHT"

    @classmethod
    def parse(cls, value: Any) -> "Resolution":
        if type(value) is int:
            value = [value]
        elif isinstance(value, str):
            try:
                value = [int(part) for part in value.split(",")]
            except ValueError:
                value = None
        numbers = value if isinstance(value, list) and all(type(item) is int for item in value) else []
        if len(numbers) not in (1, 2) or any(number < 1 for number in numbers):
            raise ValueError("expected a size in pixels, such as 512 or 512,768 (width, height)")
        return cls(numbers[0], numbers[-1])

    def __str__(self) -> str:
        return f"{self.width},{self.height}"


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


@dataclass(frozen=True)
class DeviceMap:
    """A way to deal modules out over devices, or the number of each module's device."""

    preset: str = ""
    device_by_module: tuple[tuple[str, int], ...] = ()

    PRESETS: ClassVar[tuple[str, ...]] = ("auto", "balanced", "sequential")
    syntax: ClassVar[str] = "auto, balanced, sequential or {MODULE: NUMBER}"

    @classmethod
    def parse(cls, value: Any) -> "DeviceMap":
        if value in cls.PRESETS:
            return cls(value)
        try:
            found = json.loads(value) if isinstance(value, str) else None
        except ValueError:
            found = None
        if not isinstance(found, dict) or not found:
            raise ValueError(
                'expected auto, balanced, sequential, or a JSON object such as {"transformer_blocks": 1, "": 0}'
            )
        for module, number in found.items():
            if type(number) is not int or number < 0:
                raise ValueError(
                    f"{module!r}: {number!r} is no number of a device (0, 1, ...); for weights in host"
                    " memory there is blocks_to_swap"
                )
        return cls("", tuple(found.items()))

    def __str__(self) -> str:
        return self.preset or json.dumps(dict(self.device_by_module))


@dataclass(frozen=True)
class StepsOrRatio:
    """A length in steps: ``100`` steps, or ``0.1`` or ``"10%"`` of the whole run."""

    value: float
    is_ratio: bool

    syntax: ClassVar[str] = "STEPS, RATIO or N%"

    @classmethod
    def parse(cls, value: Any) -> "StepsOrRatio":
        share = cls._parse_number(value)
        if share is None or not 0 <= share.value < math.inf or (share.is_ratio and share.value > 1):
            raise ValueError("expected steps (100), a ratio of the run below 1 (0.1), or a percentage ('10%')")
        return share

    @classmethod
    def _parse_number(cls, value: Any) -> "StepsOrRatio | None":
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            return None
        text = str(value).strip()
        try:
            if text.endswith("%"):
                return cls(float(text[:-1]) / 100, is_ratio=True)
            number = float(text)
        except ValueError:
            return None
        if 0 < number < 1:
            return cls(number, is_ratio=True)
        return cls(number, is_ratio=False) if number.is_integer() else None

    def to_steps(self, total_steps: int) -> int:
        """In optimizer steps, of a run of ``whole`` steps."""
        return round(self.value * total_steps) if self.is_ratio else int(self.value)

    def __str__(self) -> str:
        if not self.is_ratio:
            return str(int(self.value))
        return repr(self.value) if 0 < self.value < 1 else f"{self.value * 100:g}%"


@dataclass(frozen=True)
class StepRange:
    """Steps of a run, counted from 1, both ends included: ``10:20``."""

    first: int
    last: int

    syntax: ClassVar[str] = "FIRST:LAST"

    @classmethod
    def parse(cls, value: Any) -> "StepRange":
        first, _, last = str(value).partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            raise ValueError("expected two steps, such as 11:20")
        return cls(int(first), int(last))

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


@dataclass(frozen=True)
class MemorySize:
    """Memory of a device: ``24GB``, ``24GiB`` and ``24`` are the same, as makers of GPUs count."""

    num_bytes: int

    syntax: ClassVar[str] = "SIZE, such as 24GB"

    @classmethod
    def parse(cls, value: Any) -> "MemorySize":
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([gGmM]?)[iI]?[bB]?\s*", str(value))
        number = float(found[1]) * 2 ** (20 if found[2] in ("m", "M") else 30) if found else 0
        if isinstance(value, bool) or number < 1:
            raise ValueError("expected the size of a device's memory, such as 24GB or 512MB")
        return cls(int(number))

    def __str__(self) -> str:
        return f"{self.num_bytes / 2**30:g}GB"
