"""Root mean square norms over all heads of an attention layer, whose heads tensor parallelism shards.

Wan and its kin normalize queries and keys before they are split into heads.  A rank has some of the heads, so the sum
of squares is all-reduced, one number for each token, and each rank scales its own part.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .parallel_plan import TensorParallelPlan


class ShardedNorm:
    """Replaces the ``forward`` of a norm whose input is a part of what it normalizes."""

    def __init__(self, module: Any, width: int, all_reduce: Callable[[Tensor], object]):
        """``width`` is that of all ranks together; ``all_reduce`` sums a tensor over them, in place."""
        self.module, self.width, self.all_reduce = module, width, all_reduce

    def __call__(self, states: Tensor) -> Tensor:
        device = states.device.type
        is_autocast = not states.is_meta and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else states.dtype
        eps = torch.finfo(states.dtype).eps if self.module.eps is None else self.module.eps
        apply: Any = _AllReduce.apply
        values = states.float()
        total: Tensor = apply(values.square().sum(-1, keepdim=True), self.all_reduce)
        normalized = values * torch.rsqrt(total / self.width + eps)
        if self.module.weight is not None:
            normalized = normalized * self.module.weight.float()
        return normalized.to(dtype)


class _AllReduce(torch.autograd.Function):
    """The sum over all ranks, on which the output of each depends, so that gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, all_reduce: Any) -> Tensor:
        ctx.all_reduce = all_reduce
        total = tensor.clone(memory_format=torch.contiguous_format)
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.all_reduce(total)
        return total, None


def iter_norms_over_heads(model: nn.Module, plan: TensorParallelPlan) -> Iterator[tuple[Any, int]]:
    """Yield the norms of queries and keys over all heads of sharded attention layers, and their width.

    Others normalize single heads, and have a weight of the width of one.  ``RMSNorm`` is torch's or diffusers'.
    """
    for name, module in model.named_modules():
        style, sizes = plan.get(f"{name}.to_q", ("", ()))
        if style != "colwise":
            continue
        for norm in module.children():
            width = _get_width(norm) if type(norm).__name__ == "RMSNorm" else 0
            if width and width == sum(sizes) > sum(sizes) // _count_heads(module):
                yield norm, width


def _get_width(norm: Any) -> int:
    shape = getattr(norm, "normalized_shape", None) or norm.dim
    return int(shape[-1])


def _count_heads(attention: Any) -> int:
    return int(getattr(attention, "heads", 0) or getattr(attention, "num_heads", 1))
