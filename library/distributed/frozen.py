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

from .packing import Packed

Fetch = Callable[[], Packed]
"""Hands out the weight, on the device."""


class Frozen(nn.Module):
    """A layer whose weight is no parameter."""

    fetch: Fetch

    @property
    def weight(self) -> Any:
        """For whoever wants to look at it."""
        packed = self.fetch()
        return packed.numbers(packed.dtype)

    def forward(self, given: Tensor) -> Tensor:
        said: Tensor = _Multiplied.apply(given, self)  # type: ignore[no-untyped-call]
        return said


class FrozenLinear(Frozen, nn.Linear):  # type: ignore[override]
    """A linear layer that has no parameter but its bias."""

    def out(self, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(given, weight, bias)

    def back(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ weight


class FrozenConv2d(Frozen, nn.Conv2d):  # type: ignore[override]
    """A convolution that has no parameter but its bias."""

    def out(self, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        said: Tensor = self._conv_forward(given, weight, bias)
        return said

    def back(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        turned: Any = conv2d_input
        back: Tensor = turned(shape, weight, gradient, self.stride, self.padding, self.dilation, self.groups)
        return back


KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FrozenLinear, nn.Conv2d: FrozenConv2d}


class _Multiplied(torch.autograd.Function):
    """What a layer says of what it is given; its weight and bias get no gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, layer: Any) -> Tensor:
        ctx.layer, ctx.shape, ctx.dtype = layer, given.shape, given.dtype
        kind = given.device.type
        has_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if has_autocast else given.dtype
        bias = None if layer.bias is None else layer.bias.to(dtype)
        said: Tensor = layer.out(given.to(dtype), layer.fetch().numbers(dtype), bias)
        return said

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        back: Tensor = ctx.layer.back(gradient, ctx.layer.fetch().numbers(gradient.dtype), ctx.shape)
        return back.to(ctx.dtype), None


def can_rest(layer: nn.Module) -> bool:
    """Whether the layer's weight is frozen and of a kind that is known here."""
    if type(layer) not in KINDS or isinstance(getattr(layer, "padding", 0), str):
        return False
    return all(not parameter.requires_grad for parameter in layer.parameters())


def let_rest(layer: nn.Module, fetch: Fetch) -> None:
    """From now on the layer asks ``fetch`` for its weight, and has none of its own."""
    del layer._parameters["weight"]
    layer.__class__ = KINDS[type(layer)]
    layer.fetch = fetch  # type: ignore[assignment]
