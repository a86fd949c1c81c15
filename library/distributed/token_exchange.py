"""Tokens of which each process has some: all of them on every process, or all of them with some of the heads."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def with_all_tokens(given: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """(..., all heads, own tokens, width) -> (..., own heads, all tokens, width), one process's behind another's."""
    outer, (heads, own, width), size = given.shape[:-3], given.shape[-3:], len(counts)
    rows, each = math.prod(outer), heads // size
    sent = given.reshape(rows, size, each, own, width).permute(1, 3, 0, 2, 4).reshape(size * own, rows, each, width)
    came = _exchanged(sent, [own] * size, counts, group)
    return came.permute(1, 2, 0, 3).reshape(*outer, each, sum(counts), width)


def with_all_heads(given: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The way back."""
    outer, (each, tokens, width), size = given.shape[:-3], given.shape[-3:], len(counts)
    rows, own = math.prod(outer), counts[dist.get_rank(group)]
    sent = given.reshape(rows, each, tokens, width).permute(2, 0, 1, 3)
    came = _exchanged(sent, counts, [own] * size, group).view(size, own, rows, each, width)
    return came.permute(2, 0, 3, 1, 4).reshape(*outer, size * each, own, width)


def _exchanged(sent: Tensor, there: Sequence[int], here: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    apply: Any = _Exchanged.apply
    found: Tensor = apply(sent, list(there), list(here), group)
    return found


class _Exchanged(torch.autograd.Function):
    """So many rows go to each process, and so many come from each."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, there: list[int], here: list[int], group: Any) -> Tensor:
        ctx.there, ctx.here, ctx.group = there, here, group
        return _swapped(sent, there, here, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _swapped(gradients[0], ctx.here, ctx.there, ctx.group), None, None, None


def _swapped(sent: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> Tensor:
    came = sent.new_empty(sum(here), *sent.shape[1:])
    dist.all_to_all_single(came, sent.contiguous(), here, there, group=group)
    return came


def whole(part: Tensor, axis: int, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All that the processes have along ``axis``, on every one of them, which from here on do the same with it."""
    apply: Any = _Whole.apply
    found: Tensor = apply(part, axis, counts, group)
    return found


class _Whole(torch.autograd.Function):
    """A gradient is divided by the number of processes in the end, for what all of them find; so these find more."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: int, counts: Sequence[int], group: Any) -> Tensor:
        rank = dist.get_rank(group)
        ctx.axis, ctx.size = axis, len(counts)
        ctx.start, ctx.count = sum(counts[:rank]), counts[rank]
        rows = part.movedim(axis, 0)
        padded = rows.new_zeros(max(counts), *rows.shape[1:])  # not every backend gathers unequal parts
        padded[: ctx.count] = rows
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=group)
        return torch.cat([each[:count] for each, count in zip(found, counts, strict=True)]).movedim(0, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(ctx.axis, ctx.start, ctx.count) * ctx.size, None, None, None
