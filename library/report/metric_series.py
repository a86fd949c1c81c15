"""Every figure of a run in one file, a line of JSON for each step, whatever trackers there are."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The figures in the file; a line that was cut off, or that something else wrote, is none."""
    try:
        texts = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in map(_parse_line, texts) if line is not None]


def _parse_line(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


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
