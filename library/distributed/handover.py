"""What one stage made of a picture, given to all processes that work on it, and its gradient on the way back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .chain import Flow

KINDS = (torch.float32, torch.bfloat16, torch.float16)


def handed_over(flow: Flow, group: dist.ProcessGroup, source: int, consumer: int | None, anchor: Tensor) -> Flow:
    """``flow`` of process ``source`` on all of ``group``; in backward the gradient is that of ``consumer``.

    Without a consumer all of them compute the same from it, and so have the same gradient.  ``anchor`` is anything
    that needs a gradient, so that backward comes by here on every process.
    """
    kinds = torch.tensor([KINDS.index(tensor.dtype) for tensor in flow], device=flow[0].device)
    dist.broadcast(kinds, source, group)
    apply: Any = _HandedOver.apply
    found: Flow = apply(anchor, group, source, consumer, [KINDS[kind] for kind in kinds.tolist()], *flow)
    return found


class _HandedOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, group: Any, source: int, consumer: int | None, kinds: list[torch.dtype],
                *flow: Tensor) -> Flow:  # fmt: skip
        ctx.group, ctx.is_source, ctx.consumer = group, dist.get_rank() == source, consumer
        ctx.kinds = [tensor.dtype for tensor in flow]
        found = []
        for tensor, kind in zip(flow, kinds, strict=True):
            copy = torch.empty_like(tensor, dtype=kind, memory_format=torch.contiguous_format)
            if ctx.is_source:
                copy.copy_(tensor)
            dist.broadcast(copy, source, group)
            found.append(copy)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = []
        for gradient, kind in zip(gradients, ctx.kinds, strict=True):
            own = gradient.contiguous()
            if ctx.consumer is not None:
                own = own.clone() if own is gradient else own
                dist.broadcast(own, ctx.consumer, ctx.group)
            found.append((own if ctx.is_source else torch.zeros_like(own)).to(kind))
        return None, None, None, None, None, *found
