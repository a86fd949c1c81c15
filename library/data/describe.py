"""What will be trained, in words and in one table; for the start of a run and for --dry_run."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from .bucket_facts import BucketSummary, summarize_stage_buckets
from .buckets import BucketAssignment
from .manifest import Manifest
from .mask_files import get_mask_source
from .staged_plan import AnyBatchPlan, PlannedStage, get_planned_stages


def format_data_summary(manifest: Manifest, assignments: Sequence[BucketAssignment], batch_plan: AnyBatchPlan, total_steps: int) -> str:
    """The pictures, the buckets and the arithmetic of a run of ``steps`` optimizer steps, as text."""
    stages = get_planned_stages(batch_plan)
    lines = [_format_subsets(manifest), *manifest.notes]
    for number, stage in enumerate(stages, 1):
        end = total_steps if stage.end_step is None else min(stage.end_step, total_steps)
        if len(stages) > 1:
            lines.append(f"stage {number} of {len(stages)}: steps {stage.first_step + 1} to {end}")
        lines += [_format_bucket_table(manifest, summarize_stage_buckets(assignments, stage)), _format_epoch(stage)]
        what = "the run" if len(stages) == 1 else "the stage"
        lines.append(f"{what}: {end - stage.first_step} steps = {_format_number((end - stage.first_step) / _compute_steps_per_epoch(stage))} epochs")
    return "\n".join(lines if len(stages) == 1 else [*lines, f"the run: {total_steps} steps in {len(stages)} stages"])


def _format_subsets(manifest: Manifest) -> str:
    repeats: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    masks: Counter[tuple[int, int]] = Counter()
    for sample in manifest.samples:
        repeats[sample.dataset_index, sample.subset_index].append(sample.repeats)
        masks[sample.dataset_index, sample.subset_index] += sample.mask is not None
    lines = []
    for number, index, ending, captions, found in manifest.caption_counts:
        subset = manifest.datasets[number].subsets[index]
        mine = repeats[number, index]
        kind = "regularisation picture" if subset.is_reg else "picture"
        masked = f", masks {masks[number, index]}/{len(mine)}" if get_mask_source(subset) else ""
        name = f"dataset {manifest.datasets[number].dataset_number + 1}"
        lines.append(f"{name}, {subset.source}: {_format_count(len(mine), kind)}{_format_repeats(mine)}, captions"
                     f" found {captions}/{found} ({ending or 'no ending'}){masked}")  # fmt: skip
    return "\n".join(lines)


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _format_number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _format_repeats(repeats: Sequence[float]) -> str:
    """Regularisation, and weights of datasets, give pictures of one subset different repeats, or parts of them."""
    if not repeats:
        return ""
    least, most = min(repeats), max(repeats)
    times = f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
    return f" x {times} repeats = {_format_number(sum(repeats))} in an epoch"


def _format_bucket_table(manifest: Manifest, buckets: Sequence[BucketSummary]) -> str:
    """A line a bucket; the remainder is what does not fill whole steps, padding weighs nothing."""
    head = ("dataset", "bucket", "pictures", "x repeats", "batch size", "micro-batches", "remainder", "padding",
            "mean crop", "worst crop")  # fmt: skip
    rows: list[tuple[str, ...]] = [head]
    for bucket in buckets:
        cells = (bucket.dataset_number + 1, f"{bucket.resolution[0]}x{bucket.resolution[1]}", len(bucket.sample_indices), bucket.samples_per_epoch,
                 bucket.batch_size, bucket.num_micro_batches, bucket.remainder, bucket.padding,
                 f"{bucket.mean_cropped_fraction:.1%}", f"{bucket.max_cropped_fraction:.1%}")  # fmt: skip
        rows.append(tuple(map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    worst = ["worst picture", *(manifest.samples[bucket.most_cropped_sample].key if bucket.max_cropped_fraction else "" for bucket in buckets)]
    return "\n".join(f"{line}  {name}".rstrip() for line, name in zip(lines, worst, strict=True))


def _format_padding(padding: int, total_with_padding: int) -> str:
    return f", and {padding} that fill up the last batches of buckets and weigh nothing: {total_with_padding}" if padding else ""


def _compute_steps_per_epoch(stage: PlannedStage) -> float:
    return stage.batch_plan.micro_batches_per_epoch / stage.batch_plan.accumulation_steps


def _format_epoch(stage: PlannedStage) -> str:
    plan = stage.batch_plan
    batch = " or ".join(map(str, sorted({bucket.batch_size for bucket in plan.buckets})))
    pictures = sum(len(bucket.sample_indices) for bucket in plan.buckets)
    padding = sum(map(plan.count_padding, range(len(plan.buckets))))
    filled = plan.samples_per_epoch + padding
    return "\n".join([
        f"one epoch: {_format_count(pictures, 'picture')}, with repeats {plan.samples_per_epoch}{_format_padding(padding, filled)}",
        f"  {filled} / (batch {batch} x {plan.dp_size} process{'es' * (plan.dp_size != 1)}"
        f" x accumulation {plan.accumulation_steps}) = {_format_number(_compute_steps_per_epoch(stage))} steps",
    ])  # fmt: skip
