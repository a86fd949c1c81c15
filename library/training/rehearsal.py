"""Forward and backward of a size that comes later: what it takes shows before the first step, and nothing is learnt."""

from dataclasses import replace
from functools import partial

import torch

from ..data.batch import PixelBatch
from ..data.batches import Layout
from ..data.staged_plan import PlannedStage, stages_in
from ..distributed.devices import has_own_memory
from ..distributed.memory import OutOfMemory, phase
from .job import Run

Sizes = list[tuple[tuple[int, int], int]]
"""Width and height of pictures, and how many of them come at once."""


def sizes_of(plan: Layout) -> Sizes:
    """All that a plan holds, the largest first: what does not fit into memory shows at once."""
    sizes = {(bucket.size, bucket.batch_size) for bucket in plan.buckets}
    return sorted(sizes, key=lambda each: (each[0][0] * each[0][1] * each[1], each), reverse=True)


def rehearsed(run: Run, batch: PixelBatch) -> torch.Tensor:
    """Forward and backward, with all samples counted; the loss."""
    task = replace(run.task, denoiser=run.strategy.unwrapped(run.adapter), seen=[])
    if run.compilation is not None:
        run.compilation.begin()
    with phase("forward", batch), run.strategy.accelerator.autocast():
        whole = replace(batch, weight=torch.ones_like(batch.weight), mask=None)
        loss = task(whole, run.state.step).mean()
    with phase("backward", batch):
        run.strategy.backward(loss)
    return loss.detach()


def try_out(run: Run, batch: PixelBatch) -> None:
    """The same, as far down the ladder as it takes; its gradients are dropped."""
    run.ladder.try_out(run.strategy, batch, run.state.step, partial(rehearsed, run))
    run.optimizer.zero_grad(set_to_none=True)


def try_later_stages(run: Run, first: PixelBatch) -> None:
    """The largest batch of all stages to come, if it is larger than those that the run begins with.

    Where the machine's own memory would be out, nobody is told of it, so there it is not tried.  Nor with a ladder:
    it would go down for all steps before, and goes down by itself when the size comes.
    """
    if run.ladder.is_wanted:
        return
    now, *later = [stage for stage in stages_in(run.plan.batches) if stage.end is None or stage.end > run.state.step]
    largest = max(later, key=_pixels, default=now)
    if _pixels(largest) <= _pixels(now) or not has_own_memory(run.strategy.device):
        return
    (size, count), *_ = sizes_of(largest.plan)
    try:
        try_out(run, first.of_size(size, count))
    except OutOfMemory as error:
        when = f"{error.reason}; they come from step {largest.first + 1} on, and were tried beforehand"
        raise OutOfMemory(error.phase, error.batch, when.removeprefix("; ")) from None


def _pixels(stage: PlannedStage) -> int:
    (width, height), count = sizes_of(stage.plan)[0]
    return width * height * count
