"""Tokens of which each process has some: all of them on every process, or all of them with some of the heads."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Others(Protocol):
    """The processes that share the tokens of a picture."""

    rank: int
    size: int

    def swapped(self, sent: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
        """So many rows go to each process, and so many come from each."""
        ...

    def gathered(self, part: Tensor) -> list[Tensor]:
        """The parts of all processes, which have one size."""
        ...


class Group:
    """Those of a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def swapped(self, sent: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
        """So many rows go to each process, and so many come from each."""
        came = sent.new_empty(sum(here), *sent.shape[1:])
        dist.all_to_all_single(came, sent.contiguous(), list(here), list(there), group=self._group)
        return came

    def gathered(self, part: Tensor) -> list[Tensor]:
        """The parts of all processes, which have one size."""
        found = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(found, part, group=self._group)
        return found


def with_all_tokens(given: Tensor, counts: Sequence[int], others: Others) -> Tensor:
    """(..., all heads, own tokens, width) -> (..., own heads, all tokens, width), one process's behind another's."""
    outer, (heads, own, width), size = given.shape[:-3], given.shape[-3:], len(counts)
    rows, each = math.prod(outer), heads // size
    sent = given.reshape(rows, size, each, own, width).permute(1, 3, 0, 2, 4).reshape(size * own, rows, each, width)
    came = _exchanged(sent, [own] * size, counts, others)
    return came.permute(1, 2, 0, 3).reshape(*outer, each, sum(counts), width)


def with_all_heads(given: Tensor, counts: Sequence[int], others: Others) -> Tensor:
    """The way back."""
    outer, (each, tokens, width), size = given.shape[:-3], given.shape[-3:], len(counts)
    rows, own = math.prod(outer), counts[others.rank]
    sent = given.reshape(rows, each, tokens, width).permute(2, 0, 1, 3)
    came = _exchanged(sent, counts, [own] * size, others).view(size, own, rows, each, width)
    return came.permute(2, 0, 3, 1, 4).reshape(*outer, size * each, own, width)


def _exchanged(sent: Tensor, there: Sequence[int], here: Sequence[int], others: Others) -> Tensor:
    apply: Any = _Exchanged.apply
    found: Tensor = apply(sent, there, here, others)
    return found


class _Exchanged(torch.autograd.Function):
    """What was sent goes back as a gradient."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, there: Sequence[int], here: Sequence[int], others: Others) -> Tensor:
        ctx.there, ctx.here, ctx.others = there, here, others
        return others.swapped(sent, there, here)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.others.swapped(gradients[0], ctx.here, ctx.there), None, None, None


def whole(part: Tensor, axis: int, counts: Sequence[int], others: Others) -> Tensor:
    """All that the processes have along ``axis``, on every one of them, which from here on do the same with it."""
    apply: Any = _Whole.apply
    found: Tensor = apply(part, axis, counts, others)
    return found


class _Whole(torch.autograd.Function):
    """A gradient is divided by the number of processes in the end, for what all of them find; so these find more."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: int, counts: Sequence[int], others: Others) -> Tensor:
        ctx.axis, ctx.size = axis, len(counts)
        ctx.start, ctx.count = sum(counts[: others.rank]), counts[others.rank]
        rows = part.movedim(axis, 0)
        padded = rows.new_zeros(max(counts), *rows.shape[1:])  # not every backend gathers unequal parts
        padded[: ctx.count] = rows
        found = others.gathered(padded)
        return torch.cat([each[:count] for each, count in zip(found, counts, strict=True)]).movedim(0, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(ctx.axis, ctx.start, ctx.count) * ctx.size, None, None, None
