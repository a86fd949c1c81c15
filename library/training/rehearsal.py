"""Forward and backward of a size that comes later: what it takes shows before the first step, and nothing is learnt."""

from dataclasses import replace
from functools import partial

import torch

from ..data.batch import PixelBatch
from ..data.batches import MicroBatchSchedule
from ..data.staged_plan import PlannedStage, get_planned_stages
from ..distributed.devices import has_device_memory
from ..distributed.memory import OutOfMemory, record_phase
from .job import TrainingRun

BatchShapes = list[tuple[tuple[int, int], int]]
"""Width and height of pictures, and how many of them come at once."""


def list_batch_shapes(plan: MicroBatchSchedule) -> BatchShapes:
    """All that a plan holds, the largest first: what does not fit into memory shows at once."""
    sizes = {(bucket.resolution, bucket.batch_size) for bucket in plan.buckets}
    return sorted(sizes, key=lambda each: (each[0][0] * each[0][1] * each[1], each), reverse=True)


def run_forward_backward(run: TrainingRun, batch: PixelBatch) -> torch.Tensor:
    """Forward and backward, with all samples counted; the loss."""
    task = replace(run.task, denoiser=run.strategy.unwrap_model(run.model), micro_batch_stats=[])
    if run.compilation is not None:
        run.compilation.mark_step_begin()
    with record_phase("forward", batch), run.strategy.accelerator.autocast():
        whole = replace(batch, loss_weights=torch.ones_like(batch.loss_weights), mask=None)
        loss = task(whole, run.state.step).mean()
    with record_phase("backward", batch):
        run.strategy.backward(loss)
    return loss.detach()


def run_trial_step(run: TrainingRun, batch: PixelBatch) -> None:
    """The same, as far down the ladder as it takes; its gradients are dropped."""
    run.oom_recovery.run_until_fits(run.strategy, batch, run.state.step, partial(run_forward_backward, run))
    run.optimizer.zero_grad(set_to_none=True)


def check_later_stages_fit(run: TrainingRun, first_batch: PixelBatch) -> None:
    """The largest batch of all stages to come, if it is larger than those that the run begins with.

    Where the machine's own memory would be out, nobody is told of it, so there it is not tried.  Nor with a ladder:
    it would go down for all steps before, and goes down by itself when the size comes.
    """
    if run.oom_recovery.is_enabled:
        return
    now, *later = [stage for stage in get_planned_stages(run.plan.batch_plan) if stage.end_step is None or stage.end_step > run.state.step]
    largest = max(later, key=_count_pixels, default=now)
    if _count_pixels(largest) <= _count_pixels(now) or not has_device_memory(run.strategy.device):
        return
    (size, count), *_ = list_batch_shapes(largest.batch_plan)
    try:
        run_trial_step(run, first_batch.build_dummy_batch(size, count))
    except OutOfMemory as error:
        when = f"{error.reason}; they come from step {largest.first_step + 1} on, and were tried beforehand"
        raise OutOfMemory(error.phase, error.batch, when.removeprefix("; ")) from None


def _count_pixels(stage: PlannedStage) -> int:
    (width, height), count = list_batch_shapes(stage.batch_plan)[0]
    return width * height * count
