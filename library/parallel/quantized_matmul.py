"""Frozen linear layers that multiply in fp8 or int8 (``--quantized_matmul``), instead of dequantizing their weight.

The rows of the input, which are tokens, are quantized in each call, with one scale each, as those of the weight are;
in backward those of the gradient, times the scales of the weight, which lie along the dimension that is summed up.  A
row depends on no other, so the split into batches and ranks changes no result.

Quantizing a row by eager operations takes longer than fp8 saves: a layer of 4096 x 3072 x 12288 took 1.21 x the time
of bf16 on an H100.  So on a GPU these functions are compiled to one kernel each; a CPU runs them as they are.

The LoRA path stays in the dtype of autocast.  Layers whose input has two dimensions, such as modulation layers, which
see one row for each image, and layers with sides that no kernel takes, dequantize their weight.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._triton import has_triton

from .quantize import FP8_DTYPE, FrozenLinear, QuantizedWeight

QUANT_TYPES = "fp8", "int8"
SIDE_MULTIPLE = 16
"""``torch._scaled_mm`` takes matrices whose sides are multiples of this, except the number of rows."""
MIN_ROWS = 32
"""``torch._int_mm`` takes more than 16 rows on CUDA."""
MAX_VALUES = {"fp8": torch.finfo(FP8_DTYPE).max, "int8": 127.0}


class QuantizedMatmulLinear(FrozenLinear):
    """A frozen linear layer that multiplies its quantized weight with its quantized input."""

    def compute_forward(self, input: Tensor, bias: Tensor | None, *, has_backward: bool) -> Tensor:
        if not self._can_multiply(input):
            return super().compute_forward(input, bias, has_backward=has_backward)
        weight = self.fetch_weight(has_backward=has_backward)
        output = multiply_by_rows(input.flatten(0, -2), weight, bias)
        return output.view(*input.shape[:-1], output.shape[-1])

    def compute_backward(self, gradient: Tensor, shape: torch.Size) -> Tensor:
        if not self._can_multiply(gradient):
            return super().compute_backward(gradient, shape)
        weight = self.fetch_weight(in_backward=True)
        return multiply_by_columns(gradient.flatten(0, -2), weight).view(shape)

    def _can_multiply(self, states: Tensor) -> bool:
        # The meta device, on which memory is estimated, has no compiled kernels.
        return states.dim() > 2 and states.dtype == torch.bfloat16 and not states.is_meta


def can_multiply_quantized(layer: nn.Module, weight: QuantizedWeight) -> bool:
    """Whether a layer can become a ``QuantizedMatmulLinear``: weights of files may have scales of blocks, or e5m2."""
    if not isinstance(layer, nn.Linear) or weight.quant_type not in QUANT_TYPES:
        return False
    if weight.tensors[0].dtype not in (FP8_DTYPE, torch.int8) or weight.tensors[1].shape[1] > 1:
        return False
    return not (layer.in_features % SIDE_MULTIPLE or layer.out_features % SIDE_MULTIPLE)


def multiply_by_rows(states: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply rows with the rows of a weight: the output of a layer."""
    quantized, weight_scale = weight.tensors
    values, scale = _quantize(states, None, weight.quant_type)
    return _multiply(values, quantized.t(), scale, weight_scale.t(), bias)[: len(states)]


def multiply_by_columns(gradient: Tensor, weight: QuantizedWeight) -> Tensor:
    """Multiply rows with the columns of a weight: the gradient of a layer's input."""
    quantized, weight_scale = weight.tensors
    values, scale = _quantize(gradient, weight_scale.t(), weight.quant_type)
    by_columns = quantized.t().contiguous().t()  # tensor cores take the second matrix by columns
    ones = torch.ones(1, quantized.shape[1], device=gradient.device)
    return _multiply(values, by_columns, scale, ones, None)[: len(gradient)]


def quantize_rows(states: Tensor, factors: Tensor | None, quant_type: str) -> tuple[Tensor, Tensor]:
    """Return rows in fp8 or int8 and the scale of each, after multiplying the columns with factors."""
    rows = states.float()
    if factors is not None:
        rows = rows * factors.float()
    max_value = MAX_VALUES[quant_type]
    scale = (rows.abs().amax(1, keepdim=True) / max_value).clamp(min=1e-12)
    rows = (rows / scale).clamp(-max_value, max_value)
    return (rows.round().to(torch.int8) if quant_type == "int8" else rows.to(FP8_DTYPE)), scale


def rescale_products(products: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return products of integers in bf16, with the scales of their rows and columns."""
    output = products.float() * row_scale * column_scale.float()
    if bias is not None:
        output = output + bias.float()
    return output.bfloat16()


def _quantize(states: Tensor, factors: Tensor | None, quant_type: str) -> tuple[Tensor, Tensor]:
    if len(states) < MIN_ROWS:
        states = F.pad(states, (0, 0, 0, MIN_ROWS - len(states)))
    quantized: tuple[Tensor, Tensor] = _get_fused(quantize_rows, states)(states, factors, quant_type)
    return quantized


def _multiply(first: Tensor, second: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None) -> Tensor:
    if first.dtype == torch.int8:
        products = torch._int_mm(first, second)
        output: Tensor = _get_fused(rescale_products, products)(products, row_scale, column_scale, bias)
        return output
    scales = row_scale, column_scale.float().contiguous()
    result: Tensor = torch._scaled_mm(first, second, *scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    return result


def _get_fused(function: Callable[..., Any], states: Tensor) -> Callable[..., Any]:
    """Return the function compiled to one kernel; within a compiled block it is part of the block's graph."""
    if states.device.type == "cpu" or torch.compiler.is_compiling():
        return function
    return _FUSED.get(function)


class FusedFunctions:
    """Functions that are compiled when they are called first."""

    def __init__(self) -> None:
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def get(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, dynamic=True)
        return self._compiled[function]


_FUSED = FusedFunctions()


def find_matmul_obstacle(quant_type: str, device: torch.device) -> str:
    """Say why a device cannot multiply in this format; empty if it can.  The kernel is tried."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"there is no kernel for {device.type}"
    if not has_triton():
        return "quantizing the inputs needs Triton, which is not installed or does not work with this GPU"
    weight = QuantizedWeight.quantize(torch.ones(SIDE_MULTIPLE, SIDE_MULTIPLE, device=device), quant_type)
    rows = torch.ones(MIN_ROWS, SIDE_MULTIPLE, device=device, dtype=torch.bfloat16)
    values, scale = quantize_rows(rows, None, quant_type)
    try:
        _try_kernel(values, weight.tensors[0].t(), scale, weight.tensors[1].t())
    except (RuntimeError, NotImplementedError) as error:
        needed = "Ada, Hopper or later" if quant_type == "fp8" else "Turing or later"
        reason = str(error).strip().partition("\n")[0]
        name = torch.cuda.get_device_name(device)
        return f"{name} has no {quant_type} matmul, which needs {needed} ({reason})"
    return ""


def _try_kernel(first: Tensor, second: Tensor, row_scale: Tensor, column_scale: Tensor) -> None:
    if first.dtype == torch.int8:
        torch._int_mm(first, second)
    else:
        _multiply(first, second, row_scale, column_scale, None)
