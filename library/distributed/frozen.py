"""Layers whose frozen weights rest in fewer bits or in host memory, and come out only to be multiplied with.

A frozen linear layer needs its weight again in the backward pass, and nothing else.  It is fetched a second time for
that, so that nothing of it stays in between, with gradient checkpointing and without.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from .packing import QuantizedWeight

FetchWeight = Callable[[], QuantizedWeight]
"""Hands out the weight, on the device."""


class FrozenLayer(nn.Module):
    """A layer whose weight is no parameter."""

    fetch_weight: FetchWeight

    @property
    def weight(self) -> Any:
        """For whoever wants to look at it."""
        packed = self.fetch_weight()
        return packed.dequantize(packed.dtype)

    def forward(self, input: Tensor) -> Tensor:
        said: Tensor = _FrozenLayerFunction.apply(input, self)  # type: ignore[no-untyped-call]
        return said


class FrozenLinear(FrozenLayer, nn.Linear):  # type: ignore[override]
    """A linear layer that has no parameter but its bias."""

    def compute_output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def compute_input_grad(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ weight


class FrozenConv2d(FrozenLayer, nn.Conv2d):  # type: ignore[override]
    """A convolution that has no parameter but its bias."""

    def compute_output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        said: Tensor = self._conv_forward(input, weight, bias)
        return said

    def compute_input_grad(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        turned: Any = conv2d_input
        back: Tensor = turned(shape, weight, gradient, self.stride, self.padding, self.dilation, self.groups)
        return back


FROZEN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FrozenLinear, nn.Conv2d: FrozenConv2d}


class _FrozenLayerFunction(torch.autograd.Function):
    """What a layer says of what it is given; its weight and bias get no gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Any) -> Tensor:
        ctx.layer, ctx.shape, ctx.dtype = layer, input.shape, input.dtype
        kind = input.device.type
        has_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if has_autocast else input.dtype
        bias = None if layer.bias is None else layer.bias.to(dtype)
        said: Tensor = layer.out(input.to(dtype), layer.fetch().numbers(dtype), bias)
        return said

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        back: Tensor = ctx.layer.back(gradient, ctx.layer.fetch().numbers(gradient.dtype), ctx.shape)
        return back.to(ctx.dtype), None


def can_convert_frozen_layer(layer: nn.Module) -> bool:
    """Whether the layer's weight is frozen and of a kind that is known here."""
    if type(layer) not in FROZEN_CLASSES or isinstance(getattr(layer, "padding", 0), str):
        return False
    return all(not parameter.requires_grad for parameter in layer.parameters())


def convert_frozen_layer(layer: nn.Module, fetch_weight: FetchWeight) -> None:
    """From now on the layer asks ``fetch`` for its weight, and has none of its own."""
    del layer._parameters["weight"]
    layer.__class__ = FROZEN_CLASSES[type(layer)]
    layer.fetch = fetch_weight  # type: ignore[assignment]
