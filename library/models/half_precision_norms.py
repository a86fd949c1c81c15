"""Norms that write the dtype of autocast.

CUDA's autocast computes norms in float32: it casts their input, and each reader of their output casts that again, so
that a norm in front of three projections makes four copies of its activations, of which three are kept for backward.
The kernels of norms read and write half precision and compute in float32 inside; here they are called that way, and an
input in float32 is normalized in float32 and cast once.  The RMSNorm of diffusers becomes one kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Normalize = Callable[[Any, Tensor, Tensor | None, Tensor | None], Tensor]


def _normalize_layer(module: Any, states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return torch.layer_norm(states, module.normalized_shape, weight, bias, module.eps)


def _normalize_groups(module: Any, states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return torch.group_norm(states, module.num_groups, weight, bias, module.eps)


def _normalize_rms(module: Any, states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = getattr(module, "normalized_shape", None) or module.dim
    # torch.rms_norm by its operator, as estimates count the fused kernel, which the meta device does not have.
    output: Tensor = torch.ops.aten.rms_norm.default(states, list(shape), weight, module.eps)
    return output if bias is None else output + bias


class HalfPrecisionNorm:
    """Replaces the ``forward`` of a norm."""

    def __init__(self, module: Any, normalize: Normalize, dtype: torch.dtype):
        self.module, self.normalize, self.dtype = module, normalize, dtype
        self._forward = module.forward

    def __call__(self, states: Tensor) -> Tensor:
        device = states.device.type
        if not states.is_meta and not (
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == self.dtype
        ):
            output: Tensor = self._forward(states)
            return output
        weight, bias = (getattr(self.module, name, None) for name in ("weight", "bias"))
        weight, bias = (None if each is None else each.to(states.dtype) for each in (weight, bias))
        if states.is_meta:  # autocast is emulated there, for the functions of torch.nn alone
            return self.normalize(self.module, states, weight, bias).to(self.dtype)
        torch.set_autocast_enabled(device, False)
        try:
            return self.normalize(self.module, states, weight, bias).to(self.dtype)
        finally:
            torch.set_autocast_enabled(device, True)


def write_norms_in_half_precision(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace ``forward`` of the norms of a model that is trained under autocast to ``dtype``; return their number."""
    from diffusers.models.normalization import RMSNorm

    functions: dict[type[nn.Module], Normalize] = {
        nn.LayerNorm: _normalize_layer,
        nn.GroupNorm: _normalize_groups,
        nn.RMSNorm: _normalize_rms,
        RMSNorm: _normalize_rms,
    }
    count = 0
    for module in model.modules():
        normalize = functions.get(type(module))
        if normalize is not None and not any(each.requires_grad for each in module.parameters()):
            module.forward = HalfPrecisionNorm(module, normalize, dtype)
            count += 1
    return count
