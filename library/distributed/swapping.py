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

from .copies import Copies
from .host_copy import on_host
from .packing import Packed

Place = tuple[bool, tuple[int, ...]]
"""Whether in a backward pass, and the latest weights, which checkpointing asks for in more than one order."""
LATEST = 3
AHEAD = 2**28
"""Bytes of weights that the program may have used before the device has."""


class Swap:
    """Hands out weights by number."""

    def __init__(self, device: torch.device, copy: Callable[[Tensor], Tensor] | None = None):
        """``copy`` brings a tensor to the device, without anybody waiting for it."""
        self.device, self.resting = device, list[Packed]()
        self.expected = 0
        """How many weights were there already when they were asked for."""
        self._copies = Copies(device)
        self._copy = copy or (lambda tensor: tensor.to(device, non_blocking=True))
        self._after: dict[Place, int] = {}
        self._last: Place = (False, ())
        self._ahead: tuple[int, Packed] | None = None
        self._unused = deque[tuple[Any, int]]()
        """Of weights that the device may still have to use: where it has, and how large they are."""
        self._in_use = 0

    def take(self, weight: Packed) -> Callable[[], Packed]:
        """Keep it on the host, pinned where that makes copies faster; returns who hands it out."""
        number = len(self.resting)
        self.resting.append(weight.moved(on_host))
        return lambda: self.fetched(number)

    def fetched(self, number: int) -> Packed:
        """The weight on the device; the one that came after it last time is sent on its way."""
        self._stay_near()
        weight = self._arrived(number)
        self._in_use = weight.nbytes
        is_backward = torch._C._current_graph_task_id() != -1
        self._after[self._last] = number
        self._last = (is_backward, (*self._last[1], number)[-LATEST:])
        following = self._after.get(self._last)
        if following is not None:
            self._ahead = following, self._copies.made(lambda: self.resting[following].moved(self._copy))
        return weight

    def _stay_near(self) -> None:
        """Whoever asks for a weight has given the device all that it computes with the one before."""
        if (mark := self._copies.mark()) is None:
            return
        self._unused.append((mark, self._in_use))
        while sum(size for _, size in self._unused) > AHEAD:
            self._unused.popleft()[0].synchronize()

    def _arrived(self, number: int) -> Packed:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != number:
            return self.resting[number].moved(self._copy)
        self.expected += 1
        self._copies.arrive(ahead[1].tensors)
        return ahead[1]
