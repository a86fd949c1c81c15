"""Dropout of adapters, as a function of seed, step and place: the same on every device and however a step is split.

torch's own draws from a global generator, and for a whole batch at once.  Here each number is a hash of the sample's
key, the module and the place in the module.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_UINT32_MASK = 0xFFFFFFFF
SEQUENCE_NDIM = 3
"""Axes where a layer is given one token after the other."""


class LoraDropout:
    """Leaves out parts of what the down matrices of a LoRA say, while the model is in training."""

    def __init__(self, dropout: float, rank_dropout: float, module_dropout: float):
        self.dropout, self.rank_dropout, self.module_dropout = dropout, rank_dropout, module_dropout
        self.sample_keys: Tensor | None = None
        """One number for each sample of the batch; without it nothing is left out."""
        self.token_positions: Callable[[nn.Module], Tensor | None] = lambda down: None
        """Which of all tokens a down matrix is given, where others are given the rest."""

    def attach(self, down_layers: Iterable[nn.Module]) -> None:
        """Down matrices that modules share are met once and speak alike for all of them."""
        for number, down in enumerate({id(down): down for down in down_layers}.values()):
            down.register_forward_hook(self._make_hook(torch.tensor(number)))

    def _make_hook(self, layer_index: Tensor) -> Any:
        # As a tensor, it is not part of what is compiled, which would be compiled for each module otherwise.
        def apply_dropout(module: nn.Module, given: Any, said: Tensor) -> Tensor:
            if not module.training or self.sample_keys is None:
                return said
            if isinstance(module, nn.Conv2d):
                return self.apply(said, layer_index, axis=1)
            places = self.token_positions(module) if said.dim() == SEQUENCE_NDIM else None
            return self.apply(said, layer_index, axis=-1, positions=places)

        return apply_dropout

    def apply(self, activations: Tensor, layer_index: int | Tensor, axis: int, positions: Tensor | None = None) -> Tensor:
        """``said`` (B, ..., rank), or (B, rank, height, width), with what is left out at zero and the rest larger."""
        if self.sample_keys is None:
            raise AssertionError("the samples have no keys")
        pieces, left = divmod(len(activations), len(self.sample_keys))  # a long caption is read in pieces, one after the other
        if left:
            raise AssertionError(f"{len(activations)} rows of {len(self.sample_keys)} samples")
        keys = self.sample_keys.to(activations.device).repeat_interleave(pieces)
        if self.dropout:
            columns = torch.arange(activations[0].numel(), device=activations.device)
            if positions is not None:
                columns = (positions.to(activations.device)[:, None] * activations.shape[-1] + columns[: activations.shape[-1]]).flatten()
            kept = hash_to_uniform(keys, 3 * layer_index, columns).view(activations.shape) >= self.dropout
            activations = activations * kept / (1 - self.dropout)
        shape = [len(keys)] + [1] * (activations.dim() - 1)
        if self.module_dropout:  # not made up for, as in sd-scripts
            activations = activations * (hash_to_uniform(keys, 3 * layer_index + 1, torch.zeros_like(keys[:1])).view(shape) >= self.module_dropout)
        if self.rank_dropout:
            shape[axis] = activations.shape[axis]
            columns = torch.arange(activations.shape[axis], device=activations.device)
            kept = hash_to_uniform(keys, 3 * layer_index + 2, columns).view(shape) >= self.rank_dropout
            activations = activations * kept / (1 - self.rank_dropout)
        return activations


def hash_to_uniform(keys: Tensor, stream: int | Tensor, columns: Tensor) -> Tensor:
    """(B, columns) numbers from 0 to 1, each a function of its row's key, the stream and the column."""
    rows = _mix_bits(_mix_bits(keys & _UINT32_MASK) + (keys >> 32 & _UINT32_MASK) + stream * 0x9E3779B1)
    return _mix_bits(rows[:, None] + columns * 0x85EBCA6B).float().div(2**32).clamp_max(1 - 2**-24)


def _mix_bits(values: Tensor) -> Tensor:
    """A hash of 32 bits; products that overflow 64 bits are right in the 32 that are kept."""
    values = values & _UINT32_MASK
    values = (values ^ values >> 16) * 0x7FEB352D & _UINT32_MASK
    values = (values ^ values >> 15) * 0x846CA68B & _UINT32_MASK
    return values ^ values >> 16
