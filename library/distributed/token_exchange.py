"""Tokens of which each process has some: all of them on every process, or all of them with some of the heads.

What a compiler sees of it is one operation that sends and waits.  How many tokens others have does not follow from
how many are here, so it is in a tensor, ``whose``: for each token the number of the process that has it, on the host.
From one exchange to the next a ``tie`` goes along, and back with the gradients: it holds nothing, but no compiler may
put into another order what depends on each other, and processes that are not in the same order wait for ever.
"""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

Tied = tuple[Tensor, Tensor]
"""What came, and the tie of the next exchange."""


class Others(Protocol):
    """The processes that share the tokens of a picture."""

    rank: int
    size: int

    def swapped(self, sent: Tensor, tie: Tensor, whose: Tensor, rows: int, *, is_out: bool) -> Tied:
        """Rows of own tokens go to each process and rows of all tokens come, or the other way round if ``is_out``.

        Gradients go the way back.
        """
        ...


class Group:
    """Those of a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self._name: str = group.group_name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def swapped(self, sent: Tensor, tie: Tensor, whose: Tensor, rows: int, *, is_out: bool) -> Tied:
        """One piece of memory each way."""
        found: Tied = _swap(sent.contiguous(), tie, whose, rows, is_out, self._name)
        return found


def _with_gradient(operation: CustomOpDef) -> CustomOpDef:
    """What was sent goes back as a gradient."""

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        sent, _, whose, _, ctx.is_out, ctx.group_name = inputs
        ctx.rows = sent.shape[0]
        ctx.save_for_backward(whose)

    def back(ctx: Any, gradient: Tensor, tie: Tensor) -> Any:
        (whose,) = ctx.saved_tensors
        found = _swap(gradient.contiguous(), tie, whose, ctx.rows, not ctx.is_out, ctx.group_name)
        return *found, None, None, None, None

    operation.register_autograd(back, setup_context=keep)
    return operation


@_with_gradient
@torch.library.custom_op("lorikeet::swap_tokens", mutates_args=())
def _swap(sent: Tensor, tie: Tensor, whose: Tensor, rows: int, is_out: bool, group_name: str) -> Tied:
    c10d: Any = dist.distributed_c10d
    group = c10d._resolve_process_group(group_name)
    counts = torch.bincount(whose, minlength=dist.get_world_size(group)).tolist()
    own = [counts[dist.get_rank(group)]] * len(counts)
    came = sent.new_empty(rows, *sent.shape[1:])
    there, here = (counts, own) if is_out else (own, counts)
    dist.all_to_all_single(came, sent, here, there, group=group)
    return came, tie.clone()


@_swap.register_fake
def _(sent: Tensor, tie: Tensor, whose: Tensor, rows: int, is_out: bool, group_name: str) -> Tied:
    return sent.new_empty(rows, *sent.shape[1:]), torch.empty_like(tie)


def first_tie(given: Tensor) -> Tensor:
    """Of exchanges that follow each other."""
    return given.new_zeros(())


def with_all_tokens(given: Tensor, tie: Tensor, whose: Tensor, others: Others) -> Tied:
    """(..., all heads, own tokens, width) -> (..., own heads, all tokens, width), one process's behind another's."""
    outer, (heads, own, width), size = given.shape[:-3], given.shape[-3:], others.size
    rows, each, total = math.prod(outer), heads // size, whose.shape[0]
    sent = given.reshape(rows, size, each, own, width).permute(1, 3, 0, 2, 4).reshape(size * own, rows, each, width)
    came, tie = others.swapped(sent, tie, whose, total, is_out=False)
    return came.permute(1, 2, 0, 3).reshape(*outer, each, total, width), tie


def with_all_heads(given: Tensor, own: int, tie: Tensor, whose: Tensor, others: Others) -> Tied:
    """The way back, to ``own`` tokens."""
    outer, (each, tokens, width), size = given.shape[:-3], given.shape[-3:], others.size
    rows = math.prod(outer)
    sent = given.reshape(rows, each, tokens, width).permute(2, 0, 1, 3)
    came, tie = others.swapped(sent, tie, whose, size * own, is_out=True)
    came = came.view(size, own, rows, each, width).permute(2, 0, 3, 1, 4)
    return came.reshape(*outer, size * each, own, width), tie


def gathered(part: Tensor, axis: int, tie: Tensor, whose: Tensor, others: Others) -> Tied:
    """All that the processes have along ``axis``, on every one of them; of things that have no gradient."""
    rows = part.movedim(axis, 0)
    sent = rows.repeat(others.size, *(1 for _ in rows.shape[1:]))
    came, tie = others.swapped(sent, tie, whose, whose.shape[0], is_out=False)
    return came.movedim(0, axis), tie


def whole(part: Tensor, axis: int, whose: Tensor, others: Others) -> Tensor:
    """All along ``axis``, on every process, which from here on do the same with it."""
    apply: Any = _Whole.apply
    found: Tensor = apply(part, axis, whose, others)
    return found


class _Whole(torch.autograd.Function):
    """A gradient is divided by the number of processes in the end, for what all of them find; so these find more."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: int, whose: Tensor, others: Others) -> Tensor:
        ctx.axis, ctx.size = axis, others.size
        ctx.start, ctx.count = int((whose < others.rank).sum()), part.shape[axis]
        return gathered(part, axis, first_tie(part), whose, others)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(ctx.axis, ctx.start, ctx.count) * ctx.size, None, None, None
