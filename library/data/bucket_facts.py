"""What there is to say about each bucket of a plan: numbers for the table, for JSON and for the contact sheet."""

from collections.abc import Sequence
from dataclasses import dataclass

from .buckets import BucketAssignment
from .manifest import Manifest
from .staged_plan import AnyBatchPlan, PlannedStage, get_planned_stages


@dataclass(frozen=True)
class BucketSummary:
    """One bucket of one dataset in one epoch."""

    dataset_number: int  # its number in the file
    resolution: tuple[int, int]
    sample_indices: tuple[int, ...]  # positions in the manifest
    samples_per_epoch: int  # with repeats
    batch_size: int
    num_micro_batches: int  # of all ranks together
    remainder: int  # what does not fill whole steps
    padding: int  # samples that weigh nothing
    mean_cropped_fraction: float  # share of a picture that is cut away
    most_cropped_sample: int  # position in the manifest of the picture that loses most
    max_cropped_fraction: float
    from_step: int = 0  # of its stage


def summarize_buckets(assignments: Sequence[BucketAssignment], batch_plan: AnyBatchPlan) -> list[BucketSummary]:
    """In the order of the plan's buckets."""
    return [facts for stage in get_planned_stages(batch_plan) for facts in summarize_stage_buckets(assignments, stage)]


def summarize_stage_buckets(assignments: Sequence[BucketAssignment], stage: PlannedStage) -> list[BucketSummary]:
    """Of one stage alone."""
    found, plan = [], stage.batch_plan
    for index, bucket in enumerate(plan.buckets):
        losses = [assignments[sample].cropped_fraction for sample in bucket.sample_indices]
        worst_loss, shown = max(losses), plan.count_samples(index)
        found.append(
            BucketSummary(
                dataset_number=bucket.dataset_number,
                from_step=stage.first_step,
                resolution=bucket.resolution,
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
    """For JSON."""
    return {
        "size": list(summary.resolution),
        "pictures": len(summary.sample_indices),
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
