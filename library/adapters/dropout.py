"""Dropout of adapters, as a function of seed, step and place: the same on every device and however a step is split.

torch's own draws from a global generator, and for a whole batch at once.  Here each number is a hash of the sample's
key, the module and the place in the module.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_BITS = 0xFFFFFFFF
TOKENS = 3
"""Axes where a layer is given one token after the other."""


class Dropout:
    """Leaves out parts of what the down matrices of a LoRA say, while the model is in training."""

    def __init__(self, neurons: float, ranks: float, modules: float):
        self.neurons, self.ranks, self.modules = neurons, ranks, modules
        self.keys: Tensor | None = None
        """One number for each sample of the batch; without it nothing is left out."""
        self.places: Callable[[nn.Module], Tensor | None] = lambda down: None
        """Which of all tokens a down matrix is given, where others are given the rest."""

    def attach(self, downs: Iterable[nn.Module]) -> None:
        """Down matrices that modules share are met once and speak alike for all of them."""
        for number, down in enumerate({id(down): down for down in downs}.values()):
            down.register_forward_hook(self._hook(torch.tensor(number)))

    def _hook(self, number: Tensor) -> Any:
        # As a tensor, it is not part of what is compiled, which would be compiled for each module otherwise.
        def leave_out(module: nn.Module, given: Any, said: Tensor) -> Tensor:
            if not module.training or self.keys is None:
                return said
            if isinstance(module, nn.Conv2d):
                return self.applied(said, number, axis=1)
            places = self.places(module) if said.dim() == TOKENS else None
            return self.applied(said, number, axis=-1, places=places)

        return leave_out

    def applied(self, said: Tensor, number: int | Tensor, axis: int, places: Tensor | None = None) -> Tensor:
        """``said`` (B, ..., rank), or (B, rank, height, width), with what is left out at zero and the rest larger."""
        if self.keys is None:
            raise AssertionError("the samples have no keys")
        pieces, left = divmod(len(said), len(self.keys))  # a long caption is read in pieces, one after the other
        if left:
            raise AssertionError(f"{len(said)} rows of {len(self.keys)} samples")
        keys = self.keys.to(said.device).repeat_interleave(pieces)
        if self.neurons:
            columns = torch.arange(said[0].numel(), device=said.device)
            if places is not None:
                columns = (places.to(said.device)[:, None] * said.shape[-1] + columns[: said.shape[-1]]).flatten()
            kept = uniform(keys, 3 * number, columns).view(said.shape) >= self.neurons
            said = said * kept / (1 - self.neurons)
        shape = [len(keys)] + [1] * (said.dim() - 1)
        if self.modules:  # not made up for, as in sd-scripts
            said = said * (uniform(keys, 3 * number + 1, torch.zeros_like(keys[:1])).view(shape) >= self.modules)
        if self.ranks:
            shape[axis] = said.shape[axis]
            columns = torch.arange(said.shape[axis], device=said.device)
            kept = uniform(keys, 3 * number + 2, columns).view(shape) >= self.ranks
            said = said * kept / (1 - self.ranks)
        return said


def uniform(keys: Tensor, stream: int | Tensor, columns: Tensor) -> Tensor:
    """(B, columns) numbers from 0 to 1, each a function of its row's key, the stream and the column."""
    rows = _mixed(_mixed(keys & _BITS) + (keys >> 32 & _BITS) + stream * 0x9E3779B1)
    return _mixed(rows[:, None] + columns * 0x85EBCA6B).float().div(2**32).clamp_max(1 - 2**-24)


def _mixed(numbers: Tensor) -> Tensor:
    """A hash of 32 bits; products that overflow 64 bits are right in the 32 that are kept."""
    numbers = numbers & _BITS
    numbers = (numbers ^ numbers >> 16) * 0x7FEB352D & _BITS
    numbers = (numbers ^ numbers >> 15) * 0x846CA68B & _BITS
    return numbers ^ numbers >> 16
