"""The charts of a run as data, which ``static/charts.js`` draws with uPlot in the report and on the web page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .metric_series import MetricSeries, MetricTable, Points

LINES, BARS = "lines", "bars"
TIMESTEP_PREFIX = "validation/timestep/"
GROUPS = (
    ("loss/timestep/", "Loss by noise level"),
    ("loss/bucket/", "Loss by bucket"),
    ("loss/dataset/", "Loss by dataset"),
)
MAX_BARS = 24
EVALUATION_METRICS = (
    ("Likeness", "likeness"),
    ("Copying", "copying"),
    ("Drift", "drift"),
    ("Composed likeness", "composed_likeness"),
    ("Prompt following", "prompt_following"),
    ("Composed prompt following", "composed_prompt_following"),
)


@dataclass(frozen=True)
class Curve:
    """One curve, or one bar of each group."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """The band around the curve: extremes of neighboring steps, or a confidence interval."""
    is_faint: bool = False

    @classmethod
    def from_series(cls, name: str, series: MetricSeries, *, is_faint: bool = False) -> "Curve":
        low, high = series.bounds or ([], [])
        return cls(name=name, x=series.steps, y=series.means, low=low, high=high, is_faint=is_faint)


@dataclass(frozen=True)
class Chart:
    """One chart; bars have a label for each group, lines the step as x."""

    title: str
    curves: Sequence[Curve]
    kind: str = LINES
    labels: Sequence[str] = ()

    def export_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "kind": self.kind,
            "labels": list(self.labels),
            "curves": [*map(asdict, self.curves)],
        }


def build_curves(table: MetricTable) -> list[Chart]:
    """Build the charts of everything that changes with the steps."""
    rates = [(name.removeprefix("lr/"), name) for name in table.find_names("lr/")]
    by_time = [(name.removeprefix("loss/timestep/"), name) for name in table.find_names("loss/timestep/")]
    charts = [
        _build_loss_chart(table),
        _build_chart(table, "Learning rate", rates),
        _build_chart(table, "Loss by noise level over the steps", by_time),
        _build_chart(table, "Samples per second", [("samples/s", "speed/samples_per_second")]),
        _build_chart(table, "Peak memory (GB)", [("GB", "memory/peak_gb")]),
        _build_chart(table, "Gradient norm", [("gradient norm", "gradient_norm")]),
        _build_chart(table, "Update norm", [("all layers", "update/norm")]),
        _build_chart(table, "Data wait (s)", [("seconds per step", "data_wait_seconds")]),
    ]
    return [chart for chart in charts if chart.curves]


def build_validation_charts(table: MetricTable) -> list[Chart]:
    """Build the charts of the validation loss, and of what the run measured of its pictures; none without either."""
    return [*_build_loss_charts(table), *_build_evaluation_charts(table)]


def _build_evaluation_charts(table: MetricTable) -> list[Chart]:
    """Build a chart of each metric of generated pictures, with its confidence interval."""
    charts = []
    for title, metric in EVALUATION_METRICS:
        curve = _build_interval_curve(table, title, f"evaluation/{metric}")
        charts += [Chart(f"{title}, with 95 % confidence interval", [curve])] if curve is not None else []
    return charts


def _build_interval_curve(table: MetricTable, title: str, metric: str) -> Curve | None:
    if metric not in table.series:
        return None
    points = table.series[metric].points
    bounds = []
    for name in ("low", "high"):
        series = table.series.get(f"{metric}/{name}")
        known = dict(series.points) if series is not None else {}
        bounds.append([known.get(step, value) for step, value in points])
    low, high = bounds
    return Curve(title.lower(), [step for step, _ in points], [value for _, value in points], low, high)


def _build_loss_charts(table: MetricTable) -> list[Chart]:
    if "validation/loss" not in table.series:
        return []
    losses = [("with the LoRA", "validation/loss"), ("base model", "validation/base")]
    datasets = [(name.removeprefix("validation/"), name) for name in table.find_names("validation/dataset/")]
    times = table.find_names(TIMESTEP_PREFIX)
    bars = [
        ("base model", [table.get_last(name.replace("validation/", "validation/base/")) for name in times]),
        ("with the LoRA", [table.get_last(name) for name in times]),
    ]
    charts = [
        _build_chart(table, "Loss on validation images", losses),
        _build_gain_chart(table),
        _build_bars("By timestep quantile", [name.removeprefix(TIMESTEP_PREFIX) for name in times], bars),
        _build_chart(table, "By dataset", datasets),
    ]
    return [chart for chart in charts if chart.curves]


def build_group_charts(table: MetricTable) -> list[Chart]:
    """Compare the mean losses of the first and second half of the run by noise level, bucket and dataset."""
    middle, charts = table.last_step / 2, []
    for prefix, title in GROUPS:
        labels = [name.removeprefix(prefix) for name in table.find_names(prefix)]
        labels = sorted(labels, key=_get_sort_key)[:MAX_BARS]
        if len(labels) > 1:
            series = [table.series[f"{prefix}{label}"] for label in labels]
            first = [each.compute_mean(0, middle) for each in series]
            second = [each.compute_mean(middle, float("inf")) for each in series]
            charts.append(_build_bars(title, labels, [("first half", first), ("second half", second)]))
    return charts


def build_comparison_charts(tables: Mapping[str, MetricTable]) -> list[Chart]:
    """Lay several runs over each other, a curve for each run."""
    metrics = [
        ("Loss (mean of 100 steps)", "loss/average"),
        ("Loss on validation images", "validation/loss"),
        ("Gain over the base model", "validation/gain"),
        ("Likeness", "evaluation/likeness"),
        ("Copying", "evaluation/copying"),
        ("Drift", "evaluation/drift"),
        ("Learning rate", "lr/unet"),
        ("Samples per second", "speed/samples_per_second"),
        ("Peak memory (GB)", "memory/peak_gb"),
        ("Gradient norm", "gradient_norm"),
        ("Update norm", "update/norm"),
    ]
    charts = []
    for title, metric in metrics:
        found = {name: table.series[metric] for name, table in tables.items() if metric in table.series}
        curves = [Curve(name, series.steps, series.means) for name, series in found.items()]
        charts += [Chart(title, curves)] if curves else []
    return charts


def _build_loss_chart(table: MetricTable) -> Chart:
    curves = []
    if "loss/current" in table.series:
        curves.append(Curve.from_series("each step", table.series["loss/current"], is_faint=True))
    if "loss/average" in table.series:
        average = table.series["loss/average"]
        curves.append(Curve("mean of 100 steps", average.steps, average.means))
    return Chart("Loss", curves)


def _build_gain_chart(table: MetricTable) -> Chart:
    gains: Points = table.series["validation/gain"].points if "validation/gain" in table.series else []
    series = table.series.get("validation/gain_interval")
    margins = dict(series.points) if series is not None else {}
    low, high = ([gain + sign * margins.get(step, 0.0) for step, gain in gains] for sign in (-1, 1))
    curve = Curve("gain", [step for step, _ in gains], [gain for _, gain in gains], low, high)
    return Chart("Gain over the base model, with 95 % confidence interval", [curve] if gains else [])


def _build_chart(table: MetricTable, title: str, names: Sequence[tuple[str, str]]) -> Chart:
    return Chart(title, [Curve.from_series(name, table.series[key]) for name, key in names if key in table.series])


def _build_bars(title: str, labels: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]]) -> Chart:
    positions = [float(number) for number in range(len(labels))]
    curves = [Curve(name, positions, values) for name, values in rows]
    return Chart(title, curves if labels else [], BARS, labels)


def _get_sort_key(name: str) -> tuple[float, str]:
    """Sort sizes by area, ranges by their start, and names without numbers alphabetically."""
    numbers = [float(part) for part in name.replace("-", "x").split("x") if part.replace(".", "", 1).isdigit()]
    return (numbers[0] * (numbers[1] if "x" in name else 1.0) if numbers else 0.0, name)
