"""All-to-all of attention heads and tokens between context-parallel ranks (DeepSpeed Ulysses), as a compilable op.

To a compiler each exchange is one custom op.  The token counts of other ranks do not follow from the local shape, so
they are data: ``owner_ranks`` is a CPU tensor with the owning rank of each token.  An empty ``dependency`` tensor is
passed from each exchange to the next, and its gradient backwards: without it a compiler may reorder collectives, and
ranks with different orders deadlock.
"""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

TensorAndDependency = tuple[Tensor, Tensor]
"""The result of an exchange, and the dependency for the next."""


class AllToAllGroup(Protocol):
    """The ranks that share the tokens of an image."""

    rank: int
    size: int

    def all_to_all(
        self, tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, *, gather_heads: bool
    ) -> TensorAndDependency:
        """Send rows of local tokens and receive ``rows`` of all tokens, or the reverse with ``gather_heads``.

        Gradients are sent the opposite way.
        """
        ...


class ProcessGroupAllToAll:
    """All-to-all over a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self._name: str = group.group_name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(
        self, tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, *, gather_heads: bool
    ) -> TensorAndDependency:
        received: TensorAndDependency = _all_to_all_tokens(
            tensor.contiguous(), dependency, owner_ranks, rows=rows, gather_heads=gather_heads, group_name=self._name
        )
        return received


def _register_gradient(operation: CustomOpDef) -> CustomOpDef:
    def save_context(ctx: Any, inputs: Any, output: Any) -> None:
        sent, _, owner_ranks, _, ctx.gather_heads, ctx.group_name = inputs
        ctx.rows = sent.shape[0]
        ctx.save_for_backward(owner_ranks)

    def compute_gradient(ctx: Any, gradient: Tensor, dependency: Tensor) -> Any:
        (owner_ranks,) = ctx.saved_tensors
        received = _all_to_all_tokens(
            gradient.contiguous(),
            dependency,
            owner_ranks,
            rows=ctx.rows,
            gather_heads=not ctx.gather_heads,
            group_name=ctx.group_name,
        )
        return *received, None, None, None, None

    operation.register_autograd(compute_gradient, setup_context=save_context)
    return operation


@_register_gradient
@torch.library.custom_op("lorikeet::all_to_all_tokens", mutates_args=())
def _all_to_all_tokens(
    tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, gather_heads: bool, group_name: str
) -> TensorAndDependency:
    c10d: Any = dist.distributed_c10d
    group = c10d._resolve_process_group(group_name)
    counts = torch.bincount(owner_ranks, minlength=dist.get_world_size(group)).tolist()
    own = [counts[dist.get_rank(group)]] * len(counts)
    received = tensor.new_empty(rows, *tensor.shape[1:])
    input_splits, output_splits = (counts, own) if gather_heads else (own, counts)
    dist.all_to_all_single(received, tensor, output_splits, input_splits, group=group)
    return received, dependency.clone()


@_all_to_all_tokens.register_fake
def _(
    tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, gather_heads: bool, group_name: str
) -> TensorAndDependency:
    return tensor.new_empty(rows, *tensor.shape[1:]), torch.empty_like(dependency)


def create_dependency(tensor: Tensor) -> Tensor:
    """Create the dependency for the first of a sequence of exchanges."""
    return tensor.new_zeros(())


def scatter_heads_gather_tokens(
    tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, group: AllToAllGroup
) -> TensorAndDependency:
    """Turn (..., all heads, local tokens, dim) into (..., local heads, all tokens, dim), tokens in order of ranks."""
    outer, (heads, own, width), size = tensor.shape[:-3], tensor.shape[-3:], group.size
    rows, each, total = math.prod(outer), heads // size, owner_ranks.shape[0]
    sent = tensor.reshape(rows, size, each, own, width).permute(1, 3, 0, 2, 4).reshape(size * own, rows, each, width)
    received, dependency = group.all_to_all(sent, dependency, owner_ranks, total, gather_heads=False)
    return received.permute(1, 2, 0, 3).reshape(*outer, each, total, width), dependency


def scatter_tokens_gather_heads(
    tensor: Tensor, local_tokens: int, dependency: Tensor, owner_ranks: Tensor, group: AllToAllGroup
) -> TensorAndDependency:
    """Turn (..., local heads, all tokens, dim) into (..., all heads, local tokens, dim)."""
    outer, (each, tokens, width), size = tensor.shape[:-3], tensor.shape[-3:], group.size
    rows = math.prod(outer)
    sent = tensor.reshape(rows, each, tokens, width).permute(2, 0, 1, 3)
    received, dependency = group.all_to_all(sent, dependency, owner_ranks, size * local_tokens, gather_heads=True)
    received = received.view(size, local_tokens, rows, each, width).permute(2, 0, 3, 1, 4)
    return received.reshape(*outer, size * each, local_tokens, width), dependency


def all_gather_tokens(
    shard: Tensor, dim: int, dependency: Tensor, owner_ranks: Tensor, group: AllToAllGroup
) -> TensorAndDependency:
    """All-gather a tensor along its token axis; its gradient is the sum of those of all ranks."""
    rows = shard.movedim(dim, 0)
    sent = rows.repeat(group.size, *(1 for _ in rows.shape[1:]))
    received, dependency = group.all_to_all(sent, dependency, owner_ranks, owner_ranks.shape[0], gather_heads=False)
    return received.movedim(0, dim), dependency


def all_gather_tokens_with_grad(shard: Tensor, dim: int, owner_ranks: Tensor, group: AllToAllGroup) -> Tensor:
    """All-gather along the token axis; all ranks compute the same from the result."""
    apply: Any = _AllGatherTokens.apply
    gathered: Tensor = apply(shard, dim, owner_ranks, group)
    return gathered


class _AllGatherTokens(torch.autograd.Function):
    """An all-gather whose gradient is the local slice times the group size, as ``gradient_sync`` averages over it."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, owner_ranks: Tensor, group: AllToAllGroup) -> Tensor:
        ctx.dim, ctx.size = dim, group.size
        ctx.start, ctx.count = int((owner_ranks < group.rank).sum()), shard.shape[dim]
        return all_gather_tokens(shard, dim, create_dependency(shard), owner_ranks, group)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(ctx.dim, ctx.start, ctx.count) * ctx.size, None, None, None
