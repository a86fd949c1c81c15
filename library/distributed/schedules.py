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
from .chain import Departed, Flow
from .memory import phase

if TYPE_CHECKING:
    from .pipelined import Pipelined

KEPT = 64
"""So many sizes of pictures have their buffers ready; a rarer one is prepared again."""

IS_AGAIN: ContextVar[bool] = ContextVar("is_again", default=False)
"""Whether the model was called for the same micro-batch before: by another stage of this process, or to prepare it."""


@dataclass
class Job:
    """What all stages work on."""

    loss_of: Callable[[PixelBatch], Tensor]
    recall: Callable[[PixelBatch], None]
    work: Sequence[PixelBatch]
    begun: set[int] = field(default_factory=set)

    @contextmanager
    def begin(self, number: int) -> Iterator[PixelBatch]:
        """The micro-batch, on its way through a stage."""
        token = IS_AGAIN.set(number in self.begun)
        self.begun.add(number)
        try:
            yield self.work[number]
        finally:
            IS_AGAIN.reset(token)


class Schedules:
    """One for each size of pictures and number of micro-batches, for which torch prepares buffers."""

    def __init__(self, pipeline: "Pipelined"):
        self.pipeline = pipeline
        self.job: Job | None = None
        self._made: dict[Hashable, Any] = {}

    def run(self, loss_of: Callable[[PixelBatch], Tensor], recall: Callable[[PixelBatch], None],
            work: Sequence[PixelBatch]) -> Tensor:  # fmt: skip
        """Forward and backward of all; what comes back is the sum of losses where they are known, and else zero.

        ``recall`` is called before the backward of each, for others have gone forward meanwhile.
        """
        groups: dict[Hashable, list[PixelBatch]] = {}
        for batch in work:
            groups.setdefault(self.pipeline.shape_of(batch), []).append(batch)
        total = torch.zeros((), device=self.pipeline.device)
        try:
            for shape, batches in groups.items():
                total += self._run(shape, Job(loss_of, recall, batches))
        finally:
            self.job = None
            self.pipeline.in_one_go()
        return total

    def _run(self, shape: Hashable, job: Job) -> Tensor:
        self.job, count = job, len(job.work)
        schedule = self._schedule((shape, count), count)
        numbers, losses = torch.arange(count), list[Tensor]()
        begins = (numbers,) if 0 in self.pipeline.parts else ()  # the first stage has to be given something
        ends = {"target": numbers, "losses": losses} if self.pipeline.is_last_stage else {}
        schedule.step(*begins, number=numbers, **ends)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.pipeline.device)

    def _schedule(self, key: Hashable, count: int) -> Any:
        if key in self._made:
            self._made[key] = self._made.pop(key)  # the latest stands last
            return self._made[key]
        while len(self._made) >= KEPT:
            del self._made[next(iter(self._made))]
        pipeline, total = self.pipeline, len(self.pipeline.cuts) - 1
        stages = [BothWays(Stage(self, part), part, total, pipeline.device, group=pipeline.group)
                  for part in pipeline.parts]  # fmt: skip
        settings: dict[str, Any] = {"n_microbatches": count, "loss_fn": _as_it_is, "scale_grads": False}
        if len(stages) > 1:  # torch deals micro-batches out in rounds, which have to be of the same length
            is_even = not count % max(1, count // pipeline.layout.stages)
            kind: Any = ScheduleInterleaved1F1B if is_even else ScheduleLoopedBFS
            made: Any = kind(stages, **settings)
        elif pipeline.schedule == "1f1b" and count >= total:
            made = Schedule1F1B(stages[0], **settings)
        else:
            made = ScheduleGPipe(stages[0], **settings)
        self._made[key] = made
        return made


def _as_it_is(loss: Tensor, number: Tensor) -> Tensor:
    """The last stage computes the loss itself."""
    return loss.sum()


class Stage(nn.Module):
    """Runs the model as far as one part of its blocks goes."""

    def __init__(self, schedules: Schedules, part: int):
        super().__init__()
        pipeline = schedules.pipeline
        self._schedules, self._passage = schedules, pipeline.passage
        self._first, self._end = pipeline.cuts[part], pipeline.cuts[part + 1]
        self._is_first, self._is_last = part == 0, part == len(pipeline.cuts) - 2

    def forward(self, *arrived: Tensor, number: Tensor) -> Flow | Tensor:
        job, passage = self._schedules.job, self._passage
        assert job is not None
        passage.only(self._first, self._end, None if self._is_first else tuple(map(_Contiguous.apply, arrived)))
        try:
            with job.begin(int(number)) as batch, phase("forward", batch):
                loss = job.loss_of(batch)
        except Departed as departed:
            travel: Any = _Travelling.apply
            return tuple(travel(tensor, self._schedules.pipeline.anchor) for tensor in departed.flow)
        if not self._is_last:
            raise AssertionError("a stage went on to the end of the model")
        return loss[None]

    def recalled(self, number: int) -> PixelBatch:
        """The micro-batch, of which the rest is to come now."""
        job = self._schedules.job
        assert job is not None
        job.recall(job.work[number])
        return job.work[number]


class BothWays(PipelineStage):
    """What is computed twice is to be the same in backward, when the latest forward was of another micro-batch."""

    def backward_one_chunk(self, bwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        stage: Any = self.submod
        with phase("backward", stage.recalled(bwd_chunk_id)):
            return super().backward_one_chunk(bwd_chunk_id, *given, **named)


class _Contiguous(torch.autograd.Function):
    """What arrives; its gradient is sent back in one piece of memory."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].contiguous()


class _Travelling(torch.autograd.Function):
    """What departs, in one piece of memory; there is a way back even where nothing in a stage learns."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
