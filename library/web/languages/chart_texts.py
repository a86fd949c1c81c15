"""What charts and ages say, so that it is in the catalogues: it is made from data, not written in a template."""

from collections.abc import Callable, Sequence
from typing import Any

from ...report.charts import Chart

INTERVAL = ", with 95 % confidence interval"
MEASURED = (
    "Likeness",
    "Copying",
    "Drift",
    "Composed likeness",
    "Prompt following",
    "Composed prompt following",
)
CHART_TITLES = (
    "Loss",
    "Learning rate",
    "Loss by noise level",
    "Loss by noise level over the steps",
    "Loss by bucket",
    "Loss by dataset",
    "Loss (mean of 100 steps)",
    "Loss on validation images",
    "Gain over the base model",
    f"Gain over the base model{INTERVAL}",
    "By timestep quantile",
    "By dataset",
    "Samples per second",
    "Peak memory (GB)",
    "Gradient norm",
    "Update norm",
    "Data wait (s)",
    "Likeness",
    "Copying",
    "Drift",
    *(f"{title}{INTERVAL}" for title in MEASURED),
)
CURVE_NAMES = (
    "each step",
    "mean of 100 steps",
    "with the LoRA",
    "base model",
    "gain",
    "first half",
    "second half",
    "samples/s",
    "gradient norm",
    "all layers",
    "seconds per step",
    *(title.lower() for title in MEASURED),
)
"""The names that are not those of runs, buckets, datasets and parts of the model."""

AGES = ("now", "1 minute ago", "{0} minutes ago", "1 hour ago", "{0} hours ago", "1 day ago", "{0} days ago")


def export_charts(charts: Sequence[Chart], translate: Callable[..., str], *, names_are_runs: bool = False) -> list[Any]:
    """Export charts as JSON with titles and curves in the language of the reader."""
    exported = []
    for chart in charts:
        data = chart.export_json()
        data["title"] = translate(chart.title)
        for curve in data["curves"]:
            if not names_are_runs and curve["name"] in CURVE_NAMES:
                curve["name"] = translate(curve["name"])
        exported.append(data)
    return exported


def choose_age_text(seconds: float) -> tuple[str, int]:
    """Choose the text of ``AGES`` that says how long ago something was, and the number to fill in."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return (f"1 {unit} ago" if count == 1 else f"{{0}} {unit}s ago"), count
    return "now", 0
