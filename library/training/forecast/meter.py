"""Bytes that are alive at once while a program runs, and what it computes; no allocator is asked.

It works on real tensors, and on those of torch's device ``meta``, which have sizes and no numbers.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Fused attention that tensors without numbers have, too; it keeps what other devices' fused attention keeps."""


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts memory that tensors of a device, or of a kind of devices, get, until the last tensor in it is gone."""

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()):
        """``known`` were there before, and do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.alive, self.peak, self.flops = device, 0, 0, 0
        self._met: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        made = function(*arguments, **named)
        for item in tree_leaves(made):
            if isinstance(item, Tensor) and self._is_here(item.device):
                self._meet(item.untyped_storage())
        self.flops += _flops(function.overloadpacket, arguments, named, made)
        return made

    def _is_here(self, device: torch.device) -> bool:
        return device.type == self.device.type and self.device.index in (None, device.index)

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._met:
            return
        self._met[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _forget(self, key: int, size: int) -> None:
        del self._met[key]
        self.alive -= size


def _flops(operation: Any, arguments: Any, named: Any, made: Any) -> int:
    """By torch's table, in which this attention is missing: two products of matrices, and five to go back."""
    if operation in (ATTENTION, BACKWARD):
        query, key, _ = arguments[:3] if operation is ATTENTION else arguments[1:4]
        return int(2 * key.shape[-2] * query.numel() * (2 if operation is ATTENTION else 5))
    counted = flop_registry.get(operation)
    return 0 if counted is None else int(counted(*arguments, **named, out_val=made))
