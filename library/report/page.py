"""The report of a run, one self-contained HTML file: curves, grouped losses, previews, settings, environment."""

import base64
import io
import platform
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..atomic_files import write_atomic
from .charts import Curve, render_bar_chart, render_line_chart
from .metric_series import MetricLines, find_metric_names, get_last_value, read_metrics, select_series
from .preview_grid import format_column_label, select_evenly_spaced
from .style import STYLE

SHOWN_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow")
UPDATE_NORM_PREFIX = "update/kind/"
TIMESTEP_PREFIX = "validation/time/"
PREVIEW_WIDTH, MAX_PREVIEW_COLUMNS, MAX_PREVIEW_ROWS = 192, 8, 16


@dataclass(frozen=True)
class ReportContext:
    """What the report shows besides the metrics."""

    name: str
    steps: int
    plan: str  # summary of images, buckets and steps
    settings: Mapping[str, Any]
    started_at: float
    num_processes: int
    mixed_precision: str
    preview_rows: Sequence[tuple[str, Mapping[str, Path]]]  # prompt -> its preview files by step or epoch


def write_report(context: ReportContext, metrics_file: Path, target: Path) -> None:
    """Write the report from all metrics so far, replacing an earlier one."""
    lines = read_metrics(metrics_file)
    parts = [
        _render_header(context, lines),
        _render_curves(lines),
        render_validation(lines),
        _render_grouped_losses(lines),
        _render_update_norms(lines),
        _render_previews(context.preview_rows),
        _render_dataset(context),
        _render_environment(context),
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(context.name)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    write_atomic(target, page.encode())


def _render_header(context: ReportContext, lines: MetricLines) -> str:
    step = lines[-1]["step"] if lines else 0
    losses = select_series(lines, "loss/average")
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(context.started_at))
    loss = f", loss {losses[-1][1]:.4f} (mean of the last 100 steps)" if losses else ""
    num_skipped = sum(line.get("loss/current", 0.0) is None for line in lines)
    skipped = f"; {num_skipped} step{'s' * (num_skipped > 1)} skipped (NaN or Inf)" if num_skipped else ""
    return (
        f"<h1>{escape(context.name)}</h1><p class=facts>step {step} of {context.steps}{loss}; started {started},"
        f" {context.num_processes} process{'es' if context.num_processes > 1 else ''}, precision"
        f" {escape(context.mixed_precision)}{skipped}</p>"
    )


def _render_curves(lines: MetricLines) -> str:
    rates = [Curve(name, select_series(lines, name)) for name in find_metric_names(lines, "lr/")]
    charts = {
        "Loss": render_line_chart(
            [
                Curve("mean of 100 steps", select_series(lines, "loss/average")),
                Curve("each step", select_series(lines, "loss/current"), is_faint=True),
            ][::-1]
        ),
        "Learning rate": render_line_chart(rates),
        "Gradient norm": render_line_chart([Curve("gradient norm", select_series(lines, "gradient_norm"))]),
        "Update norm": render_line_chart([Curve("all layers", select_series(lines, "update/norm"))]),
        "Samples per second": render_line_chart([Curve("samples/s", select_series(lines, "speed/samples_per_second"))]),
        "Data wait (s)": render_line_chart([Curve("seconds per step", select_series(lines, "data_wait_seconds"))]),
        "Peak memory (GB)": render_line_chart([Curve("GB", select_series(lines, "memory/peak_gb"))]),
    }
    shown = "".join(f"<div><h3>{escape(title)}</h3>{chart}</div>" for title, chart in charts.items() if chart)
    return f"<h2>Curves</h2><div class=charts>{shown or '<p>no steps yet</p>'}</div>"


