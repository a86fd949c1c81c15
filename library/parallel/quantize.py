"""Quantized frozen weights (fp8, int8, nf4) and the layers that dequantize them in forward and backward.

fp8 and int8 have one scale per output row, nf4 has one per block of 64 values (QLoRA, arXiv 2305.14314).
nf4 has the bytes of bitsandbytes, whose kernel dequantizes them on CUDA where it is installed.
Weights that a model's files store quantized keep their values and scales (``stored_base``): fp8, int8, nf4 and fp4 with
scales in float32, and the blocks of GGUF.  Their weights are computed in float32 and rounded once.
Quantized weights are frozen parameters of bytes, so that FSDP, tensor and pipeline parallelism shard them like others.
Which layers of the base model are quantized is decided in ``frozen_base.quantize_and_offload_base``.

The tensor classes of torchao and bitsandbytes are not used, since they cannot be kept in host memory and freed before
the backward pass.  Here one autograd function fetches the weight in forward and again in backward, whether it is
quantized, in host memory, or both.  Tensor parallelism slices weights after quantization, so that all ranks together
have the values of one process.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import zip_longest
from math import gcd
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from ..models.gguf_blocks import BLOCK_SIZES, dequantize_rows, multiply_rounded

logger = logging.getLogger(__name__)
Ranges = tuple[tuple[int, int], ...]
"""(start, length) of each slice; not an index tensor, whose copy to a device the host would wait for."""

FP8_DTYPE = torch.float8_e4m3fn
NF4_BLOCK_SIZE = 64
PACKED_TYPES = "nf4", "fp4"
"""Two values in a byte, as indices of levels."""


# fmt: off
NF4_LEVELS = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)
# fmt: on
"""Quantiles of the normal distribution."""

BUILT_IN_KERNEL = "built-in"
BITSANDBYTES_DEVICES = {"cuda"}
"""Device types (CUDA and ROCm) on which bitsandbytes' kernel is used."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A frozen weight as plain tensors, which may be moved between devices."""

    quant_type: str  # none, fp8, int8 or nf4; of files also fp4 and the types of GGUF
    shape: torch.Size
    dtype: torch.dtype  # the dtype of the original weight
    tensors: tuple[Tensor, ...]  # values; scales of rows, or of blocks of them; the levels of nf4; GGUF: bytes alone
    nf4_kernel: str = BUILT_IN_KERNEL  # a value of ``select_nf4_kernel``

    @classmethod
    def quantize(cls, weight: Tensor, quant_type: str) -> "QuantizedWeight":
        if quant_type == "none":
            return cls(quant_type, weight.shape, weight.dtype, (weight.detach(),))
        if weight.is_meta:
            return cls(quant_type, weight.shape, weight.dtype, _build_meta_tensors(weight.shape, quant_type))
        rows = weight.detach().float()
        if quant_type == "nf4":
            rows = F.pad(rows.flatten(), (0, -rows.numel() % NF4_BLOCK_SIZE)).view(-1, NF4_BLOCK_SIZE)
            scale, rows = _scale_rows(rows, 1.0)
            levels = torch.tensor(NF4_LEVELS, device=rows.device)
            indices = torch.bucketize(rows, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
            return cls(quant_type, weight.shape, weight.dtype, (indices[:, ::2] << 4 | indices[:, 1::2], scale, levels))
        scale, rows = _scale_rows(rows.flatten(1), 127.0 if quant_type == "int8" else torch.finfo(FP8_DTYPE).max)
        values = rows.round().to(torch.int8) if quant_type == "int8" else rows.to(FP8_DTYPE)
        return cls(quant_type, weight.shape, weight.dtype, (values, scale))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        if self.quant_type == "none":
            return self.tensors[0].to(dtype)
        if self.quant_type in BLOCK_SIZES:
            return dequantize_rows(self.tensors[0], self.quant_type, dtype).view(self.shape)
        values, scale = self.tensors[:2]
        uses_bitsandbytes = (
            self.quant_type == "nf4"
            and self.nf4_kernel != BUILT_IN_KERNEL
            and values.device.type in BITSANDBYTES_DEVICES
        )
        if uses_bitsandbytes and 2 * values.shape[1] == NF4_BLOCK_SIZE:
            packed = values.reshape(-1, 1)[: (self.shape.numel() + 1) // 2]  # without the padding of the last block
            arguments = packed, scale.float().flatten(), NF4_BLOCK_SIZE, "nf4", list(self.shape), dtype
            weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(*arguments)
            return weight
        # In float16 the smallest scales underflow.  bitsandbytes multiplies in float32, and slices of smaller blocks,
        # which it does not take, have to get its values.  Scales of files are in float32, and rounding them would
        # change the weights.
        is_exact = uses_bitsandbytes or scale.dtype is torch.float32
        if self.quant_type not in PACKED_TYPES and scale.dtype is torch.float32:
            blocks = values.view(len(values), scale.shape[1], -1)
            return multiply_rounded(blocks, scale.unsqueeze(2), dtype).view(self.shape)
        if dtype is torch.float16 or (is_exact and dtype is not torch.float32):
            return self.dequantize(torch.float32).to(dtype)
        if self.quant_type in PACKED_TYPES:
            # Look up both values of a byte at once, with 32-bit indices: torch would index single values with 64 bits.
            levels = self.tensors[2].to(dtype)
            pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
            rows = F.embedding(values.int(), pairs).flatten(1) * scale.to(dtype)
            return rows.flatten()[: self.shape.numel()].view(self.shape)
        blocks = values.to(dtype).view(len(values), scale.shape[1], -1)
        return (blocks * scale.to(dtype).unsqueeze(2)).view(self.shape)

    def take_ranges(self, dim: int, ranges: Ranges) -> "QuantizedWeight":
        """Return slices of the rows (0) or columns (1) of a matrix, with the values of the whole matrix to the bit."""
        if self.quant_type in PACKED_TYPES:
            return self._take_nf4_ranges(dim, ranges)
        if self.quant_type in BLOCK_SIZES:
            return self._take_gguf_ranges(dim, ranges)
        values, *scales = self.tensors
        shard = take_ranges(values, dim, ranges)
        if dim == 0:
            scales = [take_ranges(scale, 0, ranges) for scale in scales]
        elif scales and scales[0].shape[1] > 1:  # of blocks of the rows, which get smaller where a slice ends in one
            block = self.shape[1] // scales[0].shape[1]
            size = gcd(block, *(number for each in ranges for number in each))
            places = tuple((start // size, length // size) for start, length in ranges)
            scales = [take_ranges(scale.repeat_interleave(block // size, 1), 1, places) for scale in scales]
        return replace(self, shape=shard.shape, tensors=(shard, *scales))

    def _take_gguf_ranges(self, dim: int, ranges: Ranges) -> "QuantizedWeight":
        """Slices of columns that do not consist of whole blocks are dequantized."""
        size, nbytes = (1, 1) if dim == 0 else BLOCK_SIZES[self.quant_type]
        if any(number % size for each in ranges for number in each):
            weight = take_ranges(self.dequantize(self.dtype), dim, ranges)
            return QuantizedWeight("none", weight.shape, weight.dtype, (weight,))
        places = tuple((start // size * nbytes, length // size * nbytes) for start, length in ranges)
        count = sum(length for _, length in ranges)
        shape = torch.Size((count, self.shape[1]) if dim == 0 else (self.shape[0], count))
        return replace(self, shape=shape, tensors=(take_ranges(self.tensors[0], dim, places),))

    def _take_nf4_ranges(self, dim: int, ranges: Ranges) -> "QuantizedWeight":
        """Slices that do not consist of whole blocks get smaller blocks, so that each has one scale."""
        bytes_, scale, levels = self.tensors
        count, stride = self.shape.numel(), self.shape[1] if dim == 0 else 1
        sizes = (size * stride for start, length in ranges for size in (start, length))
        block_size = gcd(2 * bytes_.shape[1], *sizes, *([self.shape[1]] if dim == 1 else []))
        if block_size % 2:
            weight = take_ranges(self.dequantize(self.dtype), dim, ranges)
            return QuantizedWeight("none", weight.shape, weight.dtype, (weight,))
        indices = torch.stack([bytes_ >> 4, bytes_ & 15], dim=2).flatten()[:count].view(self.shape)
        scales = scale.expand(-1, 2 * bytes_.shape[1]).flatten()[:count].view(self.shape)
        indices, scales = (take_ranges(item, dim, ranges) for item in (indices, scales))
        rows, scale = indices.reshape(-1, block_size), scales.reshape(-1, block_size)[:, :1].contiguous()
        return replace(self, shape=indices.shape, tensors=(rows[:, ::2] << 4 | rows[:, 1::2], scale, levels))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        return replace(self, tensors=tuple(map(function, self.tensors)))


def select_nf4_kernel(device: torch.device) -> str:
    """Return ``bitsandbytes`` with its version where its kernel works on the device, else ``built-in``.

    The kernel is tried: bitsandbytes imports without its CUDA library, too, and some GPUs lack blocks of 64.
    """
    if device.type not in BITSANDBYTES_DEVICES or importlib.util.find_spec("bitsandbytes") is None:
        return BUILT_IN_KERNEL
    weight = QuantizedWeight.quantize(torch.linspace(-1, 1, 4 * NF4_BLOCK_SIZE, device=device).view(4, -1), "nf4")
    try:
        kernel = f"bitsandbytes {metadata.version('bitsandbytes')}"
        importlib.import_module("bitsandbytes")
        values = replace(weight, nf4_kernel=kernel).dequantize(torch.float32)
        if torch.allclose(values, weight.dequantize(torch.float32), rtol=1e-5):
            return kernel
        reason = "its values are wrong"
    except Exception as error:  # of its library, its version or the device
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    logger.warning("nf4: bitsandbytes' kernel does not work here (%s); using the built-in one, which is slower", reason)
    return BUILT_IN_KERNEL


def take_ranges(tensor: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return slices of a tensor as one tensor."""
    slices = [tensor.narrow(dim, start, length) for start, length in ranges]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=dim)


def _scale_rows(rows: Tensor, max_value: float) -> tuple[Tensor, Tensor]:
    """Return a bf16 scale per row, and the rows divided by it, clamped to ``max_value``."""
    scale = (rows.abs().amax(1, keepdim=True) / max_value).clamp(min=1e-12).bfloat16()
    return scale, (rows / scale.float()).clamp(-max_value, max_value)


def _build_meta_tensors(shape: torch.Size, quant_type: str) -> tuple[Tensor, ...]:
    """Build what ``QuantizedWeight.quantize`` would, without a dozen slow operations."""
    if quant_type == "nf4":
        blocks = -(-shape.numel() // NF4_BLOCK_SIZE)
        values = torch.empty(blocks, NF4_BLOCK_SIZE // 2, dtype=torch.uint8, device="meta")
        levels = [torch.empty(len(NF4_LEVELS), device="meta")]
    else:
        dtype, levels = torch.int8 if quant_type == "int8" else FP8_DTYPE, []
        values = torch.empty(shape[0], shape[1:].numel(), dtype=dtype, device="meta")
    return values, torch.empty(len(values), 1, dtype=torch.bfloat16, device="meta"), *levels


class FetchWeight(Protocol):
    """Returns the weight on the device that computes, for the forward or the backward of its layer.

    ``has_backward``: whether the backward of the layer follows this forward, as its input requires a gradient.
    """

    def __call__(self, in_backward: bool = False, has_backward: bool = False) -> QuantizedWeight: ...


RELATIVE_ERRORS = {"none": 0.0, "int8": 0.0085, "fp8": 0.0265, "nf4": 0.092}
"""Root mean square error of the weights of a normal 3072 x 3072 matrix, relative to theirs; the most exact first."""

STORED_NAMES = "quantized_weight", "weight_scale", "weight_levels"


class FrozenLayer(nn.Module):
    """A layer whose forward and backward each fetch and dequantize the weight."""

    stored_weight: QuantizedWeight
    """The weight in this layer's own parameters, without its tensors."""
    stored_dtype: torch.dtype
    quantized_weight: nn.Parameter
    weight_scale: nn.Parameter | None
    weight_levels: nn.Parameter | None
    autocast_dtype: torch.dtype | None = None
    """Instead of the device's, on the meta device, which has no autocast."""

    def fetch_weight(self, in_backward: bool = False, has_backward: bool = False) -> QuantizedWeight:
        """Return the stored weight; the ``FetchWeight`` of an offloaded weight replaces this method."""
        values = self.quantized_weight.view(self.stored_dtype)
        scales = self.weight_scale, self.weight_levels
        return replace(self.stored_weight, tensors=(values, *(item for item in scales if item is not None)))

    def store_weight(self, weight: QuantizedWeight) -> None:
        """Store the weight in frozen parameters."""
        self.__dict__.pop("fetch_weight", None)
        self.stored_weight = replace(weight, tensors=())
        values, *scales = weight.tensors
        self.stored_dtype = values.dtype
        if not values.is_floating_point():  # of which FSDP in torch 2.11 cannot make parameters
            values = values.view(FP8_DTYPE)
        for name, tensor in zip_longest(STORED_NAMES, (values, *scales)):
            parameter = None if tensor is None else nn.Parameter(tensor.contiguous(), requires_grad=False)
            self.register_parameter(name, parameter)

    @property
    def weight(self) -> Any:
        """The dequantized weight, for code that reads ``layer.weight``."""
        quantized = self.fetch_weight()
        weight = quantized.dequantize(quantized.dtype)
        return weight.clone() if quantized.quant_type == "none" else weight  # the buffer of a swapped block is reused

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _FrozenLayerFunction.apply(input, self)  # type: ignore[no-untyped-call]
        return output

    def compute_forward(self, input: Tensor, bias: Tensor | None, *, has_backward: bool) -> Tensor:
        """Compute the output from an input of autocast's dtype."""
        weight = self.fetch_weight(has_backward=has_backward).dequantize(input.dtype)
        return self.compute_output(input, weight, bias)

    def compute_backward(self, gradient: Tensor, shape: torch.Size) -> Tensor:
        """Compute the gradient of an input of this shape."""
        weight = self.fetch_weight(in_backward=True).dequantize(gradient.dtype)
        return self.compute_input_grad(gradient, weight, shape)

    def compute_output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def compute_input_grad(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        raise NotImplementedError


class FrozenLinear(FrozenLayer, nn.Linear):  # type: ignore[override]
    """A linear layer with a quantized or offloaded weight."""

    def compute_output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def compute_input_grad(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ weight


class FrozenConv2d(FrozenLayer, nn.Conv2d):  # type: ignore[override]
    """A convolution whose only parameter is its bias."""

    def compute_output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = self._conv_forward(input, weight, bias)
        return output

    def compute_input_grad(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        function: Any = conv2d_input
        settings = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        grad: Tensor = function(shape, weight, gradient, **settings)
        return grad


class ExpertMatrices(nn.Module):
    """The matrices of experts, which were one parameter (experts, inputs, outputs), as one matrix with their rows."""

    bias = None

    def __init__(self, weight: Tensor):
        super().__init__()
        self.num_experts = len(weight)
        self.weight = nn.Parameter(weight.detach().flatten(0, 1), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the tokens of each expert (experts, tokens, inputs) with its matrix."""
        return input @ self.split(self.weight)

    def split(self, weight: Tensor) -> Tensor:
        """View the matrix with all rows as those of the experts."""
        return weight.view(self.num_experts, -1, weight.shape[1])


class FrozenExpertMatrices(FrozenLayer, ExpertMatrices):  # type: ignore[override]
    """The matrices of experts, quantized, with a scale for each row of each expert, or offloaded."""

    def compute_output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return input @ self.split(weight)

    def compute_input_grad(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ self.split(weight).transpose(1, 2)


FROZEN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FrozenLinear,
    nn.Conv2d: FrozenConv2d,
    ExpertMatrices: FrozenExpertMatrices,
}


def split_expert_weights(denoiser: nn.Module) -> None:
    """Make layers of the frozen parameters in which modules hold the matrices of experts.

    ``expert_weights`` of such a module names them; its ``forward`` takes parameters (experts, inputs, outputs), which
    it multiplies with, or layers, which it calls.
    """
    for module in list(denoiser.modules()):
        for name in getattr(module, "expert_weights", ()):
            parameter = module._parameters.get(name)
            if parameter is not None and not parameter.requires_grad:
                del module._parameters[name]
                module.add_module(name, ExpertMatrices(parameter))


class _FrozenLayerFunction(torch.autograd.Function):
    """Saves nothing for backward: weight and bias get no gradient, and the input's gradient needs only the weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Any) -> Tensor:
        ctx.layer, ctx.shape, ctx.dtype = layer, input.shape, input.dtype
        device, dtype = input.device.type, input.dtype
        if input.is_meta:
            dtype = layer.autocast_dtype or dtype
        elif torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        output: Tensor = layer.compute_forward(input.to(dtype), bias, has_backward=ctx.needs_input_grad[0])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        grad: Tensor = ctx.layer.compute_backward(gradient, ctx.shape)
        return grad.to(ctx.dtype), None


def can_convert_frozen_layer(layer: nn.Module) -> bool:
    """Whether the layer is frozen and of a supported class."""
    if type(layer) not in FROZEN_CLASSES or isinstance(getattr(layer, "padding", 0), str):
        return False
    return all(not parameter.requires_grad for parameter in layer.parameters())


def convert_frozen_layer(
    layer: nn.Module, weight: QuantizedWeight | FetchWeight, frozen_class: "type[FrozenLayer] | None" = None
) -> None:
    """Replace the layer's weight parameter by a quantized weight, or by a function that fetches it, in place.

    ``frozen_class``: instead of the class that dequantizes the weight.  The layer may have a quantized weight already.
    """
    for name in ("weight", *STORED_NAMES):
        layer._parameters.pop(name, None)
    layer.__class__ = frozen_class or FROZEN_CLASSES.get(type(layer), type(layer))
    frozen: Any = layer
    if isinstance(weight, QuantizedWeight):
        frozen.store_weight(weight)
    else:
        frozen.fetch_weight = weight
