"""What the weights of the denoiser's blocks take in each format of ``quantize_base``, and with blocks swapped.

It is computed from the shapes, so that one step on the meta device serves for all formats and numbers of blocks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..parallel.block_swap import OffloadedBytes, count_block_bytes
from ..parallel.frozen_base import (
    can_store_layer,
    find_innermost_blocks,
    list_experts,
    pack_weight,
    select_spread_indices,
    should_quantize,
)
from ..parallel.quantize import QuantizedWeight, split_expert_weights
from ..parallel.trained_block_swap import count_swapped_bytes, list_swappable_parameters
from .optimizer_memory import WeightKind, count_kinds

UNPACKING_TRAFFIC: Mapping[str, int] = {"none": 0, "fp8": 24, "int8": 24, "nf4": 4}
"""Bytes of device memory for each unpacked element.

From the time of FLUX.1 with fp8 on an H100, and of the kernel of bitsandbytes for nf4 there.
"""
GGUF_TRAFFIC = 60
"""Bytes for each element of blocks of GGUF and other formats of files, counted from the operations of Q4_K."""
KERNELS_PER_UNPACKING = 2.5
"""Kernels that unpack one quantized weight on a GPU."""
TRAINED_COPIES = 3
"""Copies of a block whose weights are trained: to the device for forward and backward, and back."""


@dataclass(frozen=True)
class StoredBase:
    """The weights of the denoiser's blocks in one format, some of them in host memory."""

    saved_bytes: int = 0
    """Bytes of frozen weights that the device has less than with all of them as they are in the model files."""
    swapped_kinds: Mapping[WeightKind, int] = field(default_factory=dict)
    """The number of trained weights of each kind in host memory (``--train full``)."""
    swapped_bytes: int = 0
    """Bytes of these weights."""
    offloaded: OffloadedBytes = field(default_factory=OffloadedBytes)
    visited_blocks: float = 0
    """Blocks in host memory that a step uses."""
    copied_bytes: float = 0
    """Bytes that a step copies from host memory, forward and backward."""
    unpacked_weights: int = 0
    unpacking_traffic: int = 0
    """Bytes of device memory that are read and written to unpack every weight once."""
    largest_unpacked: int = 0
    """Bytes of the largest weight that is unpacked only because of ``quantize_base``, while its layer computes."""


class BlockStorage(Protocol):
    """Computes what the weights of a denoiser's blocks would take on the device and in host memory."""

    @property
    def count(self) -> int:
        """The number of blocks that can be swapped."""

    def store(self, quantize_base: str, blocks_to_swap: int, ring_size: int = 0) -> StoredBase:
        """Compute what training would have on the device and in host memory."""


class TrainedBlockWeights:
    """The parameters of a denoiser's blocks, of which full training swaps all, frozen ones included."""

    def __init__(self, denoiser: nn.Module):
        blocks = list_swappable_parameters(denoiser)
        self._sizes = [count_swapped_bytes(block) for block in blocks]
        trained = [[each for each in block if each.requires_grad] for block in blocks]
        self._kinds = [count_kinds(block) for block in trained]
        self._trained_bytes = [sum(each.nbytes for each in block) for block in trained]
        self._frozen_bytes = [sum(each.nbytes for each in block if not each.requires_grad) for block in blocks]
        self._stored: dict[tuple[int, int], StoredBase] = {}

    @property
    def count(self) -> int:
        return len(self._sizes)

    def store(self, quantize_base: str, blocks_to_swap: int, ring_size: int = 0) -> StoredBase:
        key = blocks_to_swap, ring_size
        if key not in self._stored:
            swapped = [index for index in select_spread_indices(self.count, blocks_to_swap) if self._sizes[index]]
            self._stored[key] = self._swap(swapped, ring_size)
        return self._stored[key]

    def _swap(self, swapped: Sequence[int], ring_size: int) -> StoredBase:
        sizes = [self._sizes[index] for index in swapped]
        return StoredBase(
            saved_bytes=sum(self._frozen_bytes[index] for index in swapped),
            swapped_kinds=sum((self._kinds[index] for index in swapped), Counter[WeightKind]()),
            swapped_bytes=sum(self._trained_bytes[index] for index in swapped),
            offloaded=OffloadedBytes.from_blocks(sizes, ring_size),
            visited_blocks=len(swapped),
            copied_bytes=TRAINED_COPIES * sum(sizes),
        )


class BlockWeights:
    """The convertible frozen weights of a denoiser, by block, as its files have them, before any is swapped."""

    def __init__(self, denoiser: nn.Module):
        split_expert_weights(denoiser)
        self._experts = len(list_experts(denoiser))
        self._blocks = [_list_weights(block) for block in find_innermost_blocks(denoiser)]
        self._sizes: dict[str, list[tuple[int, int]]] = {}
        self._packed: dict[str, list[list[QuantizedWeight]]] = {}

    @property
    def count(self) -> int:
        return len(self._blocks)

    def store(self, quantize_base: str, blocks_to_swap: int, ring_size: int = 0) -> StoredBase:
        sizes, before = self._count_bytes(quantize_base), sum(size for size, _ in self._count_bytes("none"))
        swapped = set(select_spread_indices(self.count, blocks_to_swap))
        on_device = sum(size for index, (size, _) in enumerate(sizes) if index not in swapped)
        offloaded = [sizes[index][1] for index in sorted(swapped) if sizes[index][1]]
        packed = [weight for block in self._pack(quantize_base) for weight in block if weight.quant_type != "none"]
        plain = [] if quantize_base == "none" else [weight for block in self._blocks for weight in block]
        in_host_memory = OffloadedBytes.from_blocks(offloaded, ring_size)
        return StoredBase(
            saved_bytes=before - on_device,
            offloaded=in_host_memory,
            visited_blocks=len(offloaded) / self._experts,
            copied_bytes=self._count_copied_bytes(in_host_memory, len(offloaded)),
            unpacked_weights=len(packed),
            unpacking_traffic=sum(
                UNPACKING_TRAFFIC.get(weight.quant_type, GGUF_TRAFFIC) * weight.shape.numel() for weight in packed
            ),
            largest_unpacked=max((weight.nbytes for weight in plain if weight.quant_type == "none"), default=0),
        )

    def _count_copied_bytes(self, offloaded: OffloadedBytes, num_blocks: int) -> float:
        """Count a step's copies; the ring may hold all blocks of an expert, which every other step changes."""
        stays = self._experts > 1 and offloaded.ring_size * self._experts >= num_blocks
        return offloaded.total / self._experts * (0.5 if stays else 2)

    def _count_bytes(self, quantize_base: str) -> list[tuple[int, int]]:
        """Count the bytes of each block in a format, as they are and in host memory, once."""
        if quantize_base not in self._sizes:
            self._sizes[quantize_base] = [
                (sum(weight.nbytes for weight in block), count_block_bytes(block))
                for block in self._pack(quantize_base)
            ]
        return self._sizes[quantize_base]

    def _pack(self, quantize_base: str) -> list[list[QuantizedWeight]]:
        """The weights of each block as training keeps them."""
        if quantize_base not in self._packed:
            self._packed[quantize_base] = [[_round(each, quantize_base) for each in block] for block in self._blocks]
        return self._packed[quantize_base]


def _round(weight: QuantizedWeight, quantize_base: str) -> QuantizedWeight:
    if not should_quantize(weight, quantize_base):
        return weight
    return QuantizedWeight.quantize(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), quantize_base)


def _list_weights(block: nn.Module) -> list[QuantizedWeight]:
    layers: list[Any] = [*block.modules()]
    return [pack_weight(layer) for layer in layers if can_store_layer(layer)]
