"""Figures of a bench: repeated measures, told with their spread and with the machine they were taken on."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PACKAGES = ("torch", "numpy", "pillow")


@dataclass(frozen=True)
class Figure:
    """One thing that was measured, as often as there are values."""

    name: str
    values: tuple[float, ...]
    unit: str
    target: float | None = None  # no more than this
    at_least: float | None = None
    remark: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def line(self) -> tuple[str, ...]:
        """For the table."""
        spread = f"{_short(min(self.values))} to {_short(max(self.values))}" if len(self.values) > 1 else ""
        verdict = ""
        if self.target is not None:
            verdict = f"under {_short(self.target)}: {'yes' if self.median < self.target else 'NO'}"
        if self.at_least is not None:
            verdict = f"at least {_short(self.at_least)}: {'yes' if self.median >= self.at_least else 'NO'}"
        return self.name, _short(self.median), self.unit, spread, verdict, self.remark

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "median": self.median}


def interleaved(ways: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, tuple[float, ...]]:
    """Seconds that each way takes; in turn, again and again, so that what slows the machine down hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            seconds[name].append(seconds_of(way))
    return {name: tuple(values) for name, values in seconds.items()}


def seconds_of(work: Callable[[], object]) -> float:
    """By the clock on the wall."""
    return clocked(work)[0]


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock on the wall, and of the processors, which other work on the machine changes little."""
    started, worked = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - worked


def environment() -> dict[str, str]:
    """What figures depend on; other work on the machine is told by its load."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "machine": f"{os.cpu_count()} processors, {_processor()}, {platform.system()} {platform.machine()}",
        "load": f"{load:.1f} processes at work at the end",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, PACKAGES)]),
    }


def reported(bench: str, argv: Sequence[str], figures: Sequence[Figure], *, as_values: bool, **facts: str) -> str:
    """What a bench says in the end, with every single value (JSON) or as a table."""
    command = " ".join(["python -m library bench", bench, *argv])
    return (as_json if as_values else as_text)(command, figures, environment() | facts)


def as_text(command: str, figures: Sequence[Figure], surroundings: Mapping[str, str]) -> str:
    """A table, a line each, median first."""
    rows = [("", "median", "", "spread", "target", ""), *(figure.line() for figure in figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}} " + "  ".join(
             f"{cell:<{width}}" for cell, width in zip(row[2:], widths[2:], strict=True)) for row in rows]  # fmt: skip
    facts = [f"{name}: {value}" for name, value in surroundings.items()]
    return "\n".join([command, *facts, "", *(line.rstrip() for line in table)])


def as_json(command: str, figures: Sequence[Figure], surroundings: Mapping[str, str]) -> str:
    """The same with every single value."""
    return json.dumps({"command": command, **surroundings, "figures": [figure.plain() for figure in figures]}, indent=1)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or sys.platform
