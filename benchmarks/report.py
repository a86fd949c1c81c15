"""Measurements and their report: interleaved timing, min/median/max, the machine, as a text table or as JSON."""

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGES = ("torch", "diffusers", "accelerate", "numpy", "pillow")


@dataclass(frozen=True)
class Measurement:
    """One quantity, measured once for each of ``values``; without any, ``note`` says why."""

    name: str
    values: Sequence[float]
    unit: str = ""
    at_most: float | None = None
    note: str = ""
    at_least: float | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def meets_target(self) -> bool:
        if self.median is None:
            return self.at_most is None and self.at_least is None
        return (self.at_most is None or self.median <= self.at_most) and (
            self.at_least is None or self.median >= self.at_least
        )

    def format_cells(self) -> tuple[str, ...]:
        """Format a row of the table."""
        median = "" if self.median is None else format_number(self.median)
        spread = f"{format_number(min(self.values))} to {format_number(max(self.values))}" if self.values[1:] else ""
        limits = {"<=": self.at_most, ">=": self.at_least}
        target = ", ".join(f"{sign} {format_number(limit)}" for sign, limit in limits.items() if limit is not None)
        if target:
            target += f": {'met' if self.meets_target else 'not measured' if median == '' else 'MISSED'}"
        return self.name, median, self.unit, spread, target, self.note


def measure_interleaved(candidates: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Time each candidate in turn, again and again, so that other load on the machine slows all of them down alike."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, candidate in candidates.items():
            seconds[name].append(measure_seconds(candidate))
    return seconds


def measure_seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compute_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divide measurements of the same round by each other."""
    return [one / other for one, other in zip(numerators, denominators, strict=True)]


def format_text(command: Sequence[str], measurements: Sequence[Measurement]) -> str:
    """Format a table with one line for each measurement."""
    rows = [("", "median", "unit", "min to max", "target", "note"), *(each.format_cells() for each in measurements)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    machine = [f"{name}: {value}" for name, value in describe_machine().items()]
    return "\n".join([shlex.join(command), *machine, "", *lines])


def format_json(command: Sequence[str], measurements: Sequence[Measurement]) -> str:
    """Format every single value as JSON."""
    rows = [{**asdict(measurement), "median": measurement.median} for measurement in measurements]
    return json.dumps({"command": shlex.join(command), **describe_machine(), "measurements": rows}, indent=1)


def describe_machine() -> dict[str, str]:
    """Describe what the measurements depend on: processor, accelerator, other load, versions."""
    import torch

    # A build for CUDA names its accelerator where there is none, too.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = "none"
    if accelerator is not None:
        name = torch.get_device_module(accelerator).get_device_name()
        device = f"{torch.accelerator.device_count()} x {name}"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    processors = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = processors[0] if processors else platform.processor()
    versions = [f"{package} {importlib.metadata.version(package)}" for package in PACKAGES]
    return {
        "machine": f"{os.cpu_count()} processors, {processor}, {platform.system()} {platform.machine()}",
        "accelerator": device,
        "load average": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }


def format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def add_count_option(parser: ArgumentParser, name: str, default: int | list[int], description: str) -> None:
    """Add an option that takes a positive integer, or several where ``default`` is a list."""
    nargs = None if isinstance(default, int) else "+"
    description = f"{description} (default %(default)s)"
    parser.add_argument(name, type=_parse_positive_int, nargs=nargs, default=default, help=description)


def _parse_positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)
