"""What one stage made of a picture, given to all processes that work on it, and its gradient on the way back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .chain import Activations


def broadcast_stage_output(activations: Activations, group: dist.ProcessGroup, source: int, gradient_source: int | None, anchor: Tensor) -> Activations:
    """``flow`` of process ``source`` on all of ``group``; in backward the gradient is that of ``consumer``.

    Without a consumer all of them compute the same from it, and so have the same gradient.  ``anchor`` is anything
    that needs a gradient, so that backward comes by here on every process.
    """
    is_source = dist.get_rank() == source
    likeness: list[Any] = [[(tensor.shape, tensor.dtype) for tensor in activations] if is_source else None]
    dist.broadcast_object_list(likeness, source, group)
    apply: Any = _StageBroadcast.apply
    found: Activations = apply(anchor, group, source, gradient_source, likeness[0], *activations)
    return found


class _StageBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, group: Any, source: int, gradient_source: int | None,
                shapes_and_dtypes: list[tuple[torch.Size, torch.dtype]], *activations: Tensor) -> Activations:  # fmt: skip
        ctx.group, ctx.consumer, ctx.is_source = group, gradient_source, dist.get_rank() == source
        ctx.own = [(tensor.shape, tensor.dtype) for tensor in activations]
        found = [torch.empty(shape, dtype=dtype, device=anchor.device) for shape, dtype in shapes_and_dtypes]
        for number, tensor in enumerate(found):
            if ctx.is_source:
                tensor.copy_(activations[number])
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
