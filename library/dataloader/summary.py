"""Summarize datasets and buckets of a batch plan: a table for the log, JSON, and rows for the contact sheet."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dataset.dataset_config import collect_extra_keys, convert_to_sd_scripts
from ..dataset.mask_files import Mask, get_mask_source
from .batch_plan import AnyBatchPlan, PlannedStage, format_bucket_size, get_planned_stages
from .buckets import BucketAssignment
from .manifest import ClipSummary, Manifest, Sample


@dataclass(frozen=True)
class BucketSummary:
    """One bucket of one dataset in one epoch."""

    dataset_index_in_file: int  # the number of the dataset in the file
    resolution: tuple[int, int]
    sample_indices: tuple[int, ...]  # positions in the manifest
    samples_per_epoch: int  # counts repeats
    batch_size: int
    num_micro_batches: int  # counts global micro-batches, each of all ranks
    remainder: int  # samples that do not fill a step
    padding: int  # samples of weight 0
    mean_cropped_fraction: float  # fraction of an image
    most_cropped_sample: int  # position in the manifest
    max_cropped_fraction: float
    from_step: int = 0  # the first step of the stage
    control_resolutions: tuple[tuple[int, int], ...] = ()
    num_frames: int = 1
    has_sound: bool = False


def summarize_buckets(assignments: Sequence[BucketAssignment], batch_plan: AnyBatchPlan) -> list[BucketSummary]:
    """Summarize all buckets, in the order of the plan."""
    return [facts for stage in get_planned_stages(batch_plan) for facts in summarize_stage_buckets(assignments, stage)]


def summarize_stage_buckets(assignments: Sequence[BucketAssignment], stage: PlannedStage) -> list[BucketSummary]:
    """Summarize the buckets of one stage."""
    found, plan = [], stage.batch_plan
    for index, bucket in enumerate(plan.buckets):
        losses = [assignments[sample].cropped_fraction for sample in bucket.sample_indices]
        worst_loss, shown = max(losses), plan.count_samples(index)
        found.append(
            BucketSummary(
                dataset_index_in_file=bucket.dataset_index_in_file,
                from_step=stage.first_step,
                resolution=bucket.resolution,
                control_resolutions=bucket.control_resolutions,
                num_frames=bucket.num_frames,
                has_sound=bucket.has_sound,
                sample_indices=tuple(bucket.sample_indices),
                samples_per_epoch=shown,
                batch_size=bucket.batch_size,
                num_micro_batches=plan.count_micro_batches(index),
                remainder=shown % (bucket.batch_size * plan.dp_size * plan.accumulation_steps),
                padding=plan.count_padding(index),
                mean_cropped_fraction=sum(losses) / len(losses),
                most_cropped_sample=bucket.sample_indices[losses.index(worst_loss)],
                max_cropped_fraction=worst_loss,
            )
        )
    return found


def export_bucket(manifest: Manifest, summary: BucketSummary) -> dict[str, object]:
    """Export a bucket as JSON."""
    return {
        "size": list(summary.resolution),
        "frames": summary.num_frames,
        "controls": [list(size) for size in summary.control_resolutions],
        "images": len(summary.sample_indices),
        "samples": summary.samples_per_epoch,
        "batch_size": summary.batch_size,
        "micro_batches": summary.num_micro_batches,
        "remainder": summary.remainder,
        "padding": summary.padding,
        "crop_loss": {
            "mean": summary.mean_cropped_fraction,
            "worst": summary.max_cropped_fraction,
            "worst_image": str(manifest.samples[summary.most_cropped_sample].image),
        },
    }


def format_data_summary(
    manifest: Manifest, assignments: Sequence[BucketAssignment], batch_plan: AnyBatchPlan, total_steps: int
) -> str:
    """Format images, buckets and the number of steps of a run as text."""
    stages = get_planned_stages(batch_plan)
    lines = [_format_subsets(manifest), *_format_clips(manifest), *manifest.notes]
    for number, stage in enumerate(stages, 1):
        end = total_steps if stage.end_step is None else min(stage.end_step, total_steps)
        if len(stages) > 1:
            lines.append(f"stage {number} of {len(stages)}: steps {stage.first_step + 1} to {end}")
        lines += [_format_bucket_table(manifest, summarize_stage_buckets(assignments, stage)), _format_epoch(stage)]
        what = "the run" if len(stages) == 1 else "the stage"
        steps = end - stage.first_step
        epochs = _format_plural(steps / _compute_steps_per_epoch(stage), "epoch")
        lines.append(f"{what}: {_format_count(steps, 'step')} = {epochs}")
    return "\n".join(lines if len(stages) == 1 else [*lines, f"the run: {total_steps} steps in {len(stages)} stages"])


def _format_subsets(manifest: Manifest) -> str:
    repeats: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    masks: Counter[tuple[int, int]] = Counter()
    controls: Counter[tuple[int, int]] = Counter()
    for sample in manifest.samples:
        repeats[sample.dataset_index, sample.subset_index].append(sample.repeats)
        masks[sample.dataset_index, sample.subset_index] += sample.mask is not None
        controls[sample.dataset_index, sample.subset_index] += len(sample.controls)
    lines = []
    for number, index, ending, captions, found in manifest.caption_counts:
        subset = manifest.datasets[number].subsets[index]
        mine = repeats[number, index]
        clips = [clip for clip in manifest.clips if (clip.dataset_index, clip.subset_index) == (number, index)]
        noun = "window" if clips else "image"
        kind = f"regularization {noun}" if subset.is_reg else noun
        masked = f", masks {masks[number, index]}/{len(mine)}" if get_mask_source(subset) else ""
        masked += f", control images {controls[number, index]}" if controls[number, index] else ""
        what = _format_count(len(mine), kind) + (f" of {_format_count(len(clips), 'clip')}" if clips else "")
        name = f"dataset {manifest.datasets[number].dataset_index_in_file + 1}"
        lines.append(
            f"{name}, {subset.source}: {what}{_format_repeats(mine)}, captions"
            f" found {captions}/{found} ({ending or 'no extension'}){masked}"
        )
    return "\n".join(lines)


MAX_CLIPS_SHOWN = 40
"""The number of clips up to which all are listed."""


def _format_clips(manifest: Manifest) -> list[str]:
    """Format a line for each clip: its frames, and the windows that it gives; of many, those of the first ones."""
    lines = []
    for clip in manifest.clips[:MAX_CLIPS_SHOWN]:
        windows = ", ".join(f"{count} x {length}" for length, count in clip.windows) or "none"
        frames = f"{clip.frames.num_frames} frames"
        if clip.frames.duration:
            rate = "variable rate" if clip.frames.rate is None else f"{float(clip.frames.rate):.5g} per second"
            frames += f" in {float(clip.frames.duration):.2f} s ({rate})"
        if clip.num_frames != clip.frames.num_frames:
            frames += f", {clip.num_frames} for training"
        lines.append(f"  {clip.image.key}: {clip.size[0]}x{clip.size[1]}, {frames}; windows: {windows}")
    if len(manifest.clips) > MAX_CLIPS_SHOWN:
        lines.append(f"  ... and {len(manifest.clips) - MAX_CLIPS_SHOWN} more clips, which --json lists")
    return lines


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _format_plural(value: float, noun: str) -> str:
    number = _format_number(value)
    return f"{number} {noun}" + "s" * (number != "1")


def _format_number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _format_repeats(repeats: Sequence[float]) -> str:
    """Regularization and dataset weights may give images of one subset different or fractional repeats."""
    if not repeats:
        return ""
    least, most = min(repeats), max(repeats)
    times = f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
    return f" x {times} repeat{'s' * (times != '1')} = {_format_number(sum(repeats))} per epoch"


def _format_bucket_table(manifest: Manifest, buckets: Sequence[BucketSummary]) -> str:
    """Format a line for each bucket; the remainder does not fill a step, padding has weight 0."""
    head = "dataset,bucket,images,x repeats,batch size,micro-batches,remainder,padding,mean crop,worst crop"
    rows: list[tuple[str, ...]] = [tuple(head.split(","))]
    for bucket in buckets:
        cells = (
            bucket.dataset_index_in_file + 1,
            " + ".join(
                format_bucket_size(size, bucket.num_frames, has_sound=bucket.has_sound)
                for size in (bucket.resolution, *bucket.control_resolutions)
            ),
            len(bucket.sample_indices),
            bucket.samples_per_epoch,
            bucket.batch_size,
            bucket.num_micro_batches,
            bucket.remainder,
            bucket.padding,
            f"{bucket.mean_cropped_fraction:.1%}",
            f"{bucket.max_cropped_fraction:.1%}",
        )
        rows.append(tuple(map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    worst = [
        "worst image",
        *(
            manifest.samples[bucket.most_cropped_sample].key if bucket.max_cropped_fraction else ""
            for bucket in buckets
        ),
    ]
    return "\n".join(f"{line}  {name}".rstrip() for line, name in zip(lines, worst, strict=True))


def _format_padding(padding: int, total_with_padding: int) -> str:
    return f", and {padding} padding samples of weight 0: {total_with_padding}" if padding else ""


def _compute_steps_per_epoch(stage: PlannedStage) -> float:
    return stage.batch_plan.micro_batches_per_epoch / stage.batch_plan.accumulation_steps


def _format_epoch(stage: PlannedStage) -> str:
    plan = stage.batch_plan
    batch = " or ".join(map(str, sorted({bucket.batch_size for bucket in plan.buckets})))
    images = sum(len(bucket.sample_indices) for bucket in plan.buckets)
    padding = sum(map(plan.count_padding, range(len(plan.buckets))))
    filled = plan.samples_per_epoch + padding
    samples = f"{plan.samples_per_epoch}{_format_padding(padding, filled)}"
    return (
        f"one epoch: {_format_count(images, 'image')}, with repeats {samples}\n"
        f"  {filled} / (batch {batch} x {plan.dp_size} process{'es' * (plan.dp_size != 1)}"
        f" x accumulation {plan.accumulation_steps}) = {_format_plural(_compute_steps_per_epoch(stage), 'step')}"
    )


JsonObject = dict[str, Any]


def export_datasets(
    manifest: Manifest, assignments: Sequence[BucketAssignment], batch_plan: AnyBatchPlan
) -> list[JsonObject]:
    """Export each dataset: settings by sd-scripts' names and our own, buckets, and every image."""
    facts = summarize_buckets(assignments, batch_plan)
    records = []
    for number, (dataset, settings) in enumerate(
        zip(manifest.datasets, convert_to_sd_scripts(manifest.datasets), strict=True)
    ):
        records.append(
            {
                "resolved": settings,
                "other_keys": collect_extra_keys(dataset),
                "file_format": dataset.file_format,
                "bucket_mode": dataset.bucket_mode,
                "bucket_max_crop": dataset.bucket_max_crop,
                "bucket_min_images": dataset.bucket_min_images,
                "buckets": [
                    export_bucket(manifest, bucket)
                    for bucket in facts
                    if manifest.samples[bucket.most_cropped_sample].dataset_index == number
                ],
                **_export_clips(manifest, number),
                "samples": [
                    _export_sample(manifest, assignments, index)
                    for index, sample in enumerate(manifest.samples)
                    if sample.dataset_index == number
                ],
            }
        )
    return records


