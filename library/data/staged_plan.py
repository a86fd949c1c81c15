"""Every step of a run in several stages, each with buckets of its own: one batch plan after the other.

A stage begins with an epoch of its own, so that in each of them every picture is seen as often as any other; the last
epoch of a stage may be cut off by the next.  Epochs are counted through the run, those that were cut off among them.
One that the end of the run cuts off is not complete, as in a run of one stage.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .batches import BatchPlan, BucketSamples, MicroBatch


@dataclass(frozen=True)
class PlannedStage:
    """The steps from ``first`` up to ``end``, which is left out."""

    first: int
    end: int | None
    plan: BatchPlan
    first_bucket: int = 0
    first_epoch: int = 0

    @property
    def epochs(self) -> int:
        """How many epochs it reaches into."""
        if self.end is None:
            return 0
        return -(-(self.end - self.first) * self.plan.accumulation // self.plan.batches_per_epoch)


class StagedPlan:
    """Like a ``BatchPlan``, and that of the last stage goes on without end."""

    def __init__(self, stages: Sequence[tuple[int, int | None, BatchPlan]]):
        found: list[PlannedStage] = []
        bucket = epoch = 0
        for first, end, plan in stages:
            found.append(PlannedStage(first, end, plan, bucket, epoch))
            bucket, epoch = bucket + len(plan.buckets), epoch + found[-1].epochs
        self.stages = tuple(found)
        self.buckets: tuple[BucketSamples, ...] = tuple(bucket for stage in found for bucket in stage.plan.buckets)
        start = found[0].plan
        self.ranks, self.accumulation, self.seed = start.ranks, start.accumulation, start.seed
        self._firsts = [stage.first for stage in found]

    def stage_of(self, step: int) -> PlannedStage:
        """The one that a step belongs to."""
        return self.stages[bisect_right(self._firsts, step) - 1]

    def steps_for_epochs(self, epochs: int) -> int:
        """Steps after which ``epochs`` epochs are complete, or cut off."""
        stage = [stage for stage in self.stages if stage.first_epoch < epochs][-1]
        steps = stage.first + stage.plan.steps_for_epochs(epochs - stage.first_epoch)
        return steps if stage.end is None or stage is self.stages[-1] else min(steps, stage.end)

    def epoch_of(self, step: int) -> int:
        """The epoch in which a step begins."""
        stage = self.stage_of(step)
        return stage.first_epoch + stage.plan.epoch_of(step - stage.first)

    def epochs_done(self, step: int) -> int:
        """Epochs that are complete, or cut off, after so many steps."""
        stage = self.stage_of(step)
        return stage.first_epoch + stage.plan.epochs_done(step - stage.first)

    def micro_batch(self, position: int) -> MicroBatch:
        """Global micro-batch ``position``, counted from the start of the run, with the samples of all ranks."""
        stage = self.stage_of(position // self.accumulation)
        batch = stage.plan.micro_batch(position - stage.first * self.accumulation)
        return replace(batch, bucket=stage.first_bucket + batch.bucket, epoch=stage.first_epoch + batch.epoch)

    def step(self, step: int) -> tuple[MicroBatch, ...]:
        """The global micro-batches of an optimizer step."""
        return tuple(self.micro_batch(step * self.accumulation + number) for number in range(self.accumulation))

    def real_samples(self, step: int) -> int:
        """Samples in a step over all ranks, without those that only fill up."""
        stage = self.stage_of(step)
        return stage.plan.real_samples(step - stage.first)


Plan = BatchPlan | StagedPlan


def stages_in(plan: Plan) -> tuple[PlannedStage, ...]:
    """Those of a plan; one without any is a single one."""
    return plan.stages if isinstance(plan, StagedPlan) else (PlannedStage(0, None, plan),)
