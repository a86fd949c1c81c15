"""What there is to say about each bucket of a plan: numbers for the table, for JSON and for the contact sheet."""

from collections.abc import Sequence
from dataclasses import dataclass

from .buckets import Placement
from .manifest import Manifest
from .staged_plan import Plan, PlannedStage, stages_in


@dataclass(frozen=True)
class BucketFacts:
    """One bucket of one dataset in one epoch."""

    dataset: int  # its number in the file
    size: tuple[int, int]
    samples: tuple[int, ...]  # positions in the manifest
    shown: int  # with repeats
    batch_size: int
    micro_batches: int  # of all ranks together
    remainder: int  # what does not fill whole steps
    padding: int  # samples that weigh nothing
    mean_loss: float  # share of a picture that is cut away
    worst: int  # position in the manifest of the picture that loses most
    worst_loss: float
    from_step: int = 0  # of its stage


def facts_of(placements: Sequence[Placement], plan: Plan) -> list[BucketFacts]:
    """In the order of the plan's buckets."""
    return [facts for stage in stages_in(plan) for facts in facts_of_stage(placements, stage)]


def facts_of_stage(placements: Sequence[Placement], stage: PlannedStage) -> list[BucketFacts]:
    """Of one stage alone."""
    found, plan = [], stage.plan
    for index, bucket in enumerate(plan.buckets):
        losses = [placements[sample].crop_loss for sample in bucket.samples]
        worst_loss, shown = max(losses), plan.samples_of(index)
        found.append(
            BucketFacts(
                dataset=bucket.dataset,
                from_step=stage.first,
                size=bucket.size,
                samples=tuple(bucket.samples),
                shown=shown,
                batch_size=bucket.batch_size,
                micro_batches=plan.batches_of(index),
                remainder=shown % (bucket.batch_size * plan.ranks * plan.accumulation),
                padding=plan.padding_per_epoch(index),
                mean_loss=sum(losses) / len(losses),
                worst=bucket.samples[losses.index(worst_loss)],
                worst_loss=worst_loss,
            )
        )
    return found


def as_plain(manifest: Manifest, facts: BucketFacts) -> dict[str, object]:
    """For JSON."""
    return {
        "size": list(facts.size),
        "pictures": len(facts.samples),
        "samples": facts.shown,
        "batch_size": facts.batch_size,
        "micro_batches": facts.micro_batches,
        "remainder": facts.remainder,
        "padding": facts.padding,
        "crop_loss": {
            "mean": facts.mean_loss,
            "worst": facts.worst_loss,
            "worst_image": str(manifest.samples[facts.worst].image),
        },
    }
