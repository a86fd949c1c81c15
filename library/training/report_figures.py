"""Figures out of the lines of a run's metrics file, for the page about the run."""

from collections.abc import Mapping, Sequence
from typing import Any

MetricLines = Sequence[Mapping[str, Any]]


def select_series(lines: MetricLines, name: str) -> list[tuple[float, float]]:
    """The values of one figure over the steps, where there are any."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def find_metric_names(lines: MetricLines, prefix: str) -> list[str]:
    """The figures that begin so."""
    return sorted({name for line in lines for name in line if name.startswith(prefix)})


def get_last_value(lines: MetricLines, name: str) -> float | None:
    """The latest value of a figure."""
    found = select_series(lines, name)
    return found[-1][1] if found else None
