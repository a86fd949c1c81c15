"""Copies from host memory on a stream of their own: they wait for nothing that the device computes meanwhile.

What is computed afterwards waits for them on the device, and the program waits for neither.
"""

from collections import deque
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
        self._stream_module = (
            torch.get_device_module(device) if stream_module is None and has_device_memory(device) else stream_module
        )
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


class HostSnapshot:
    """A nest of dicts, lists and tensors as it was; on an accelerator its memory there is not touched.

    Copies go to pinned memory in the order of the device's own work, so the program does not wait for them; the
    buffers are kept from one copy to the next.
    """

    def __init__(self) -> None:
        self._copy: Any = None
        self._devices = set[torch.device]()

    def capture(self, tree: Any) -> None:
        """Copy ``tree`` as it is now in the device's order of work."""
        self._copy = _copy_tree(tree, self._copy)
        self._devices = _find_devices(tree)

    def wait(self) -> Any:
        """The copy; wait until it is complete.  What is inside belongs to this object."""
        for device in self._devices:  # by name, for each thread has its own current device
            torch.accelerator.synchronize(device)
        return self._copy


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, from which the device can fetch it by itself; on its way when this returns."""
    if tensor.is_meta:  # which has no numbers: only of the right size, and it takes no room
        return torch.empty(1, dtype=tensor.dtype).expand(tensor.shape)
    place = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return place.copy_(tensor.detach(), non_blocking=True)


def _find_devices(tree: Any) -> set[torch.device]:
    """Where tensors are, but for the host, which is never waited for."""
    if isinstance(tree, torch.Tensor):
        return set() if tree.device.type == "cpu" else {tree.device}
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return {device for value in inside for device in _find_devices(value)}


def _copy_tree(tree: Any, buffers: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        fits = isinstance(buffers, torch.Tensor) and buffers.shape == tree.shape and buffers.dtype == tree.dtype
        with torch.no_grad():
            return buffers.copy_(tree.detach(), non_blocking=True) if fits else copy_to_host(tree)
    if isinstance(tree, dict):
        before = buffers if isinstance(buffers, dict) else {}
        return {key: _copy_tree(value, before.get(key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        olds = buffers if isinstance(buffers, (list, tuple)) and len(buffers) == len(tree) else [None] * len(tree)
        return type(tree)(_copy_tree(value, before) for value, before in zip(tree, olds, strict=True))
    return tree


class AsyncScalarQueue:
    """Numbers on their way from the device, each read once and in their order.

    Whoever reads one waits for what the device did until then, and no more.  Their places in pinned memory are used
    again and again, because to pin memory waits for the device.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.Tensor, torch.Event | None]] = deque()
        self._free: list[tuple[torch.Tensor, torch.Event]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, scalar: torch.Tensor) -> None:
        """All numbers are of one kind and from one device."""
        if scalar.device.type == "cpu":
            self._pending.append((scalar.detach(), None))
            return
        if not self._free:
            self._free.append((torch.empty((), dtype=scalar.dtype, pin_memory=True), torch.Event(scalar.device)))
        place, event = self._free.pop()
        place.copy_(scalar.detach(), non_blocking=True)
        event.record()
        self._pending.append((place, event))

    def pop(self) -> float:
        """The oldest of them."""
        place, event = self._pending.popleft()
        if event is None:
            return float(place)
        event.synchronize()
        self._free.append((place, event))
        return float(place)
