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

TensorAndDependency = tuple[Tensor, Tensor]
"""What came, and the tie of the next exchange."""


class AllToAllGroup(Protocol):
    """The processes that share the tokens of a picture."""

    rank: int
    size: int

    def all_to_all(
        self, tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, *, gather_heads: bool
    ) -> TensorAndDependency:
        """Rows of own tokens go to each process and rows of all tokens come, or the other way round if ``is_out``.

        Gradients go the way back.
        """
        ...


class ProcessGroupAllToAll:
    """Those of a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self._name: str = group.group_name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(
        self, tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, *, gather_heads: bool
    ) -> TensorAndDependency:
        """One piece of memory each way."""
        found: TensorAndDependency = _all_to_all_tokens(
            tensor.contiguous(), dependency, owner_ranks, rows, gather_heads, self._name
        )
        return found


def _register_gradient(operation: CustomOpDef) -> CustomOpDef:
    """What was sent goes back as a gradient."""

    def save_context(ctx: Any, inputs: Any, output: Any) -> None:
        sent, _, whose, _, ctx.is_out, ctx.group_name = inputs
        ctx.rows = sent.shape[0]
        ctx.save_for_backward(whose)

    def compute_gradient(ctx: Any, gradient: Tensor, dependency: Tensor) -> Any:
        (whose,) = ctx.saved_tensors
        found = _all_to_all_tokens(gradient.contiguous(), dependency, whose, ctx.rows, not ctx.is_out, ctx.group_name)
        return *found, None, None, None, None

    operation.register_autograd(compute_gradient, setup_context=save_context)
    return operation


@_register_gradient
@torch.library.custom_op("lorikeet::swap_tokens", mutates_args=())
def _all_to_all_tokens(
    tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, gather_heads: bool, group_name: str
) -> TensorAndDependency:
    c10d: Any = dist.distributed_c10d
    group = c10d._resolve_process_group(group_name)
    counts = torch.bincount(owner_ranks, minlength=dist.get_world_size(group)).tolist()
    own = [counts[dist.get_rank(group)]] * len(counts)
    came = tensor.new_empty(rows, *tensor.shape[1:])
    there, here = (counts, own) if gather_heads else (own, counts)
    dist.all_to_all_single(came, tensor, here, there, group=group)
    return came, dependency.clone()


@_all_to_all_tokens.register_fake
def _(
    tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, gather_heads: bool, group_name: str
) -> TensorAndDependency:
    return tensor.new_empty(rows, *tensor.shape[1:]), torch.empty_like(dependency)


def create_dependency(tensor: Tensor) -> Tensor:
    """Of exchanges that follow each other."""
    return tensor.new_zeros(())


def scatter_heads_gather_tokens(
    tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, group: AllToAllGroup
) -> TensorAndDependency:
    """(..., all heads, own tokens, width) -> (..., own heads, all tokens, width), one process's behind another's."""
    outer, (heads, own, width), size = tensor.shape[:-3], tensor.shape[-3:], group.size
    rows, each, total = math.prod(outer), heads // size, owner_ranks.shape[0]
    sent = tensor.reshape(rows, size, each, own, width).permute(1, 3, 0, 2, 4).reshape(size * own, rows, each, width)
    came, dependency = group.all_to_all(sent, dependency, owner_ranks, total, gather_heads=False)
    return came.permute(1, 2, 0, 3).reshape(*outer, each, total, width), dependency


def scatter_tokens_gather_heads(
    tensor: Tensor, local_tokens: int, dependency: Tensor, owner_ranks: Tensor, group: AllToAllGroup
) -> TensorAndDependency:
    """The way back, to ``own`` tokens."""
    outer, (each, tokens, width), size = tensor.shape[:-3], tensor.shape[-3:], group.size
    rows = math.prod(outer)
    sent = tensor.reshape(rows, each, tokens, width).permute(2, 0, 1, 3)
    came, dependency = group.all_to_all(sent, dependency, owner_ranks, size * local_tokens, gather_heads=True)
    came = came.view(size, local_tokens, rows, each, width).permute(2, 0, 3, 1, 4)
    return came.reshape(*outer, size * each, local_tokens, width), dependency


def all_gather_tokens(
    shard: Tensor, dim: int, dependency: Tensor, owner_ranks: Tensor, group: AllToAllGroup
) -> TensorAndDependency:
    """All that the processes have along ``axis``, on every one of them; of things that have no gradient."""
    rows = shard.movedim(dim, 0)
    sent = rows.repeat(group.size, *(1 for _ in rows.shape[1:]))
    came, dependency = group.all_to_all(sent, dependency, owner_ranks, owner_ranks.shape[0], gather_heads=False)
    return came.movedim(0, dim), dependency


def all_gather_tokens_with_grad(shard: Tensor, dim: int, owner_ranks: Tensor, group: AllToAllGroup) -> Tensor:
    """All along ``axis``, on every process, which from here on do the same with it."""
    apply: Any = _AllGatherTokens.apply
    found: Tensor = apply(shard, dim, owner_ranks, group)
    return found


class _AllGatherTokens(torch.autograd.Function):
    """A gradient is divided by the number of processes in the end, for what all of them find; so these find more."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, owner_ranks: Tensor, group: AllToAllGroup) -> Tensor:
        ctx.axis, ctx.size = dim, group.size
        ctx.start, ctx.count = int((owner_ranks < group.rank).sum()), shard.shape[dim]
        return all_gather_tokens(shard, dim, create_dependency(shard), owner_ranks, group)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(ctx.axis, ctx.start, ctx.count) * ctx.size, None, None, None
