"""Option values with a syntax of their own: resolutions, steps, device maps, memory sizes, ``name=value``."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

NATIVE = "native"
MAX_SIDE = 32_768
"""Largest width and height in pixels; a typo above this would run for hours before it fails."""

_ENTRY_PATTERN = re.compile(r"(?:(\d+)(?:x(\d+))?|native)(?::(\d+))?")


def split_keyword_args(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """Split each ``name=value`` of an option such as ``network_args``; the value is None where there is no ``=``."""
    parts = (arg.partition("=") for arg in args)
    return [(name.strip(), value.strip() if equals else None) for name, equals, value in parts]


def is_prompt_text(value: str) -> bool:
    """Whether ``sample_prompts`` is the prompts themselves, one per line, instead of a file of prompts."""
    is_text = len(value.split()) > 1 and not value.strip().lower().endswith((".txt", ".toml", ".json"))
    return is_text and ("\n" in value or not Path(value).is_file())


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
        sides = value if isinstance(value, list) and all(type(item) is int for item in value) else []
        if len(sides) not in (1, 2) or any(side < 1 for side in sides):
            raise ValueError("expected a size in pixels, such as 512 or 512,768 (width,height)")
        if max(sides) > MAX_SIDE:
            raise ValueError(f"must be at most {MAX_SIDE} pixels, got {max(sides)}")
        return cls(sides[0], sides[-1])

    def __str__(self) -> str:
        return f"{self.width},{self.height}"


@dataclass(frozen=True)
class FaceCropRange:
    """The shorter side of a crop in sizes of the face: ``2.0,4.0``; in TOML also ``[2.0, 4.0]``."""

    low: float
    high: float

    syntax: ClassVar[str] = "MIN,MAX"

    @classmethod
    def parse(cls, value: Any) -> "FaceCropRange":
        if isinstance(value, str):
            try:
                value = [float(part) for part in value.split(",")]
            except ValueError:
                value = None
        if not isinstance(value, list) or len(value) != 2 or any(type(item) not in (int, float) for item in value):
            raise ValueError("expected two numbers, such as [2.0, 4.0]")
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"expected two numbers above 0, the smaller one first, got {value[0]:g},{value[1]:g}")
        return cls(float(value[0]), float(value[1]))

    def __str__(self) -> str:
        return f"{self.low},{self.high}"


@dataclass(frozen=True)
class ScheduledResolution:
    """One stage of a resolution schedule; ``None`` stands for native resolution, or for all remaining steps."""

    resolution: Resolution | None
    steps: int | None

    def __str__(self) -> str:
        text = NATIVE
        if self.resolution is not None:
            width, height = self.resolution.width, self.resolution.height
            text = str(width) if width == height else f"{width}x{height}"
        return text if self.steps is None else f"{text}:{self.steps}"


@dataclass(frozen=True)
class ResolutionSchedule:
    """The stages of a run in order: ``256:1000,512:1000,native``."""

    entries: tuple[ScheduledResolution, ...]

    syntax: ClassVar[str] = "SIZE:STEPS,...,SIZE or native"

    @classmethod
    def parse(cls, value: Any) -> "ResolutionSchedule":
        words = value if isinstance(value, list) else str(value).split(",")
        entries = tuple(_parse_entry(str(word).strip()) for word in words)
        for entry in entries[:-1]:
            if entry.steps is None:
                raise ValueError(f"{entry} needs a number of steps, such as {entry}:1000; only the last may omit it")
        return cls(entries)

    @property
    def largest(self) -> Resolution | None:
        """The largest resolution by area."""
        resolutions = [entry.resolution for entry in self.entries if entry.resolution is not None]
        return max(resolutions, key=lambda resolution: resolution.width * resolution.height, default=None)

    @property
    def has_native(self) -> bool:
        """Whether any stage trains images at their own sizes."""
        return any(entry.resolution is None for entry in self.entries)

    def __str__(self) -> str:
        return ",".join(map(str, self.entries))


def _parse_entry(word: str) -> ScheduledResolution:
    match = _ENTRY_PATTERN.fullmatch(word)
    groups = match.groups() if match else ("0", "0", "0")
    width, height, steps = (None if group is None else int(group) for group in groups)
    if 0 in (width, height, steps):
        raise ValueError(f"expected SIZE:STEPS, such as 256:1000, 512x768:500 or native, got {word!r}")
    return ScheduledResolution(None if width is None else Resolution(width, height or width), steps)


@dataclass(frozen=True)
class DeviceMap:
    """A preset that places modules on devices, or the device index of each module."""

    preset: str = ""
    device_by_module: tuple[tuple[str, int], ...] = ()

    PRESETS: ClassVar[tuple[str, ...]] = ("auto", "balanced", "sequential")
    syntax: ClassVar[str] = "auto, balanced, sequential or {MODULE: NUMBER}"

    @classmethod
    def parse(cls, value: Any) -> "DeviceMap":
        if value in cls.PRESETS:
            return cls(value)
        try:
            devices = json.loads(value) if isinstance(value, str) else None
        except ValueError:
            devices = None
        if not isinstance(devices, dict) or not devices:
            raise ValueError('expected auto, balanced, sequential, or JSON such as {"transformer_blocks": 1, "": 0}')
        for module, index in devices.items():
            if type(index) is not int or index < 0:
                hint = "to keep weights in CPU memory, use blocks_to_swap"
                raise ValueError(f"{module!r}: expected a device index (0, 1, ...), got {index!r}; {hint}")
        return cls("", tuple(devices.items()))

    def __str__(self) -> str:
        return self.preset or json.dumps(dict(self.device_by_module))


@dataclass(frozen=True)
class StepsOrRatio:
    """A number of steps, or a ratio of the run: ``100``, ``0.1`` or ``"10%"``."""

    value: float
    is_ratio: bool

    syntax: ClassVar[str] = "STEPS, RATIO or N%"

    @classmethod
    def parse(cls, value: Any) -> "StepsOrRatio":
        parsed = cls._parse_number(value)
        if parsed is None or not 0 <= parsed.value < math.inf or (parsed.is_ratio and parsed.value > 1):
            raise ValueError("expected steps (100), a ratio of the run below 1 (0.1), or a percentage ('10%')")
        return parsed

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
        return round(self.value * total_steps) if self.is_ratio else int(self.value)

    def __str__(self) -> str:
        if not self.is_ratio:
            return str(int(self.value))
        return repr(self.value) if 0 < self.value < 1 else f"{self.value * 100:g}%"


@dataclass(frozen=True)
class BlockRates:
    """A learning rate for each block of a model: ``1e-5,1e-5,0,...``."""

    rates: tuple[float, ...]

    syntax: ClassVar[str] = "RATE,RATE,..."

    @classmethod
    def parse(cls, value: Any) -> "BlockRates":
        try:
            rates = tuple(float(text) for text in str(value).split(","))
        except ValueError:
            rates = ()
        if isinstance(value, bool) or not rates or not all(0 <= rate < math.inf for rate in rates):
            raise ValueError("expected a learning rate for each block, separated by commas (1e-5,1e-5,0)")
        return cls(rates)

    def __str__(self) -> str:
        return ",".join(f"{rate:g}" for rate in self.rates)


@dataclass(frozen=True)
class StepRange:
    """A range of steps, counted from 1, both ends included: ``10:20``."""

    first: int
    last: int

    syntax: ClassVar[str] = "FIRST:LAST"

    @classmethod
    def parse(cls, value: Any) -> "StepRange":
        first, _, last = str(value).partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            raise ValueError("expected FIRST:LAST, such as 11:30")
        return cls(int(first), int(last))

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


@dataclass(frozen=True)
class MemorySize:
    """A size of memory, in GiB as vendors count: ``24GB``, ``24GiB`` and ``24`` are the same."""

    num_bytes: int

    syntax: ClassVar[str] = "SIZE, such as 24GB"

    @classmethod
    def parse(cls, value: Any) -> "MemorySize":
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([gGmM]?)[iI]?[bB]?\s*", str(value))
        num_bytes = float(match[1]) * 2 ** (20 if match[2] in ("m", "M") else 30) if match else 0
        if isinstance(value, bool) or num_bytes < 1:
            raise ValueError("expected a memory size, such as 24GB or 512MB")
        return cls(int(num_bytes))

    def __str__(self) -> str:
        size = self.num_bytes / 2**30
        return f"{size:g}GB" if size >= 1 else f"{size * 2**10:g}MB"


def parse_env_bool(text: str | None) -> bool | None:
    """Parse a boolean as accelerate does; ``None`` if it is not set."""
    if text is None or not text.strip():
        return None
    return text.strip().lower() in ("y", "yes", "t", "true", "on", "1")
