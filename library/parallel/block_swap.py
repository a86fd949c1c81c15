"""Block swap (``--blocks_to_swap``): CPU offload of frozen weights with prefetch on a copy stream.

Which blocks are swapped is decided in frozen_base.py.

Offloaded weights are frozen, so they are only ever copied to the device and dropped after use.  The order of use is
recorded in the first step; from then on the next weight is prefetched while the current one is used.

With activation checkpointing, a weight stays on the device from the recomputation of its block to the block's backward,
so it is copied twice per step, as without checkpointing.

The host runs ahead of the device and would allocate weights that the device uses much later.  So it waits for the
device at ``--block_swap_window_mb``, by default the largest offloaded block and at least 256 MiB, which leaves the
device enough queued work.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .async_copy import CopyStream, PinnedMemory
from .quantize import (
    FetchWeight,
    QuantizedWeight,
)

logger = logging.getLogger(__name__)
AccessHistory = tuple[bool, tuple[int, ...]]
"""Whether in a backward pass, and the latest weights: activation checkpointing fetches in more than one order."""

HISTORY_LENGTH = 3
MIN_WINDOW_BYTES = 2**28
"""The smallest default of the window: bytes of fetched weights that the device may still have to use."""


@dataclass(frozen=True)
class OffloadedBytes:
    """The bytes that ``--blocks_to_swap`` keeps in host memory, and that it needs on the device while a step runs."""

    total: int = 0
    largest_block: int = 0
    window: int = 0

    def count_device_bytes(self, is_checkpointed: bool) -> int:
        """Count copies on the device at once: the window, and the block whose recomputation waits for its backward."""
        return min(self.total, self.window + is_checkpointed * self.largest_block)


class WeightOffloader:
    """Weights in host memory, fetched by index."""

    def __init__(
        self,
        device: torch.device,
        copy: Callable[[Tensor], Tensor] | None = None,
        window_bytes: int = MIN_WINDOW_BYTES,
    ):
        """``copy`` starts an asynchronous copy of a tensor to the device."""
        self.device, self.window_bytes, self.host_weights = device, window_bytes, list[QuantizedWeight]()
        self.prefetch_hits = 0
        """Fetches whose weight was prefetched."""
        self._copy_stream, self._host_memory = CopyStream(device), PinnedMemory()
        self._copy = copy or (lambda tensor: tensor.to(device, non_blocking=True))
        self._next_index: dict[AccessHistory, int] = {}
        self._history: AccessHistory = (False, ())
        self._prefetched: tuple[int, QuantizedWeight] | None = None
        self._recomputed: dict[int, QuantizedWeight] = {}
        """Weights of the block that is recomputed, which its backward uses next."""
        self._in_flight = deque[tuple[Any, int]]()
        """Events after the use of each weight on the device, and the weights' bytes."""
        self._bytes_in_use = 0

    def offload(self, weight: QuantizedWeight) -> FetchWeight:
        """Move a weight to (pinned) host memory and return the function that fetches it."""
        index = len(self.host_weights)
        self.host_weights.append(weight.map_tensors(self._host_memory.copy_to_host))
        return partial(self.fetch, index)

    def fetch(self, index: int, in_backward: bool = False, has_backward: bool = False) -> QuantizedWeight:
        """Return the weight on the device, and prefetch the one that was copied after it last time.

        A forward inside of a backward pass recomputes a block, and its weight is kept if the layer's backward follows.
        """
        is_backward_pass = torch._C._current_graph_task_id() != -1
        self._limit_bytes_ahead()
        if not is_backward_pass:
            self._recomputed.clear()  # of a backward pass that failed
        if in_backward and (recomputed := self._recomputed.pop(index, None)) is not None:
            self._bytes_in_use = recomputed.nbytes
            return recomputed
        weight = self._take_prefetched(index)
        if is_backward_pass and has_backward:
            self._recomputed[index] = weight
        self._bytes_in_use = 0 if index in self._recomputed else weight.nbytes
        self._next_index[self._history] = index
        self._history = (is_backward_pass, (*self._history[1], index)[-HISTORY_LENGTH:])
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
        while sum(num_bytes for _, num_bytes in self._in_flight) > self.window_bytes:
            self._in_flight.popleft()[0].synchronize()

    def _take_prefetched(self, index: int) -> QuantizedWeight:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or prefetched[0] != index:
            return self.host_weights[index].map_tensors(self._copy)
        self.prefetch_hits += 1
        self._copy_stream.wait_for_copies(prefetched[1].tensors)
        return prefetched[1]
