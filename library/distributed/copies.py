"""Copies from host memory on a stream of their own: they wait for nothing that the device computes meanwhile.

What is computed afterwards waits for them on the device, and the program waits for neither.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .devices import has_device_memory

T = TypeVar("T")


class CopyStream:
    """To one device; where it has no streams, a copy is one as ever."""

    def __init__(self, device: torch.device, stream_module: Any = None):
        """``streams`` is torch's module for such devices."""
        self.device = device
        self._stream_module = torch.get_device_module(device) if stream_module is None and has_device_memory(device) else stream_module
        self._stream = None if self._stream_module is None else self._stream_module.Stream(device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, for what is computed from now on."""
        found = self.start_copy(tensor)
        if found is not tensor:
            self.wait_for_copies([found])
        return found

    def start_copy(self, tensor: Tensor) -> Tensor:
        """On its way, which begins at once; nobody may touch it before ``arrive``."""
        return self.run_on_stream(lambda: tensor.to(self.device, non_blocking=True))

    def run_on_stream(self, copy: Callable[[], T]) -> T:
        """What ``copy`` makes, on this stream."""
        if self._stream is None:
            return copy()
        with self._stream_module.stream(self._stream):
            return copy()

    def record_event(self) -> Any:
        """A place in what the device was given to compute until now; ``None`` where nobody is ahead of it."""
        if self._stream is None:
            return None
        mark = self._stream_module.Event()
        mark.record(self._stream_module.current_stream(self.device))
        return mark

    def wait_for_copies(self, tensors: Iterable[Tensor]) -> None:
        """Whatever is computed from now on comes behind all copies until now."""
        if self._stream is None:
            return
        now = self._stream_module.current_stream(self.device)
        now.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(now)  # their memory is not given to later copies before it is read
