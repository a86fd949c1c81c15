"""Every step of a run in several stages, each with buckets of its own: one batch plan after the other.

A stage begins with an epoch of its own, so that in each of them every picture is seen as often as any other; the last
epoch of a stage may be cut off by the next.  Epochs are counted through the run, those that were cut off among them.
One that the end of the run cuts off is not complete, as in a run of one stage.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .batches import BatchPlan, Bucket, MicroBatch


@dataclass(frozen=True)
class PlannedStage:
    """The steps from ``first`` up to ``end``, which is left out."""

    first_step: int
    end_step: int | None
    batch_plan: BatchPlan
    first_bucket_index: int = 0
    first_epoch: int = 0

    @property
    def num_epochs(self) -> int:
        """How many epochs it reaches into."""
        if self.end_step is None:
            return 0
        return -(-(self.end_step - self.first_step) * self.batch_plan.accumulation_steps // self.batch_plan.micro_batches_per_epoch)


class StagedBatchPlan:
    """Like a ``BatchPlan``, and that of the last stage goes on without end."""

    def __init__(self, stages: Sequence[tuple[int, int | None, BatchPlan]]):
        found: list[PlannedStage] = []
        bucket = epoch = 0
        for first, end, plan in stages:
            found.append(PlannedStage(first, end, plan, bucket, epoch))
            bucket, epoch = bucket + len(plan.buckets), epoch + found[-1].num_epochs
        self.stages = tuple(found)
        self.buckets: tuple[Bucket, ...] = tuple(bucket for stage in found for bucket in stage.batch_plan.buckets)
        start = found[0].batch_plan
        self.dp_size, self.accumulation_steps, self.seed = start.dp_size, start.accumulation_steps, start.seed
        self._first_steps = [stage.first_step for stage in found]

    def get_stage(self, step: int) -> PlannedStage:
        """The one that a step belongs to."""
        return self.stages[bisect_right(self._first_steps, step) - 1]

    def count_steps_for_epochs(self, epochs: int) -> int:
        """Steps after which ``epochs`` epochs are complete, or cut off."""
        stage = [stage for stage in self.stages if stage.first_epoch < epochs][-1]
        steps = stage.first_step + stage.batch_plan.count_steps_for_epochs(epochs - stage.first_epoch)
        return steps if stage.end_step is None or stage is self.stages[-1] else min(steps, stage.end_step)

    def get_epoch(self, step: int) -> int:
        """The epoch in which a step begins."""
        stage = self.get_stage(step)
        return stage.first_epoch + stage.batch_plan.get_epoch(step - stage.first_step)

    def count_completed_epochs(self, step: int) -> int:
        """Epochs that are complete, or cut off, after so many steps."""
        stage = self.get_stage(step)
        return stage.first_epoch + stage.batch_plan.count_completed_epochs(step - stage.first_step)

    def get_micro_batch(self, position: int) -> MicroBatch:
        """Global micro-batch ``position``, counted from the start of the run, with the samples of all ranks."""
        stage = self.get_stage(position // self.accumulation_steps)
        batch = stage.batch_plan.get_micro_batch(position - stage.first_step * self.accumulation_steps)
        return replace(batch, bucket_index=stage.first_bucket_index + batch.bucket_index, epoch=stage.first_epoch + batch.epoch)

    def get_step(self, step: int) -> tuple[MicroBatch, ...]:
        """The global micro-batches of an optimizer step."""
        return tuple(self.get_micro_batch(step * self.accumulation_steps + number) for number in range(self.accumulation_steps))

    def count_real_samples(self, step: int) -> int:
        """Samples in a step over all ranks, without those that only fill up."""
        stage = self.get_stage(step)
        return stage.batch_plan.count_real_samples(step - stage.first_step)


AnyBatchPlan = BatchPlan | StagedBatchPlan


def get_planned_stages(batch_plan: AnyBatchPlan) -> tuple[PlannedStage, ...]:
    """Those of a plan; one without any is a single one."""
    return batch_plan.stages if isinstance(batch_plan, StagedBatchPlan) else (PlannedStage(0, None, batch_plan),)
