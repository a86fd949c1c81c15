"""Weights that rest in host memory: each is copied to the device shortly before it is needed, and dropped after it.

They are frozen, so nothing is ever copied back.  Which weight comes after which is learnt from the first step; from
then on each is sent on its way while the one before is being used, on a stream of its own.

The program is ahead of the device, and takes memory for weights that the device comes to much later.  So it waits for
the device when it is too far ahead, which then has enough to do to compute on meanwhile.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .copies import CopyStream
from .host_copy import copy_to_host
from .packing import QuantizedWeight

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
            self._prefetched = following, self._copy_stream.run_on_stream(lambda: self.host_weights[following].map_tensors(self._copy))
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
