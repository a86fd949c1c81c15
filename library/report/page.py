"""The report of a run, one self-contained HTML file: curves, grouped losses, previews, settings, environment."""

import base64
import io
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..atomic_files import write_atomic
from ..dataset.clip_encoding import decode_animation, encode_webp, select_spread_frames
from .charts import build_curves, build_group_charts, build_validation_charts
from .metric_series import MetricTable
from .preview_grid import PreviewRow, format_column_label, select_evenly_spaced
from .rendering import build_environment, read_assets

SHOWN_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow")
UPDATE_NORM_PREFIX = "update/kind/"
PREVIEW_WIDTH, MAX_PREVIEW_COLUMNS, MAX_PREVIEW_ROWS = 192, 8, 16
MAX_PREVIEW_FRAMES, CLIP_QUALITY = 24, 60
"""Frames of a clip on the page, which is one file; those that are left out do not shorten it."""


@dataclass(frozen=True)
class RunSummary:
    """A run besides its metrics and previews; ``NAME.run.json`` holds this from the first step on."""

    name: str
    steps: int
    plan: str  # summary of images, buckets and steps
    settings: Mapping[str, Any]
    """The settings that the report shows, which are those that hold nothing private."""

    started_at: float
    num_processes: int
    mixed_precision: str
    prompts: Sequence[str] = ()
    all_settings: Mapping[str, Any] = field(default_factory=dict)
    """All that differ from the defaults; they stay on this disk."""

    def write(self, path: Path) -> None:
        write_atomic(path, (json.dumps(asdict(self), ensure_ascii=False, indent=1, default=str) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> "RunSummary | None":
        """Read the facts of a run; None if there are none, or those of another version."""
        try:
            summary = cls(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return summary if summary._has_known_types() else None

    def _has_known_types(self) -> bool:
        texts, counts = (self.name, self.plan, self.mixed_precision), (self.steps, self.num_processes)
        are_known = all(isinstance(each, str) for each in texts) and all(type(each) is int for each in counts)
        are_known &= isinstance(self.started_at, int | float) and 0 <= self.started_at < 2**40
        are_known &= isinstance(self.settings, dict) and isinstance(self.all_settings, dict)
        return (
            are_known and isinstance(self.prompts, list | tuple) and all(isinstance(each, str) for each in self.prompts)
        )


def write_report(facts: RunSummary, previews: Mapping[int, PreviewRow], metrics_file: Path, target: Path) -> None:
    """Write the report from all metrics so far, replacing an earlier one; ``previews`` by number of the prompt."""
    table = MetricTable(metrics_file)
    table.read_new_lines()
    write_atomic(target, format_report_page(facts, previews, table).encode())


def format_report_page(facts: RunSummary, previews: Mapping[int, PreviewRow], table: MetricTable) -> str:
    """Format the report as HTML."""
    rows = [(facts.prompts[number], previews[number]) for number in sorted(previews) if number < len(facts.prompts)]
    columns: list[str] = max((list(row) for _, row in rows), key=len, default=[])
    columns = select_evenly_spaced(columns, MAX_PREVIEW_COLUMNS)
    template = build_environment().get_template("report.html")
    return template.render(
        context=facts,
        facts=describe_progress(facts, table),
        curves=[chart.export_json() for chart in build_curves(table)],
        validation=[chart.export_json() for chart in build_validation_charts(table)],
        verdict=describe_validation(table),
        groups=[chart.export_json() for chart in build_group_charts(table)],
        norms=collect_update_norms(table),
        columns=[format_column_label(column) for column in columns],
        preview_rows=[
            (prompt, [_encode_image(row[column]) if column in row else None for column in columns])
            for prompt, row in rows[:MAX_PREVIEW_ROWS]
        ],
        environment=_describe_environment(),
        **read_assets(),
    )


def describe_progress(facts: RunSummary, table: MetricTable) -> str:
    """Say how far the run is, and how it was started."""
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.started_at))
    average, skipped = table.get_last("loss/average"), table.num_skipped_steps
    loss = f", loss {average:.4f} (mean of the last 100 steps)" if average is not None else ""
    nan_steps = f"; {skipped} step{'s' * (skipped > 1)} skipped (NaN or Inf)" if skipped else ""
    processes = f"{facts.num_processes} process{'es' if facts.num_processes > 1 else ''}"
    return (
        f"step {table.last_step} of {facts.steps}{loss}; started {started}, {processes},"
        f" precision {facts.mixed_precision}{nan_steps}"
    )


def describe_validation(table: MetricTable) -> str:
    """Say whether the LoRA is better than the base model on the validation images; empty without a result."""
    gain, loss = table.get_last("validation/gain"), table.get_last("validation/loss")
    if gain is None or loss is None:
        return ""
    step, margin = int(table.series["validation/gain"].steps[-1]), table.get_last("validation/gain_interval")
    text = f"after step {step}: loss {loss:.5g}, {abs(gain):.3g} {'below' if gain >= 0 else 'above'} the base model's"
    if margin is None:
        return text
    if abs(gain) <= margin:
        return f"{text}, within the confidence interval of +- {margin:.2g}: no significant difference"
    verdict = f"{'better' if gain > 0 else 'worse'} than the base model"
    return f"{text}, outside the confidence interval of +- {margin:.2g}: {verdict}"


def collect_update_norms(table: MetricTable) -> dict[str, Any]:
    """Collect the update norms, which are computed after the last step; empty before."""
    names = table.find_names(UPDATE_NORM_PREFIX)
    if not names:
        return {}
    by_type = {name.removeprefix(UPDATE_NORM_PREFIX): table.get_last(name) for name in names}
    dead, layers = table.get_last("update/dead_layers"), table.get_last("update/layers")
    return {"by_type": by_type, "dead": dead, "layers": layers}


def _encode_image(path: Path) -> dict[str, Any]:
    """Encode a preview for the page; empty if its file is gone."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            is_clip = getattr(file, "n_frames", 1) > 1
            image = file.convert("RGB")
        content = _encode_small_clip(path.read_bytes()) if is_clip else b""
    except OSError:
        return {}
    image.thumbnail((PREVIEW_WIDTH * 2, PREVIEW_WIDTH * 2))
    if not is_clip:
        data = io.BytesIO()
        image.save(data, "JPEG", quality=88)
        content = data.getvalue()
    url = f"data:image/{'webp' if is_clip else 'jpeg'};base64,{base64.b64encode(content).decode()}"
    return {"url": url, "width": min(PREVIEW_WIDTH, image.width * 2)}


def _encode_small_clip(data: bytes) -> bytes:
    frames, fps = decode_animation(data)
    shown = select_spread_frames(frames, MAX_PREVIEW_FRAMES)
    for frame in shown:
        frame.thumbnail((PREVIEW_WIDTH, PREVIEW_WIDTH))
    return encode_webp(shown, fps * len(shown) / len(frames), CLIP_QUALITY)


def _describe_environment() -> str:
    versions = {"lorikeet": __version__, "Python": platform.python_version(), "system": platform.platform(terse=True)}
    for package in SHOWN_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return ", ".join(f"{name} {value}" for name, value in versions.items())
