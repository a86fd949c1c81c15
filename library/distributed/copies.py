"""Copies from host memory on a stream of their own: they wait for nothing that the device computes meanwhile.

What is computed afterwards waits for them on the device, and the program waits for neither.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .devices import has_own_memory

T = TypeVar("T")


class Copies:
    """To one device; where it has no streams, a copy is one as ever."""

    def __init__(self, device: torch.device, streams: Any = None):
        """``streams`` is torch's module for such devices."""
        self.device = device
        self._streams = torch.get_device_module(device) if streams is None and has_own_memory(device) else streams
        self._own = None if self._streams is None else self._streams.Stream(device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, for what is computed from now on."""
        found = self.sent(tensor)
        if found is not tensor:
            self.arrive([found])
        return found

    def sent(self, tensor: Tensor) -> Tensor:
        """On its way, which begins at once; nobody may touch it before ``arrive``."""
        return self.made(lambda: tensor.to(self.device, non_blocking=True))

    def made(self, copy: Callable[[], T]) -> T:
        """What ``copy`` makes, on this stream."""
        if self._own is None:
            return copy()
        with self._streams.stream(self._own):
            return copy()

    def mark(self) -> Any:
        """A place in what the device was given to compute until now; ``None`` where nobody is ahead of it."""
        if self._own is None:
            return None
        mark = self._streams.Event()
        mark.record(self._streams.current_stream(self.device))
        return mark

    def arrive(self, tensors: Iterable[Tensor]) -> None:
        """Whatever is computed from now on comes behind all copies until now."""
        if self._own is None:
            return
        now = self._streams.current_stream(self.device)
        now.wait_stream(self._own)
        for tensor in tensors:
            tensor.record_stream(now)  # their memory is not given to later copies before it is read
