"""Copies of constants on the device: positions of tokens, which the host computes from sizes alone.

Each is copied once and found by its values from then on.  So a step copies none of them, and a CUDA graph, which cannot
copy from host memory that is freed, finds them where they are.
"""

import torch
from torch import Tensor

MAX_COPIES = 1024
"""Constants that are kept: some tens of kB for each layout of a batch."""


class ConstantCopies:
    """The first constants, by their values and device; none is given up, since a CUDA graph may read it."""

    def __init__(self, max_copies: int = MAX_COPIES, *, keeps_meta_tensors: bool = False):
        """``keeps_meta_tensors``: not for estimates, which count the copies of a step like those of every other."""
        self.max_copies, self.keeps_meta_tensors = max_copies, keeps_meta_tensors
        self._copies: dict[tuple[bytes, torch.Size, torch.dtype, torch.device], Tensor] = {}

    def get(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a copy on the device, which must not be changed."""
        is_real = type(tensor) is Tensor and tensor.is_cpu  # a fake tensor has no values
        if not is_real or device == tensor.device or (device.type == "meta" and not self.keeps_meta_tensors):
            return tensor.to(device, non_blocking=True)
        values = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        key = values, tensor.shape, tensor.dtype, device
        copy = self._copies.get(key)
        if copy is None:
            copy = tensor.to(device, non_blocking=True)
            if len(self._copies) < self.max_copies:
                self._copies[key] = copy
        return copy


_CONSTANTS = ConstantCopies()


def copy_constant(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a constant to a device, unless an equal one is there; the copy must not be changed."""
    return _CONSTANTS.get(tensor, device)