def _render_grouped_losses(lines: MetricLines) -> str:
    """Compare the mean losses of the first and second half of the run by noise level, bucket and dataset."""
    halves = (lines[: (len(lines) + 1) // 2], lines[(len(lines) + 1) // 2 :])
    parts = []
    for prefix, title in (
        ("loss/time/", "Loss by noise level"),
        ("loss/bucket/", "Loss by bucket"),
        ("loss/dataset/", "Loss by dataset"),
    ):
        means = [_compute_means(half, prefix) for half in halves]
        names = sorted({name for mean in means for name in mean}, key=_get_sort_key)
        if len(names) > 1:
            groups = {name: [mean.get(name) for mean in means] for name in names}
            parts.append(f"<div><h3>{title}</h3>{render_bar_chart(groups, ('first half', 'second half'))}</div>")
    return f"<h2>Grouped losses</h2><div class=charts>{''.join(parts)}</div>" if parts else ""


def _render_update_norms(lines: MetricLines) -> str:
    """List the update norms, which are computed after the last step."""
    types = find_metric_names(lines, UPDATE_NORM_PREFIX)
    if not types:
        return ""
    dead, layers = get_last_value(lines, "update/dead_layers"), get_last_value(lines, "update/layers")
    rows = "".join(
        f"<tr><td>{escape(name.removeprefix(UPDATE_NORM_PREFIX))}</td><td>{get_last_value(lines, name):.3g}</td></tr>"
        for name in types
    )
    return (
        f"<h2>Update norms</h2><p class=facts>by layer type; {dead:g} of {layers:g} layers were not updated</p>"
        f"<table>{rows}</table>"
    )


def _compute_means(lines: MetricLines, prefix: str) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name in find_metric_names(lines, prefix):
        values[name.removeprefix(prefix)] += [value for _, value in select_series(lines, name)]
    return {name: sum(series) / len(series) for name, series in values.items() if series}


def _get_sort_key(name: str) -> tuple[float, str]:
    """Sort sizes by area, ranges by their start, and names without numbers alphabetically."""
    numbers = [float(part) for part in name.replace("-", "x").split("x") if part.replace(".", "", 1).isdigit()]
    return (numbers[0] * (numbers[1] if "x" in name else 1.0) if numbers else 0.0, name)


def _render_previews(rows: Sequence[tuple[str, Mapping[str, Path]]]) -> str:
    columns: list[str] = max((list(row) for _, row in rows), key=len, default=[])
    if not columns:
        return ""
    columns = select_evenly_spaced(columns, MAX_PREVIEW_COLUMNS)
    head = "".join(f"<th>{escape(format_column_label(column))}</th>" for column in columns)
    body = ""
    for prompt, row in rows[:MAX_PREVIEW_ROWS]:
        cells = "".join(f"<td>{_render_image(row[column]) if column in row else ''}</td>" for column in columns)
        body += f"<tr><td>{escape(prompt)}</td>{cells}</tr>"
    return f"<h2>Previews</h2><div class=previews><table><tr><th></th>{head}</tr>{body}</table></div>"


def _render_image(path: Path) -> str:
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except OSError:
        return "(file not found)"
    image.thumbnail((PREVIEW_WIDTH * 2, PREVIEW_WIDTH * 2))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=88)
    text = base64.b64encode(data.getvalue()).decode()
    return f'<img width="{min(PREVIEW_WIDTH, image.width * 2)}" src="data:image/jpeg;base64,{text}" alt="">'


def _render_dataset(context: ReportContext) -> str:
    return f"<h2>Images and steps</h2><pre>{escape(context.plan)}</pre>"


def _render_environment(context: ReportContext) -> str:
    settings = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in context.settings.items()
    )
    versions = {"lorikeet": __version__, "Python": platform.python_version(), "system": platform.platform(terse=True)}
    for package in SHOWN_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in versions.items())
    return (
        "<h2>Settings</h2><p class=facts>without free text and paths</p>"
        f"<details><summary>show</summary><table>{settings}</table></details>"
        f"<h2>Environment</h2><table>{rows}</table>"
    )


def render_validation(lines: MetricLines) -> str:
    """Render the validation losses; empty for a run without validation."""
    losses = select_series(lines, "validation/loss")
    if not losses:
        return ""
    base, gains = select_series(lines, "validation/base"), select_series(lines, "validation/gain")
    margins = dict(select_series(lines, "validation/gain_interval"))
    lower, upper = ([(x, gain + sign * margins[x]) for x, gain in gains if x in margins] for sign in (-1, 1))
    charts = {
        "Loss on validation images": render_line_chart([Curve("with the LoRA", losses), Curve("base model", base)]),
        "Gain over the base model, with 95 % confidence interval": render_line_chart(
            [
                Curve("lower bound", lower, is_faint=True),
                Curve("upper bound", upper, is_faint=True),
                Curve("gain", gains),
            ]
        ),
        "By timestep quantile": render_bar_chart(
            {
                name.removeprefix(TIMESTEP_PREFIX): [
                    get_last_value(lines, name.replace("validation/", "validation/base/")),
                    get_last_value(lines, name),
                ]
                for name in find_metric_names(lines, TIMESTEP_PREFIX)
            },
            ("base model", "with the LoRA"),
        ),
        "By dataset": render_line_chart(
            [
                Curve(name.removeprefix("validation/"), select_series(lines, name))
                for name in find_metric_names(lines, "validation/dataset/")
            ]
        ),
    }
    shown = "".join(f"<div><h3>{title}</h3>{chart}</div>" for title, chart in charts.items() if chart)
    return f"<h2>Validation</h2><p class=facts>{_format_result(lines)}</p><div class=charts>{shown}</div>"


def _format_result(lines: MetricLines) -> str:
    step, gain = select_series(lines, "validation/gain")[-1]
    margin, loss = get_last_value(lines, "validation/gain_interval"), get_last_value(lines, "validation/loss")
    text = f"after step {step}: loss {loss:.5g}, {abs(gain):.3g} {'below' if gain >= 0 else 'above'} the base model's"
    if margin is None:
        return text
    if abs(gain) <= margin:
        return f"{text}, within the confidence interval of +- {margin:.2g}: no significant difference"
    verdict = f"{'better' if gain > 0 else 'worse'} than the base model"
    return f"{text}, outside the confidence interval of +- {margin:.2g}: {verdict}"
