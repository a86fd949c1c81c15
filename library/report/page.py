"""A page about a run, one file that needs nothing else: curves, losses by kind, previews, settings, environment."""

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
from .charts import Curve, render_bar_chart, render_line_chart
from .metric_series import MetricLines, find_metric_names, get_last_value, read_metrics, select_series
from .preview_grid import format_column_label, select_evenly_spaced
from .style import STYLE

SHOWN_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow")


UPDATE_NORM_PREFIX = "update/kind/"


PREVIEW_WIDTH, MAX_PREVIEW_COLUMNS, MAX_PREVIEW_ROWS = 192, 8, 16


@dataclass(frozen=True)
class ReportContext:
    """What the page is about, besides the figures."""

    name: str
    steps: int
    plan: str  # the pictures, buckets and steps in words
    settings: Mapping[str, Any]
    started_at: float
    num_processes: int
    mixed_precision: str
    preview_rows: Sequence[tuple[str, Mapping[str, Path]]]  # of each prompt, when previews were drawn and their files


def write_report(context: ReportContext, metrics_file: Path, target: Path) -> None:
    """Make the page anew from all figures there are so far."""
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
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(context.name)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    new = target.with_name(target.name + ".new")
    new.write_text(page, "utf-8")
    new.replace(target)


def _render_header(context: ReportContext, lines: MetricLines) -> str:
    done = lines[-1]["step"] if lines else 0
    losses = select_series(lines, "loss/average")
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(context.started_at))
    loss = f", loss {losses[-1][1]:.4f} (mean of the last 100 steps)" if losses else ""
    bad = sum(line.get("loss/current", 0.0) is None for line in lines)
    left_out = f"; {bad} steps left out because their loss was no number" if bad else ""
    return (
        f"<h1>{escape(context.name)}</h1><p class=facts>step {done} of {context.steps}{loss}; started {began},"
        f" {context.num_processes} process{'es' if context.num_processes > 1 else ''}, precision"
        f" {escape(context.mixed_precision)}{left_out}</p>"
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
        "Length of the update": render_line_chart([Curve("all layers", select_series(lines, "update/norm"))]),
        "Samples a second": render_line_chart([Curve("samples/s", select_series(lines, "speed/samples_per_second"))]),
        "Seconds waited for data in a step": render_line_chart(
            [Curve("seconds", select_series(lines, "data_wait_seconds"))]
        ),
        "Peak memory (GB)": render_line_chart([Curve("GB", select_series(lines, "memory/peak_gb"))]),
    }
    shown = "".join(f"<div><h3>{escape(title)}</h3>{chart}</div>" for title, chart in charts.items() if chart)
    return f"<h2>Curves</h2><div class=charts>{shown or '<p>no step is done yet</p>'}</div>"


