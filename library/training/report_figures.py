"""Figures out of the lines of a run's metrics file, for the page about the run."""

from collections.abc import Mapping, Sequence
from typing import Any

Metrics = Sequence[Mapping[str, Any]]


def series(lines: Metrics, name: str) -> list[tuple[float, float]]:
    """The values of one figure over the steps, where there are any."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def names(lines: Metrics, prefix: str) -> list[str]:
    """The figures that begin so."""
    return sorted({name for line in lines for name in line if name.startswith(prefix)})


def last(lines: Metrics, name: str) -> float | None:
    """The latest value of a figure."""
    found = series(lines, name)
    return found[-1][1] if found else None
