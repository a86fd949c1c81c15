"""Read ``NAME.metrics.jsonl``, which has one JSON line of metrics for each step, whatever trackers are used."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all lines; incomplete and foreign ones are skipped."""
    try:
        texts = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in map(_parse_line, texts) if line is not None]


def _parse_line(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


MetricLines = Sequence[Mapping[str, Any]]


def select_series(lines: MetricLines, name: str) -> list[tuple[float, float]]:
    """Return (step, value) pairs of a metric, for the steps that have it."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def find_metric_names(lines: MetricLines, prefix: str) -> list[str]:
    """Return the names of all metrics with this prefix, sorted."""
    return sorted({name for line in lines for name in line if name.startswith(prefix)})


def get_last_value(lines: MetricLines, name: str) -> float | None:
    """Return the latest value of a metric."""
    series = select_series(lines, name)
    return series[-1][1] if series else None
