"""Search the parallel layouts of a number of GPUs: estimated memory and speed of each, and options that save memory."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config.schema_data import DataConfig
from ..dataloader.batch_plan import AnyBatchPlan, format_bucket_size
from ..errors import ConfigError
from ..models.detect import DetectedModel
from ..models.families import FAMILIES
from ..models.loading import load_components_on_meta
from ..models.trained_components import caches_only_t5, select_trained_text_encoders
from ..parallel.frozen_base import find_innermost_blocks
from ..problems import Place, Problem
from .advice import MARGIN, LayoutEstimate, estimate_layout
from .dry_run import DryRun
from .full_search import build_search
from .meta_run import LargestBatch
from .meta_run_cache import MetaRuns, get_partition
from .parallel_layouts import LAYOUT_OPTIONS, LayoutFinder, ParallelLayout, format_flags
from .step_time import Devices

logger = logging.getLogger(__name__)
GB = 2**30
MAX_BUFFERED_SHAPES = 64
"""Image sizes for which a pipeline keeps its buffers (``parallel/pipeline_schedule``)."""


@dataclass(frozen=True)
class LayoutReport:
    devices: Devices
    batch: LargestBatch
    estimates: Sequence[LayoutEstimate]
    """The estimates of all layouts, fastest first."""
    suggestion: LayoutEstimate | None = None
    """The layout that comes closest, if none fits with any options."""
    advice: Sequence[LayoutEstimate] = ()
    """The fastest options with which the whole model fits, if it does not without; then more exact and slower ones."""

    def fits(self, estimate: LayoutEstimate) -> bool:
        return estimate.memory.total <= self.devices.memory

    def format_text(self) -> str:
        """Format one page: layouts that fit, how much memory the others lack, and what would help if none fits."""
        devices, size, count = self.devices, self.batch.size, len(self.batch.captions)
        precision = self.estimates[0].layout.config.distributed.mixed_precision or "no"
        lines = [
            f"{devices.count} x {devices.memory / GB:.4g} GB, mixed_precision {precision},"
            f" largest micro-batch {count} x {format_bucket_size(size, self.batch.num_frames)}"
        ]
        if fitting := [estimate for estimate in self.estimates if self.fits(estimate)]:
            lines += ["layouts that fit, fastest first (peak GB of the fullest GPU):", *_format_table(fitting)]
            lines.append(
                f"speed: images per second relative to the first, for {devices.flops / 1e12:g} TFLOP/s per device and"
                f" {devices.link_speed / 1e9:g} GB/s between devices (--gpu_tflops, --link_speed)"
            )
        others = sorted((each.memory.total, each.layout.name) for each in self.estimates if not self.fits(each))
        if others:
            lacking = ", ".join(f"{name} {(total - devices.memory) / GB:+.1f}" for total, name in others)
            lines.append(f"layouts that do not fit, and GB over the limit: {lacking}")
        lines += [*self._format_advice(), *([] if fitting or self.advice else self._format_suggestion())]
        return "\n".join(lines)

    def _format_advice(self) -> Iterator[str]:
        """Format a line for each estimate: speed relative to the fastest layout that fits, memory, exactness, flags."""
        if not self.advice:
            return
        first = self.advice[0]
        fitting = [each.images_per_second for each in self.estimates if self.fits(each)]
        yield (
            f"{'faster' if fitting else 'fits'}, {1 - MARGIN:.0%} of the memory at most"
            f" (speed{' relative to the first layout' if fitting else ''} by a model of the step's time):"
        )
        for each in self.advice:
            speed = each.images_per_second / (fitting or [first.images_per_second])[0]
            yield f"  {speed:5.2f}  {each.memory.total / GB:6.2f} GB  {each.precision:<26} {each.flags}"

    def _format_suggestion(self) -> Iterator[str]:
        if self.suggestion is None:
            yield "nothing fits, and no option would change that: the CUDA context and what is trained alone need more"
            return
        memory, name = self.suggestion.memory, self.suggestion.layout.name
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in asdict(memory).items() if size >= GB / 20)
        yield f"nothing fits; {name} needs {memory.total / GB:.1f} GB per device ({parts}) with"
        yield f"  {self.suggestion.flags}"
        if "train_batch_size" in self.suggestion.savings:
            yield "  (batch_size in the dataset TOML takes precedence over --train_batch_size)"
        if not self.fits(self.suggestion):
            lacking = (memory.total - self.devices.memory) / GB
            yield f"  still {lacking:.1f} GB too much: use larger or more devices"

    def export_json(self) -> dict[str, Any]:
        """Build the report as plain data, for JSON."""
        fastest = self.estimates[0].images_per_second
        records = [
            {
                "layout": each.layout.name,
                "options": each.flags,
                "fits": self.fits(each),
                "bytes": {**asdict(each.memory), "total": each.memory.total},
                "relative_speed": round(each.images_per_second / fastest, 3),
            }
            for each in (*self.estimates, *self.advice, *([self.suggestion] if self.suggestion else []))
        ]
        suggestion = {"suggestion": records.pop()} if self.suggestion else {}
        layouts, advice = records[: len(self.estimates)], records[len(self.estimates) :]
        return {"gpu_memory": self.devices.memory, "layouts": layouts, "advice": advice, **suggestion}


def search_layouts(finder: LayoutFinder, batch: LargestBatch, devices: Devices) -> LayoutReport:
    """Estimate every layout that the settings allow; if none fits, suggest options that save memory."""
    if problems := finder.find_rejections():
        raise ConfigError(problems)
    layouts, reasons = finder.find_layouts()
    if not layouts:
        options = [option for option in LAYOUT_OPTIONS if option in finder.explicit]
        place = Place(flag=", ".join(f"--{option}" for option in options))
        unknown = Problem("", "no layout with these options can be estimated", place=place, others=tuple(options))
        raise ConfigError(reasons or [unknown])
    runs = MetaRuns(finder.model, batch)
    report = LayoutReport(devices, batch, estimate_layouts(layouts, finder.model, batch, devices, runs=runs))
    limit = (1 - MARGIN) * devices.memory
    if any(is_whole_model(each.layout) and each.memory.total <= limit for each in report.estimates):
        return report
    slowest = max((each.images_per_second for each in report.estimates if each.memory.total <= limit), default=0.0)
    search = build_search(finder, runs, devices)
    advice = search.advise(limit, slowest)
    if advice or any(map(report.fits, report.estimates)):
        return replace(report, advice=advice)
    smallest = search.find_smallest()
    if smallest is None:
        smallest = suggest_savings(finder, batch, devices, report.estimates, runs)
    elif smallest.memory.reserved + smallest.memory.adapters > devices.memory:
        smallest = None
    return replace(report, suggestion=smallest)


def find_training_batch(dry_run: DryRun, data: DataConfig) -> LargestBatch:
    """Find the largest batch of a run; parts of it can be accumulated where ``train_batch_size`` sets it."""
    prepared, plan = dry_run.prepared, dry_run.plan.batch_plan
    batch = find_largest_batch(plan, prepared.list_first_epoch_captions(plan, dry_run.plan.steps))
    is_sized_in_file = any(dataset.is_set_in_file("batch_size") for dataset in prepared.manifest.datasets)
    return replace(batch, can_be_split=not is_sized_in_file and len(batch.captions) == data.train_batch_size)


def find_largest_batch(plan: AnyBatchPlan, captions: Iterable[str]) -> LargestBatch:
    """Combine the bucket with the most pixels per micro-batch and the longest captions."""
    buckets = [bucket for bucket in plan.buckets if len(bucket.sample_indices)]
    shapes = {
        (
            bucket.batch_size,
            (bucket.resolution, *bucket.control_resolutions),
            bucket.num_frames,
            bucket.has_sound,
            bucket.num_references,
        )
        for bucket in buckets
    }
    pixels_by_shape = {
        shape: shape[0] * sum(width * height for width, height in shape[1]) * shape[2] for shape in shapes
    }
    pixels = sorted(pixels_by_shape.values(), reverse=True)
    count, (size, *control_sizes), num_frames, has_sound, num_references = max(
        shapes, key=lambda shape: (pixels_by_shape[shape], shape[3:])
    )
    longest = sorted(set(captions), key=len, reverse=True)
    buffered_shapes = sum(pixels[:MAX_BUFFERED_SHAPES]) / pixels[0]
    captions = tuple((longest * count)[:count])
    controls = tuple(control_sizes)
    return LargestBatch(
        size,
        captions,
        buffered_shapes,
        controls,
        num_references=num_references,
        num_frames=num_frames,
        has_sound=has_sound,
    )


def estimate_layouts(
    layouts: Sequence[ParallelLayout],
    model: DetectedModel,
    batch: LargestBatch,
    devices: Devices,
    savings: Mapping[str, Any] | None = None,
    runs: MetaRuns | None = None,
) -> list[LayoutEstimate]:
    """Estimate layouts, fastest first; those that partition the model in the same way share a step of ``runs``."""
    runs = MetaRuns(model, batch) if runs is None else runs
    partitions = list(dict.fromkeys(get_partition(layout, model) for layout in layouts))
    estimates = []
    for layout in layouts:
        number = partitions.index(get_partition(layout, model)) + 1
        run = runs.get(layout, f"{layout.name}, {number} of {len(partitions)}")
        estimates.append(estimate_layout(layout, run, runs, devices, savings or {}))
    return sorted(estimates, key=lambda estimate: (-estimate.images_per_second, estimate.memory.total))


def suggest_savings(
    finder: LayoutFinder,
    batch: LargestBatch,
    devices: Devices,
    estimates: Sequence[LayoutEstimate],
    runs: MetaRuns | None = None,
) -> LayoutEstimate | None:
    """Add options that save memory until a layout fits, or all that help; None if no option could ever be enough."""
    candidates = [estimate for estimate in estimates if is_plain(estimate.layout)] or estimates
    names = {estimate.layout.name for estimate in candidates}
    smallest = min(candidates, key=lambda estimate: estimate.memory.total)
    if smallest.memory.reserved + smallest.memory.adapters > devices.memory:
        return None
    savings = dict[str, Any]()
    adapter, optim, facts = finder.config.adapter, finder.config.optim, FAMILIES.get(finder.model.family).facts
    can_cache_texts = not select_trained_text_encoders(adapter, optim, facts) or caches_only_t5(adapter, optim, facts)
    for options in _list_savings(finder.model, can_cache_texts):
        changed = finder.add_options(options)
        if changed is None:
            continue
        tried = {**savings, **options}
        logger.info("estimating memory: no layout fits; trying %s", format_flags(options))
        layouts = [layout for layout in changed.find_layouts()[0] if layout.name in names]
        largest = replace(batch, captions=batch.captions[: tried.get("train_batch_size")])
        changed_estimates = estimate_layouts(
            layouts, finder.model, largest, devices=devices, savings=tried, runs=runs if largest == batch else None
        )
        if fitting := [estimate for estimate in changed_estimates if estimate.memory.total <= devices.memory]:
            return min(fitting, key=lambda estimate: (-estimate.images_per_second, len(estimate.layout.options)))
        best = min([smallest, *changed_estimates], key=lambda estimate: estimate.memory.total)
        if best is not smallest:
            smallest, savings, finder = best, tried, changed
    return smallest if savings else None


def is_whole_model(layout: ParallelLayout) -> bool:
    """Whether each device holds the whole model, and no engine offloads anything."""
    return is_plain(layout) and layout.sharding is None and layout.zero is None


def is_plain(layout: ParallelLayout) -> bool:
    """Whether it is data parallel, sharded or not, without offloading."""
    return layout.dims.model_parallel_size == 1 and not any(
        "offload" in name or "map" in name for name in layout.options
    )


def _list_savings(model: DetectedModel, can_cache_texts: bool) -> Iterator[dict[str, Any]]:
    """Yield options that save memory: first those that cost nothing, last those that change the trained LoRA."""
    yield {"cache_latents": True}
    if can_cache_texts:
        yield {"cache_text_encoder_outputs": True}
    yield {"mixed_precision": "bf16"}
    yield {"gradient_checkpointing": True}
    yield {"quantize_base": "int8"}
    yield {"quantize_base": "nf4"}
    part = FAMILIES.get(model.family).facts.denoiser_name
    yield {"blocks_to_swap": len(find_innermost_blocks(getattr(load_components_on_meta(model, (part,)), part)))}
    yield {"gradient_checkpointing": True, "cpu_offload_checkpointing": True}
    yield {"train_batch_size": 1}


def _format_table(estimates: Sequence[LayoutEstimate]) -> Iterator[str]:
    names = [name for name in asdict(estimates[0].memory) if any(getattr(each.memory, name) for each in estimates)]
    rows = [["speed", "total", *names, "layout", "options"]]
    for each in estimates:
        speed = f"{each.images_per_second / estimates[0].images_per_second:.2f}"
        sizes = [f"{getattr(each.memory, name) / GB:.2f}" for name in ("total", *names)]
        rows.append([speed, *sizes, each.layout.name, each.flags])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *numbers, layout, flags in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)]
        yield f"  {'  '.join(cells)}  {layout.ljust(widths[-2])}  {flags}".rstrip()
