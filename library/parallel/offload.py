"""Weights that rest in host memory: each is copied to the device shortly before it is needed, and dropped after it.

They are frozen, so nothing is ever copied back.  Which weight comes after which is learnt from the first step; from
then on each is sent on its way while the one before is being used, on a stream of its own.

The program is ahead of the device, and takes memory for weights that the device comes to much later.  So it waits for
the device when it is too far ahead, which then has enough to do to compute on meanwhile.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..distributed.async_copy import CopyStream, copy_to_host
from .quantize import QuantizedWeight, can_convert_frozen_layer, convert_frozen_layer

AccessHistory = tuple[bool, tuple[int, ...]]
"""Whether in a backward pass, and the latest weights, which checkpointing asks for in more than one order."""


HISTORY_LENGTH = 3


MAX_BYTES_AHEAD = 2**28
"""Bytes of weights that the program may have used before the device has."""


class WeightOffloader:
    """Hands out weights by number."""

    def __init__(self, device: torch.device, copy: Callable[[Tensor], Tensor] | None = None):
        """``copy`` brings a tensor to the device, without anybody waiting for it."""
        self.device, self.host_weights = device, list[QuantizedWeight]()
        self.prefetch_hits = 0
        """How many weights were there already when they were asked for."""
        self._copy_stream = CopyStream(device)
        self._copy = copy or (lambda tensor: tensor.to(device, non_blocking=True))
        self._next_index: dict[AccessHistory, int] = {}
        self._history: AccessHistory = (False, ())
        self._prefetched: tuple[int, QuantizedWeight] | None = None
        self._in_flight = deque[tuple[Any, int]]()
        """Of weights that the device may still have to use: where it has, and how large they are."""
        self._bytes_in_use = 0

    def offload(self, weight: QuantizedWeight) -> Callable[[], QuantizedWeight]:
        """Keep it on the host, pinned where that makes copies faster; returns who hands it out."""
        number = len(self.host_weights)
        self.host_weights.append(weight.map_tensors(copy_to_host))
        return lambda: self.fetch(number)

    def fetch(self, index: int) -> QuantizedWeight:
        """The weight on the device; the one that came after it last time is sent on its way."""
        self._limit_bytes_ahead()
        weight = self._take_prefetched(index)
        self._bytes_in_use = weight.nbytes
        is_backward = torch._C._current_graph_task_id() != -1
        self._next_index[self._history] = index
        self._history = (is_backward, (*self._history[1], index)[-HISTORY_LENGTH:])
        following = self._next_index.get(self._history)
        if following is not None:
            self._prefetched = (
                following,
                self._copy_stream.run_on_stream(lambda: self.host_weights[following].map_tensors(self._copy)),
            )
        return weight

    def _limit_bytes_ahead(self) -> None:
        """Whoever asks for a weight has given the device all that it computes with the one before."""
        if (mark := self._copy_stream.record_event()) is None:
            return
        self._in_flight.append((mark, self._bytes_in_use))
        while sum(size for _, size in self._in_flight) > MAX_BYTES_AHEAD:
            self._in_flight.popleft()[0].synchronize()

    def _take_prefetched(self, index: int) -> QuantizedWeight:
        ahead, self._prefetched = self._prefetched, None
        if ahead is None or ahead[0] != index:
            return self.host_weights[index].map_tensors(self._copy)
        self.prefetch_hits += 1
        self._copy_stream.wait_for_copies(ahead[1].tensors)
        return ahead[1]


logger = logging.getLogger(__name__)


def is_quantized_or_offloaded(config: RunConfig) -> bool:
    """Whether any of it is to rest."""
    return bool(config.train.blocks_to_swap) or config.model.quantize_base != "none"


def quantize_and_offload_base(config: RunConfig, denoiser: nn.Module, device: torch.device) -> int:
    """Of blocks in fewer bits, and of some blocks in host memory; spread evenly, so that there is time between them.

    Returns how many bytes are in host memory now.
    """
    kind, blocks = config.model.quantize_base, find_innermost_blocks(denoiser)
    swap, swapped = WeightOffloader(device), set(select_spread_indices(len(blocks), config.train.blocks_to_swap))
    before = after = away = 0
    for number, block in enumerate(blocks):
        for layer in block.modules():
            if not can_convert_frozen_layer(layer) or (kind == "none" and number not in swapped):
                continue
            own: Any = layer
            packed = QuantizedWeight.quantize(own.weight.to(device), kind)
            before += own.weight.nbytes
            convert_frozen_layer(layer, swap.offload(packed) if number in swapped else packed.get)
            after += 0 if number in swapped else packed.nbytes
            away += packed.nbytes if number in swapped else 0
    logger.info(
        "frozen weights of %d blocks: %.2f GB of %.2f GB stay on the device, in %s; %d blocks rest in host memory",
        len(blocks),
        after / 1e9,
        before / 1e9,
        kind,
        len(swapped),
    )
    return away


def find_innermost_blocks(denoiser: Any) -> list[nn.Module]:
    """Those of which a model has many, in its own order; diffusers knows what they are called."""
    named = (getattr(denoiser, kind, None) or () for kind in ("_repeated_blocks", "_no_split_modules"))
    names = {name for several in named for name in several}
    found = [module for module in denoiser.modules() if type(module).__name__ in names]
    known = set(found)
    return [module for module in found if not known & set(list(module.modules())[1:])]  # the innermost


def select_spread_indices(count: int, wanted: int) -> list[int]:
    """``wanted`` of ``count`` places, as evenly as can be."""
    return [place for place in range(count) if (place + 1) * wanted // count > place * wanted // count]
