"""Micro-batches on their way through a pipeline, in the orders of torch.distributed.pipelining."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from ..data.batch import PixelBatch
from ..distributed.memory import record_phase
from .blocks import Activations
from .pipeline_stages import StageBoundary

if TYPE_CHECKING:
    from .pipeline import PipelineStrategy


MAX_CACHED_SCHEDULES = 64
"""So many sizes of pictures have their buffers ready; a rarer one is prepared again."""


IS_REPEATED_FORWARD: ContextVar[bool] = ContextVar("is_again", default=False)
"""Whether the model was called for the same micro-batch before: by another stage of this process, or to prepare it."""


@dataclass
class PipelineStep:
    """What all stages work on."""

    compute_loss: Callable[[PixelBatch], Tensor]
    prepare_recompute: Callable[[PixelBatch], None]
    batches: Sequence[PixelBatch]
    started: set[int] = field(default_factory=set)

    @contextmanager
    def start_micro_batch(self, index: int) -> Iterator[PixelBatch]:
        """The micro-batch, on its way through a stage."""
        token = IS_REPEATED_FORWARD.set(index in self.started)
        self.started.add(index)
        try:
            yield self.batches[index]
        finally:
            IS_REPEATED_FORWARD.reset(token)


class PipelineSchedules:
    """One for each size of pictures and number of micro-batches, for which torch prepares buffers."""

    def __init__(self, pipeline: "PipelineStrategy"):
        self.pipeline = pipeline
        self.step: PipelineStep | None = None
        self._cache: dict[Hashable, Any] = {}

    def run(
        self,
        compute_loss: Callable[[PixelBatch], Tensor],
        prepare_recompute: Callable[[PixelBatch], None],
        micro_batches: Sequence[PixelBatch],
    ) -> Tensor:
        """Forward and backward of all; what comes back is the sum of losses where they are known, and else zero.

        ``recall`` is called before the backward of each, for others have gone forward meanwhile.
        """
        groups: dict[Hashable, list[PixelBatch]] = {}
        for batch in micro_batches:
            groups.setdefault(self.pipeline.get_shape_key(batch), []).append(batch)
        total = torch.zeros((), device=self.pipeline.device)
        try:
            for shape, batches in groups.items():
                total += self._run_schedule(shape, PipelineStep(compute_loss, prepare_recompute, batches))
        finally:
            self.step = None
            self.pipeline.use_full_forward()
        return total

    def _run_schedule(self, shape: Hashable, step: PipelineStep) -> Tensor:
        self.step, count = step, len(step.batches)
        schedule = self._get_schedule((shape, count), count)
        numbers, losses = torch.arange(count), list[Tensor]()
        begins = (numbers,) if 0 in self.pipeline.local_stages else ()  # the first stage has to be given something
        ends = {"target": numbers, "losses": losses} if self.pipeline.is_last_stage else {}
        schedule.step(*begins, number=numbers, **ends)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.pipeline.device)

    def _get_schedule(self, key: Hashable, count: int) -> Any:
        if key in self._cache:
            self._cache[key] = self._cache.pop(key)  # the latest stands last
            return self._cache[key]
        while len(self._cache) >= MAX_CACHED_SCHEDULES:
            del self._cache[next(iter(self._cache))]
        pipeline, total = self.pipeline, len(self.pipeline.stage_bounds) - 1
        stages = [
            RecomputingPipelineStage(StageModule(self, part), part, total, pipeline.device, group=pipeline.stage_group)
            for part in pipeline.local_stages
        ]
        settings: dict[str, Any] = {"n_microbatches": count, "loss_fn": _sum_loss, "scale_grads": False}
        if len(stages) > 1:  # torch deals micro-batches out in rounds, which have to be of the same length
            is_even = not count % max(1, count // pipeline.dims.pp)
            kind: Any = ScheduleInterleaved1F1B if is_even else ScheduleLoopedBFS
            made: Any = kind(stages, **settings)
        elif pipeline.schedule == "1f1b" and count >= total:
            made = Schedule1F1B(stages[0], **settings)
        else:
            made = ScheduleGPipe(stages[0], **settings)
        self._cache[key] = made
        return made


def _sum_loss(loss: Tensor, number: Tensor) -> Tensor:
    """The last stage computes the loss itself."""
    return loss.sum()


class StageModule(nn.Module):
    """Runs the model as far as one part of its blocks goes."""

    def __init__(self, schedules: PipelineSchedules, stage_index: int):
        super().__init__()
        pipeline = schedules.pipeline
        self._schedules, self._stage_runner = schedules, pipeline.stage_runner
        self._first, self._end = pipeline.stage_bounds[stage_index], pipeline.stage_bounds[stage_index + 1]
        self._is_first, self._is_last = stage_index == 0, stage_index == len(pipeline.stage_bounds) - 2

    def forward(self, *received: Tensor, number: Tensor) -> Activations | Tensor:
        job, passage = self._schedules.step, self._stage_runner
        assert job is not None
        passage.run_stage(
            self._first, self._end, None if self._is_first else tuple(map(_ContiguousGradient.apply, received))
        )
        try:
            with job.start_micro_batch(int(number)) as batch, record_phase("forward", batch):
                loss = job.compute_loss(batch)
        except StageBoundary as departed:
            travel: Any = _StageOutput.apply
            return tuple(travel(tensor, self._schedules.pipeline.grad_anchor) for tensor in departed.activations)
        if not self._is_last:
            raise AssertionError("a stage went on to the end of the model")
        return loss[None]

    def prepare_backward(self, index: int) -> PixelBatch:
        """The micro-batch, of which the rest is to come now."""
        job = self._schedules.step
        assert job is not None
        job.prepare_recompute(job.batches[index])
        return job.batches[index]


class RecomputingPipelineStage(PipelineStage):
    """What is computed twice is to be the same in backward, when the latest forward was of another micro-batch."""

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        stage: Any = self.submod
        with record_phase("backward", stage.prepare_backward(bwd_chunk_id)):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class _ContiguousGradient(torch.autograd.Function):
    """What arrives; its gradient is sent back in one piece of memory."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].contiguous()


class _StageOutput(torch.autograd.Function):
    """What departs, in one piece of memory; there is a way back even where nothing in a stage learns."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
