"""CPU offload of frozen weights (``--blocks_to_swap``) with prefetch on a copy stream, and base quantization.

Offloaded weights are frozen, so they are only ever copied to the device and dropped after use.  The order of use is
recorded in the first step; from then on the next weight is prefetched while the current one is used.

The host runs ahead of the device and would allocate weights that the device uses much later.  So it waits for the
device at ``MAX_BYTES_AHEAD``, which leaves the device enough queued work.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import ModelConfig, TrainConfig
from ..distributed.async_copy import CopyStream, copy_to_host
from .quantize import FetchWeight, QuantizedWeight, can_convert_frozen_layer, convert_frozen_layer

logger = logging.getLogger(__name__)
AccessHistory = tuple[bool, tuple[int, ...]]
"""Whether in a backward pass, and the latest weights: activation checkpointing fetches in more than one order."""

HISTORY_LENGTH = 3
MAX_BYTES_AHEAD = 2**28
"""Bytes of fetched weights that the device may still have to use."""


class WeightOffloader:
    """Weights in host memory, fetched by index."""

    def __init__(self, device: torch.device, copy: Callable[[Tensor], Tensor] | None = None):
        """``copy`` starts an asynchronous copy of a tensor to the device."""
        self.device, self.host_weights = device, list[QuantizedWeight]()
        self.prefetch_hits = 0
        """Fetches whose weight was prefetched."""
        self._copy_stream = CopyStream(device)
        self._copy = copy or (lambda tensor: tensor.to(device, non_blocking=True))
        self._next_index: dict[AccessHistory, int] = {}
        self._history: AccessHistory = (False, ())
        self._prefetched: tuple[int, QuantizedWeight] | None = None
        self._in_flight = deque[tuple[Any, int]]()
        """Events after the use of each weight on the device, and the weights' bytes."""
        self._bytes_in_use = 0

    def offload(self, weight: QuantizedWeight) -> FetchWeight:
        """Move a weight to (pinned) host memory and return the function that fetches it."""
        index = len(self.host_weights)
        self.host_weights.append(weight.map_tensors(copy_to_host))
        return lambda: self.fetch(index)

    def fetch(self, index: int) -> QuantizedWeight:
        """Return the weight on the device, and prefetch the one that was used after it last time."""
        self._limit_bytes_ahead()
        weight = self._take_prefetched(index)
        self._bytes_in_use = weight.nbytes
        is_backward = torch._C._current_graph_task_id() != -1
        self._next_index[self._history] = index
        self._history = (is_backward, (*self._history[1], index)[-HISTORY_LENGTH:])
        following = self._next_index.get(self._history)
        if following is not None:
            copy_next = partial(self.host_weights[following].map_tensors, self._copy)
            self._prefetched = following, self._copy_stream.run_on_stream(copy_next)
        return weight

    def _limit_bytes_ahead(self) -> None:
        """Wait for the device while too much is in flight; a fetch means that the last weight's work is queued."""
        if (event := self._copy_stream.record_event()) is None:
            return
        self._in_flight.append((event, self._bytes_in_use))
        while sum(num_bytes for _, num_bytes in self._in_flight) > MAX_BYTES_AHEAD:
            self._in_flight.popleft()[0].synchronize()

    def _take_prefetched(self, index: int) -> QuantizedWeight:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or prefetched[0] != index:
            return self.host_weights[index].map_tensors(self._copy)
        self.prefetch_hits += 1
        self._copy_stream.wait_for_copies(prefetched[1].tensors)
        return prefetched[1]


def is_quantized_or_offloaded(model: ModelConfig, train: TrainConfig) -> bool:
    """Whether any part of the base model is quantized or offloaded."""
    return bool(train.blocks_to_swap) or model.quantize_base != "none"


def quantize_and_offload_base(denoiser: nn.Module, device: torch.device, model: ModelConfig, train: TrainConfig) -> int:
    """Quantize the frozen weights of all blocks, and offload some blocks, evenly spread so that copies overlap.

    Return the bytes in host memory.
    """
    blocks, quant_type, offloader = find_innermost_blocks(denoiser), model.quantize_base, WeightOffloader(device)
    swapped = set(select_spread_indices(len(blocks), train.blocks_to_swap))
    bytes_before = bytes_on_device = bytes_on_host = 0
    for index, block in enumerate(blocks):
        for layer in block.modules():
            if not can_convert_frozen_layer(layer) or (quant_type == "none" and index not in swapped):
                continue
            own: Any = layer
            bytes_before += own.weight.nbytes
            weight = QuantizedWeight.quantize(own.weight.to(device), quant_type)
            if index in swapped:
                convert_frozen_layer(layer, offloader.offload(weight))
                bytes_on_host += weight.nbytes
            else:
                convert_frozen_layer(layer, weight.get)
                bytes_on_device += weight.nbytes
    logger.info(
        "base model: frozen weights of %d blocks: %.2f GB -> %.2f GB on the device (%s), %d blocks offloaded (%.2f GB)",
        len(blocks),
        bytes_before / 1e9,
        bytes_on_device / 1e9,
        quant_type,
        len(swapped),
        bytes_on_host / 1e9,
    )
    return bytes_on_host


def find_innermost_blocks(denoiser: Any) -> list[nn.Module]:
    """Return the blocks that diffusers lists as repeated or not to be split, without those that contain others."""
    attributes = (getattr(denoiser, name, None) or () for name in ("_repeated_blocks", "_no_split_modules"))
    class_names = {name for names in attributes for name in names}
    blocks = [module for module in denoiser.modules() if type(module).__name__ in class_names]
    known = set(blocks)
    return [block for block in blocks if not known & set(list(block.modules())[1:])]


def select_spread_indices(count: int, num_selected: int) -> list[int]:
    """Return ``num_selected`` of the indices below ``count``, evenly spread."""
    return [index for index in range(count) if (index + 1) * num_selected // count > index * num_selected // count]
