"""What one stage made of a picture, given to all processes that work on it, and its gradient on the way back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .chain import Flow


def handed_over(flow: Flow, group: dist.ProcessGroup, source: int, consumer: int | None, anchor: Tensor) -> Flow:
    """``flow`` of process ``source`` on all of ``group``; in backward the gradient is that of ``consumer``.

    Without a consumer all of them compute the same from it, and so have the same gradient.  ``anchor`` is anything
    that needs a gradient, so that backward comes by here on every process.
    """
    is_source = dist.get_rank() == source
    likeness: list[Any] = [[(tensor.shape, tensor.dtype) for tensor in flow] if is_source else None]
    dist.broadcast_object_list(likeness, source, group)
    apply: Any = _HandedOver.apply
    found: Flow = apply(anchor, group, source, consumer, likeness[0], *flow)
    return found


class _HandedOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, group: Any, source: int, consumer: int | None,
                likeness: list[tuple[torch.Size, torch.dtype]], *flow: Tensor) -> Flow:  # fmt: skip
        ctx.group, ctx.consumer, ctx.is_source = group, consumer, dist.get_rank() == source
        ctx.own = [(tensor.shape, tensor.dtype) for tensor in flow]
        found = [torch.empty(shape, dtype=dtype, device=anchor.device) for shape, dtype in likeness]
        for number, tensor in enumerate(found):
            if ctx.is_source:
                tensor.copy_(flow[number])
            dist.broadcast(tensor, source, group)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = []
        for gradient in gradients:
            own = gradient.contiguous()
            if ctx.consumer is not None:
                own = own.clone() if own is gradient else own
                dist.broadcast(own, ctx.consumer, ctx.group)
            found.append(own)
        if not ctx.is_source:  # what was here was no more than a way for the gradient to come by
            found = [gradients[0].new_zeros(shape, dtype=dtype) for shape, dtype in ctx.own]
        return None, None, None, None, None, *found