def _render_grouped_losses(lines: MetricLines) -> str:
    """How the loss of each kind of picture changed from the first part of the run to the last."""
    halves = (lines[: (len(lines) + 1) // 2], lines[(len(lines) + 1) // 2 :])
    parts = []
    for prefix, title in (
        ("loss/time/", "Loss by the share of noise"),
        ("loss/bucket/", "Loss by bucket"),
        ("loss/dataset/", "Loss by dataset"),
    ):
        means = [_compute_means(half, prefix) for half in halves]
        kinds = sorted({name for mean in means for name in mean}, key=_get_sort_key)
        if len(kinds) > 1:
            groups = {name: [mean.get(name) for mean in means] for name in kinds}
            parts.append(f"<div><h3>{title}</h3>{render_bar_chart(groups, ('first half', 'second half'))}</div>")
    return f"<h2>Losses by kind</h2><div class=charts>{''.join(parts)}</div>" if parts else ""


def _render_update_norms(lines: MetricLines) -> str:
    """How far each kind of layer moved; known at the end."""
    kinds = find_metric_names(lines, UPDATE_NORM_PREFIX)
    if not kinds:
        return ""
    dead, layers = get_last_value(lines, "update/dead_layers"), get_last_value(lines, "update/layers")
    rows = "".join(
        f"<tr><td>{escape(kind.removeprefix(UPDATE_NORM_PREFIX))}</td><td>{get_last_value(lines, kind):.3g}</td></tr>"
        for kind in kinds
    )
    return (
        f"<h2>What was learnt</h2><p class=facts>length of the update by kind of layer; {dead:g} of {layers:g}"
        f" layers learnt nothing</p><table>{rows}</table>"
    )


def _compute_means(lines: MetricLines, prefix: str) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name in find_metric_names(lines, prefix):
        values[name.removeprefix(prefix)] += [value for _, value in select_series(lines, name)]
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def _get_sort_key(name: str) -> tuple[float, str]:
    """Sizes by their area, shares by their start, and whatever has no number by name."""
    numbers = [float(part) for part in name.replace("-", "x").split("x") if part.replace(".", "", 1).isdigit()]
    return (numbers[0] * (numbers[1] if "x" in name else 1.0) if numbers else 0.0, name)


def _render_previews(rows: Sequence[tuple[str, Mapping[str, Path]]]) -> str:
    times: list[str] = max((list(row) for _, row in rows), key=len, default=[])
    if not times:
        return ""
    times = select_evenly_spaced(times, MAX_PREVIEW_COLUMNS)
    head = "".join(f"<th>{escape(format_column_label(when))}</th>" for when in times)
    body = ""
    for prompt, row in rows[:MAX_PREVIEW_ROWS]:
        cells = "".join(f"<td>{_render_image(row[when]) if when in row else ''}</td>" for when in times)
        body += f"<tr><td>{escape(prompt)}</td>{cells}</tr>"
    return f"<h2>Previews</h2><div class=previews><table><tr><th></th>{head}</tr>{body}</table></div>"


def _render_image(path: Path) -> str:
    from PIL import Image

    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except OSError:
        return "(gone)"
    picture.thumbnail((PREVIEW_WIDTH * 2, PREVIEW_WIDTH * 2))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=88)
    text = base64.b64encode(data.getvalue()).decode()
    return f'<img width="{min(PREVIEW_WIDTH, picture.width * 2)}" src="data:image/jpeg;base64,{text}" alt="">'


def _render_dataset(context: ReportContext) -> str:
    return f"<h2>Pictures and steps</h2><pre>{escape(context.plan)}</pre>"


def _render_environment(context: ReportContext) -> str:
    settings = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in context.settings.items()
    )
    found = {"lorikeet": __version__, "Python": platform.python_version(), "system": platform.platform(terse=True)}
    for package in SHOWN_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in found.items())
    return (
        "<h2>Settings</h2><p class=facts>numbers, switches and choices; texts and paths are left out</p>"
        f"<details><summary>show</summary><table>{settings}</table></details>"
        f"<h2>Environment</h2><table>{rows}</table>"
    )


TIMESTEP_PREFIX = "validation/time/"


def render_validation(lines: MetricLines) -> str:
    """Empty for a run without validation."""
    losses = select_series(lines, "validation/loss")
    if not losses:
        return ""
    base, gains = select_series(lines, "validation/base"), select_series(lines, "validation/gain")
    off = dict(select_series(lines, "validation/gain_interval"))
    lower, upper = ([(step, gain + sign * off[step]) for step, gain in gains if step in off] for sign in (-1, 1))
    charts = {
        "Loss on pictures that are not trained": render_line_chart(
            [Curve("with the LoRA", losses), Curve("base model", base)]
        ),
        "Gain over the base model, with its 95 % interval": render_line_chart(
            [Curve("lower end", lower, is_faint=True), Curve("upper end", upper, is_faint=True), Curve("gain", gains)]
        ),
        "By the quantile of the time": render_bar_chart(
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
    off, loss = get_last_value(lines, "validation/gain_interval"), get_last_value(lines, "validation/loss")
    said = f"after step {step}: loss {loss:.5g}, {abs(gain):.3g} {'below' if gain >= 0 else 'above'} the base model's"
    if off is None:
        return said
    if abs(gain) <= off:
        return f"{said}, which is within the interval of +- {off:.2g}: not to be told from it"
    return f"{said}, by more than the interval of +- {off:.2g}: {'better' if gain > 0 else 'worse'} than the base model"
