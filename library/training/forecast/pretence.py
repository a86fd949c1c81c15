"""Tensors without numbers that are computed with as an accelerator would: attention in one piece, and autocast.

torch's device ``meta`` has neither.  Attention would be written out as a large matrix there, and all would stay in the
precision that it has.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .meter import ATTENTION

HALF = frozenset([
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, torch.matmul, Tensor.matmul, Tensor.__matmul__,
    torch.bmm, Tensor.bmm, torch.baddbmm, torch.addmm, torch.einsum, F.scaled_dot_product_attention,
])  # fmt: skip
"""What CUDA's autocast computes in half precision; those of its list that models of this kind use."""
FULL = frozenset([
    F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, torch.pow, Tensor.pow, Tensor.__pow__,
    torch.rsqrt, Tensor.rsqrt, torch.exp, Tensor.exp, torch.sum, Tensor.sum, torch.cumsum, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, torch.norm, Tensor.norm, F.normalize,
])  # fmt: skip
"""And what it computes in float32."""


class Pretence(TorchFunctionMode):
    """While it is on, with ``half`` as the precision of autocast, or none."""

    def __init__(self, half: torch.dtype | None, *, fused: bool = True):
        super().__init__()
        self._half, self._fused = half, fused

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if self._half is not None and (function in HALF or function in FULL):
            dtype = self._half if function in HALF else torch.float32
            arguments, named = tree_map(lambda item: _as(item, dtype), (tuple(arguments), named))
        if self._fused and function is F.scaled_dot_product_attention:
            three = [*arguments[:3], *(named[name] for name in ("query", "key", "value") if name in named)]
            if all(each.ndim == 4 and each.shape[-1] == three[0].shape[-1] for each in three):
                return ATTENTION(*three)[0]
        return function(*arguments, **named)


def backward(said: Sequence[Tensor]) -> None:
    """Backward from all of them; torch's own function for it would switch a pretence off as long as it lasts."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(said), tuple(map(torch.empty_like, said)), False, False, (), allow_unreachable=True,
                        accumulate_grad=True)  # fmt: skip


def _as(item: Any, dtype: torch.dtype) -> Any:
    """Numbers of other floating precisions, but for float64, which autocast leaves alone."""
    if isinstance(item, Tensor) and item.is_floating_point() and item.dtype not in (dtype, torch.float64):
        return item.to(dtype)
    return item
