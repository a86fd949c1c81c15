"""Frozen convolutions of few positions, on CPUs in float32: one matrix product each.

oneDNN reorders the weight of a convolution for its kernels in every call, forward and backward.  The weights of a
UNet's deepest layers have 59 to 118 MB and their images down to 4 x 4 positions, so that reordering takes longer than
multiplying: half to two thirds of the time of such a layer, a fifth of a training step of Stable Diffusion 1 at
256 x 256.  A matrix product reads the weight as it lies.  The sums are the same, in another order, so results differ
by rounding.

Only the gradient of the input is computed, for which the input need not be kept; torch keeps it for any convolution.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..distributed.devices import HOST

MIN_WEIGHTS = 2**23
"""Elements; below, oneDNN's copy fits in the caches of a CPU and costs little."""
MAX_POSITIONS = 256
"""Positions of the output, of all images of a batch; from 512 on oneDNN is as fast, with its copies."""


class _ConvolutionByProduct(torch.autograd.Function):
    """``F.conv2d`` with a weight and a bias that are not trained."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.sides = geometry, states.shape[-2:]
        kernel, stride, padding = geometry
        sides = count_positions(states, kernel, stride, padding)
        columns = F.unfold(states, kernel, padding=padding, stride=stride).transpose(1, 2)
        output = F.linear(columns.reshape(-1, columns.shape[-1]), weight.flatten(1), bias)
        return output.view(len(states), *sides, -1).permute(0, 3, 1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (kernel, stride, padding) = ctx.saved_tensors, ctx.geometry
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        rows = gradient.permute(0, 2, 3, 1).reshape(-1, gradient.shape[1])
        columns = torch.mm(rows, weight.flatten(1)).view(len(gradient), -1, weight[0].numel()).transpose(1, 2)
        grad = F.fold(columns, ctx.sides, kernel, padding=padding, stride=stride)
        return grad, None, None, None, None, None


def count_positions(states: Tensor, *geometry: tuple[int, ...]) -> tuple[int, int]:
    """Return height and width of the output of a convolution with this kernel, stride and padding."""
    sides = zip(states.shape[-2:], *geometry, strict=True)
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side, kernel, stride, padding in sides)
    return height, width


class SmallConvolution:
    """Replaces the ``forward`` of a convolution; what is no frozen float32 one of few positions stays torch's."""

    def __init__(self, module: nn.Conv2d):
        self.module = module
        self._forward = module.forward

    def __call__(self, states: Tensor) -> Tensor:
        module, weight, bias = self.module, self.module.weight, self.module.bias
        if not self._is_supported(states, weight, bias):
            return self._forward(states)
        geometry = module.kernel_size, module.stride, module.padding
        output: Tensor = _ConvolutionByProduct.apply(states, weight, bias, *geometry)  # type: ignore[no-untyped-call]
        return output

    def _is_supported(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if states.device.type != HOST.type or states.ndim != 4 or torch.is_autocast_enabled(HOST.type):
            return False
        tensors = [states, weight, *([] if bias is None else [bias])]
        if any(type(each) not in (Tensor, nn.Parameter) or each.dtype != torch.float32 for each in tensors):
            return False
        if any(each.requires_grad for each in tensors[1:]) or weight.ndim != 4 or not weight.is_contiguous():
            return False
        module: Any = self.module
        height, width = count_positions(states, module.kernel_size, module.stride, module.padding)
        return weight.numel() >= MIN_WEIGHTS and len(states) * height * width <= MAX_POSITIONS


def multiply_small_convolutions(model: nn.Module) -> int:
    """Replace ``forward`` of the convolutions of a model that could be computed as products; return their number."""
    count = 0
    for module in model.modules():
        if type(module) is not nn.Conv2d or module.groups != 1 or {*module.dilation} != {1}:
            continue
        is_padded_by_zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        if is_padded_by_zeros and module.kernel_size != (1, 1) and module.weight.numel() >= MIN_WEIGHTS:
            module.forward = SmallConvolution(module)  # type: ignore[assignment,method-assign]
            count += 1
    return count
