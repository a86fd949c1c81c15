"""Read the metrics file of a run, a JSON line for each step, and select series from it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics; truncated and other invalid lines are skipped."""
    try:
        texts = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in map(_parse_line, texts) if line is not None]


def _parse_line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


MetricLines = Sequence[Mapping[str, Any]]


def select_series(lines: MetricLines, name: str) -> list[tuple[float, float]]:
    """List the steps and values of a metric, without steps where it is missing."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def find_metric_names(lines: MetricLines, prefix: str) -> list[str]:
    """List the metrics with this prefix."""
    return sorted({name for line in lines for name in line if name.startswith(prefix)})


def get_last_value(lines: MetricLines, name: str) -> float | None:
    """Return the last value of a metric."""
    series = select_series(lines, name)
    return series[-1][1] if series else None
