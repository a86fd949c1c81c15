"""Stochastic rounding of weights in bf16 (``--full_bf16`` with ``--train full``), for every optimizer.

bf16 has steps of 2^-8 of a value, and most updates are smaller: rounded to the nearest value they are lost.  So an
optimizer updates copies in float32, of a few weights at a time, which are then rounded up or down at random, with the
probability that makes the mean that of float32.  Moments are held in bf16 and rounded in the same way.

The random bits of an element are a hash of the seed, the step, the name of its weight and its place in the whole
weight.  So they are the same on every device, however weights are distributed over ranks, and in a run that is resumed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..randomness import Purpose, derive_seed

MAX_ELEMENTS = 2**23
"""Elements of the weights that are held in float32 at once, unless a single weight has more."""
DROPPED_BITS = 16
"""The bits of float32 that bf16 lacks."""
FACTORS = (0x9E3779B1 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)
"""Odd factors that mix the bits of 32-bit integers, as signed numbers; the last two are those of MurmurHash3."""


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _list_all_positions(weight: Tensor) -> Tensor:
    return torch.arange(weight.numel(), dtype=torch.int32, device=weight.device)


@dataclass(frozen=True)
class WeightParts:
    """How a rank reaches its part of a weight, or of a moment; by default it has all of each."""

    get_local: Callable[[Tensor], Tensor] = _keep
    """Return the part as a plain tensor that shares its memory."""
    present_like: Callable[[Tensor, Tensor], Tensor] = lambda local, weight: local
    """Present a plain tensor of the size of the part as the weight is."""
    list_positions: Callable[[Tensor], Tensor] = _list_all_positions
    """List the places of the part's elements in the whole weight, flat, as int32."""


WHOLE_WEIGHTS = WeightParts()


def hash_positions(positions: Tensor, key: int) -> Tensor:
    """Hash each position (int32) with a key of 63 bits to 32 random bits."""
    mixed = positions * FACTORS[0]
    mixed += _to_int32(key)
    mixed ^= (mixed >> 16) & 0xFFFF
    mixed ^= _to_int32(key >> 31)
    mixed *= FACTORS[1]
    mixed ^= (mixed >> 13) & 0x7FFFF
    mixed *= FACTORS[2]
    mixed ^= (mixed >> 16) & 0xFFFF
    return mixed


def _to_int32(value: int) -> int:
    """Return the low 32 bits as a signed number."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 up or down to bf16, by the low 16 of the random bits; the mean is the value itself.

    Adding random bits below those that bf16 has carries into them as often as the value lies above the lower neighbor.
    """
    rounded = values.contiguous().view(torch.int32) + (bits.view(values.shape) & (2**DROPPED_BITS - 1))
    rounded &= -(2**DROPPED_BITS)
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).to(torch.bfloat16)


class StochasticRounding:
    """Lets an optimizer update copies of bf16 weights in float32, and rounds them and their moments stochastically."""

    def __init__(
        self,
        optimizer: Optimizer,
        seed: int,
        names: Mapping[Tensor, str],
        parts: WeightParts = WHOLE_WEIGHTS,
    ):
        """``names`` are those of the weights, and ``parts`` what this rank has of them."""
        self._optimizer, self._seed, self._names, self._parts = optimizer, seed, names, parts
        self._step = 0

    def start_step(self, step: int) -> None:
        """Begin an optimizer step."""
        self._step = step

    @contextmanager
    @torch.no_grad()
    def hold_in_float32(self, weights: Sequence[Tensor]) -> Iterator[Mapping[Tensor, nn.Parameter]]:
        """Yield copies in float32, with gradients and state, by their weights; round what the context makes of them."""
        copies = {weight: self._copy(weight) for weight in weights if weight.dtype == torch.bfloat16}
        try:
            yield copies
        finally:
            for weight, copy in copies.items():
                self._round(weight, copy)

    def split(self, weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Split weights into those that are held in float32 at once."""
        return split_by_size(weights, [self._parts.get_local(weight).numel() for weight in weights])

    def _copy(self, weight: Tensor) -> nn.Parameter:
        get_local = self._parts.get_local
        copy = nn.Parameter(get_local(weight.detach()).float())
        if weight.grad is not None:
            copy.grad = get_local(weight.grad).float()
        state = self._optimizer.state.pop(weight, None)
        if state is not None:
            self._optimizer.state[copy] = {
                key: get_local(value).float() if _is_moment(value, weight, torch.bfloat16) else value
                for key, value in state.items()
            }
        return copy

    def _round(self, weight: Tensor, copy: nn.Parameter) -> None:
        positions, state = self._parts.list_positions(weight), self._optimizer.state.pop(copy, None)
        self._parts.get_local(weight.detach()).copy_(self._draw(copy.detach(), weight, "", positions))
        if state is not None:
            self._optimizer.state[weight] = {
                key: self._parts.present_like(self._draw(value, weight, f"/{key}", positions), weight)
                if _is_moment(value, copy, torch.float32)
                else value
                for key, value in state.items()
            }

    def _draw(self, values: Tensor, weight: Tensor, suffix: str, positions: Tensor) -> Tensor:
        key = derive_seed(self._seed, f"{Purpose.ROUNDING}/{self._names[weight]}{suffix}", self._step)
        return round_to_bf16(values, hash_positions(positions, key))


def split_by_size(
    weights: Sequence[Tensor], sizes: Sequence[int], max_elements: int = MAX_ELEMENTS
) -> Iterator[list[Tensor]]:
    """Split weights of these sizes into parts of at most so many elements, or of single weights."""
    part, used = list[Tensor](), 0
    for weight, size in zip(weights, sizes, strict=True):
        if part and used + size > max_elements:
            yield part
            part, used = [], 0
        part.append(weight)
        used += size
    if part:
        yield part


def _is_moment(value: object, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a value of the state has an element for each of the weight, and is not one that bitsandbytes pages.

    Paged state has memory of its own, which the device and the host share, and stays there in float32.
    """
    if not isinstance(value, Tensor) or getattr(value, "is_paged", False):
        return False
    return value.dtype == dtype and value.dim() > 0 and value.shape == weight.shape