def _export_sample(manifest: Manifest, assignments: Sequence[BucketAssignment], sample_index: int) -> JsonObject:
    sample, placement = manifest.samples[sample_index], assignments[sample_index]
    subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
    return {
        "image": str(sample.image),
        "size": list(sample.size),
        "bucket": list(placement.bucket_resolution),
        "resized": list(placement.resized_size),
        "crop": None if subset.random_crop else list(placement.crop_left_top),  # drawn for each view
        "crop_loss": placement.cropped_fraction,
        "caption": sample.caption,
        "repeats": sample.repeats,
        "subset": sample.subset_index,
        "is_reg": sample.is_reg,
        "weight": sample.loss_weight,
        "mask": None if sample.mask is None else _export_mask(sample.mask),
        "controls": [str(control.image) for control in sample.controls],
        **_export_window(sample),
    }


def _export_window(sample: Sample) -> JsonObject:
    """Export the frames of a window; nothing for an image."""
    return {} if sample.window is None else {"first_frame": sample.window.start, "frames": sample.window.length}


def _export_clips(manifest: Manifest, dataset_index: int) -> JsonObject:
    """Export every clip of a dataset; nothing for a dataset of images."""
    clips = [_export_clip(clip) for clip in manifest.clips if clip.dataset_index == dataset_index]
    return {"clips": clips} if clips else {}


def _export_clip(clip: ClipSummary) -> JsonObject:
    return {
        "clip": str(clip.image),
        "size": list(clip.size),
        "frames": clip.frames.num_frames,
        "seconds": float(clip.frames.duration),
        "frames_per_second": None if clip.frames.rate is None else float(clip.frames.rate),
        "frames_for_training": clip.num_frames,
        "windows": [{"frames": length, "count": count} for length, count in clip.windows],
    }


def _export_mask(mask: Mask) -> JsonObject:
    """Export its file (the image itself for an alpha mask) and the fraction of the image that is trained."""
    return {"image": str(mask.image), "is_alpha": mask.is_alpha, "coverage": mask.coverage}
