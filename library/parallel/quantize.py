"""Frozen weights in fewer bits: how they are put together, and how numbers come out again.

Each row has a factor of its own, in nf4 each 64 numbers (Dettmers et al. 2023, arXiv 2305.14314).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight; what it is made of may be moved, and is no parameter of anything."""

    quant_type: str  # none, fp8, int8 or nf4
    shape: torch.Size
    dtype: torch.dtype  # that it had
    tensors: tuple[Tensor, ...]

    @classmethod
    def quantize(cls, weight: Tensor, quant_type: str) -> "QuantizedWeight":
        if quant_type == "none":
            return cls(quant_type, weight.shape, weight.dtype, (weight.detach(),))
        rows = weight.detach().float()
        if quant_type == "nf4":
            short = -rows.numel() % NF4_BLOCK_SIZE
            rows = torch.nn.functional.pad(rows.flatten(), (0, short)).view(-1, NF4_BLOCK_SIZE)
            factor, rows = _compute_row_scales(rows, 1.0)
            between = torch.tensor(NF4_LEVELS, device=rows.device)
            places = torch.bucketize(rows, (between[1:] + between[:-1]) / 2).to(torch.uint8)
            return cls(quant_type, weight.shape, weight.dtype, (places[:, ::2] << 4 | places[:, 1::2], factor, between))
        factor, rows = _compute_row_scales(
            rows.flatten(1), 127.0 if quant_type == "int8" else torch.finfo(FP8_DTYPE).max
        )
        packed = rows.round().to(torch.int8) if quant_type == "int8" else rows.to(FP8_DTYPE)
        return cls(quant_type, weight.shape, weight.dtype, (packed, factor))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight, as near to what it was as its kind can be."""
        if dtype is torch.float16 and self.quant_type != "none":  # which cannot hold the smallest factors
            return self.dequantize(torch.float32).to(dtype)
        if self.quant_type == "none":
            return self.tensors[0].to(dtype)
        packed, factor = self.tensors[:2]
        if self.quant_type == "nf4":
            # A byte is looked up as a whole, by 32 bits: as an index, torch would make 64 bits of each number.
            each = self.tensors[2].to(dtype)
            pairs = torch.stack([each.repeat_interleave(16), each.repeat(16)], dim=1)
            rows = torch.nn.functional.embedding(packed.int(), pairs).flatten(1) * factor.to(dtype)
            return rows.flatten()[: self.shape.numel()].view(self.shape)
        return (packed.to(dtype) * factor.to(dtype)).view(self.shape)

    def get(self) -> "QuantizedWeight":
        """For whoever asks where it rests."""
        return self

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        return replace(self, tensors=tuple(map(function, self.tensors)))


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
        said: Tensor = layer.compute_output(input.to(dtype), layer.fetch_weight().dequantize(dtype), bias)
        return said

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        back: Tensor = ctx.layer.compute_input_grad(
            gradient, ctx.layer.fetch_weight().dequantize(gradient.dtype), ctx.shape
        )
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
    layer.fetch_weight = fetch_weight  # type: ignore[assignment]


NF4_BLOCK_SIZE = 64


FP8_DTYPE = torch.float8_e4m3fn


NF4_LEVELS = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.09105004,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)
"""Quantiles of the normal distribution."""


def _compute_row_scales(rows: Tensor, max_value: float) -> tuple[Tensor, Tensor]:
    """What makes the largest of each row ``most``, as a number that bf16 can hold, and the rows divided by it."""
    factor = (rows.abs().amax(1, keepdim=True) / max_value).clamp(min=1e-12).bfloat16()
    return factor, (rows / factor.float()).clamp(-max_value, max_value)
