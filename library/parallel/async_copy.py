"""Asynchronous copies between host and device that neither stall the device nor block Python."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..distributed.device_memory import has_device_memory

T = TypeVar("T")


class CopyStream:
    """A stream for copies to one device; on devices without streams, plain copies."""

    def __init__(self, device: torch.device, stream_module: Any = None):
        """``stream_module`` replaces torch's module for the device type (``torch.cuda``), for tests."""
        self.device = device
        self._stream_module = (
            torch.get_device_module(device) if stream_module is None and has_device_memory(device) else stream_module
        )
        self._stream = None if self._stream_module is None else self._stream_module.Stream(device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Copy to the device; work queued from now on waits for the copy."""
        copy = self.start_copy(tensor)
        if copy is not tensor:
            self.wait_for_copies([copy])
        return copy

    def start_copy(self, tensor: Tensor) -> Tensor:
        """Start a copy; the result must not be used before ``wait_for_copies``."""
        return self.run_on_stream(lambda: tensor.to(self.device, non_blocking=True))

    def run_on_stream(self, copy: Callable[[], T]) -> T:
        if self._stream is None:
            return copy()
        with self._stream_module.stream(self._stream):
            return copy()

    def run_after_compute(self, copy: Callable[[], T]) -> tuple[T, Any]:
        """Run a copy after all work queued so far; return an event for ``wait_for_event``."""
        if self._stream is None:
            return copy(), None
        self._stream.wait_stream(self._stream_module.current_stream(self.device))
        result, event = self.run_on_stream(copy), self._stream_module.Event()
        event.record(self._stream)
        return result, event

    def wait_for_event(self, event: Any) -> None:
        """Make the compute stream wait for a copy."""
        if event is not None:
            self._stream_module.current_stream(self.device).wait_event(event)

    def record_event(self) -> Any:
        """Record an event on the compute stream; ``None`` on devices without streams."""
        if self._stream is None:
            return None
        event = self._stream_module.Event()
        event.record(self._stream_module.current_stream(self.device))
        return event

    def wait_for_copies(self, tensors: Iterable[Tensor]) -> None:
        """Make the compute stream wait for all copies started so far."""
        if self._stream is None:
            return
        compute_stream = self._stream_module.current_stream(self.device)
        compute_stream.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(compute_stream)  # or the allocator could reuse their memory for later copies


class HostSnapshot:
    """A copy of a tree of dicts, lists and tensors in pinned host memory, whose buffers are reused.

    Copies are queued on the compute stream, so they see the values of this point without blocking Python.
    """

    def __init__(self) -> None:
        self._copy: Any = None
        self._devices = set[torch.device]()

    def capture(self, tree: Any) -> None:
        """Queue a copy of ``tree``."""
        reused: list[tuple[Tensor, Tensor]] = []
        self._copy = _copy_tree(tree, self._copy, reused)
        if reused:
            with torch.no_grad():  # at once: an adapter has thousands of tensors
                torch._foreach_copy_([buffer for buffer, _ in reused], [tensor for _, tensor in reused], True)
        self._devices = _find_devices(tree)

    def wait(self) -> Any:
        """Wait for the copy and return it; the tensors inside belong to this object."""
        for device in self._devices:  # by name: each thread has its own current device
            torch.accelerator.synchronize(device)
        return self._copy

    def count_bytes(self) -> int:
        """Count the bytes of the copy."""
        return sum(leaf.nbytes for leaf in tree_leaves(self._copy) if isinstance(leaf, torch.Tensor))


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to host memory, pinned if the device has memory of its own."""
    if tensor.is_meta:  # for estimates: a tensor of the right shape that takes no memory
        return torch.empty(1, dtype=tensor.dtype).expand(tensor.shape)
    buffer = torch.empty_like(tensor, device="cpu", pin_memory=has_device_memory(tensor.device))
    return buffer.copy_(tensor.detach(), non_blocking=True)


class PinnedMemory:
    """Tensors of bytes that share large allocations of (pinned) host memory, whose sizes are powers of two.

    torch rounds each pinned allocation up to one, which would be half as much again for blocks of FLUX.1.
    """

    MIN_ALLOCATION, MAX_ALLOCATION = 2**28, 2**32

    def __init__(self, expected_bytes: int = 0):
        """``expected_bytes``: those of all tensors, so that few allocations have room left over."""
        self._remaining = expected_bytes
        self._allocations: list[Tensor] = []
        self._used: list[int] = []

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Return host memory for a copy from a device, pinned if the device has memory of its own."""
        if device.type == "meta":  # for estimates: a tensor of the right shape that takes no memory
            return torch.empty(1, dtype=torch.uint8).expand(nbytes)
        if not has_device_memory(device):
            return torch.empty(nbytes, dtype=torch.uint8)
        fitting = (index for index, used in enumerate(self._used) if used + nbytes <= len(self._allocations[index]))
        index = next(fitting, len(self._allocations))
        if index == len(self._allocations):
            self._allocations.append(torch.empty(self._choose_size(nbytes), dtype=torch.uint8, pin_memory=True))
            self._used.append(0)
        start, self._used[index] = self._used[index], self._used[index] + nbytes
        self._remaining -= nbytes
        return self._allocations[index][start : self._used[index]]

    def _choose_size(self, nbytes: int) -> int:
        """Choose the largest power of two that will be filled, or the smallest that holds ``nbytes``."""
        filled = 1 << max(0, self._remaining.bit_length() - 1)
        return max(min(filled, self.MAX_ALLOCATION), self.MIN_ALLOCATION, 1 << (nbytes - 1).bit_length())


def _find_devices(tree: Any) -> set[torch.device]:
    """Find the devices of all tensors, except cpu."""
    if isinstance(tree, torch.Tensor):
        return set() if tree.device.type == "cpu" else {tree.device}
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return {device for value in values for device in _find_devices(value)}


def _copy_tree(tree: Any, buffers: Any, reused: list[tuple[Tensor, Tensor]]) -> Any:
    """Copy what has no buffer of its shape yet; append the others, with their buffers, to ``reused``."""
    if isinstance(tree, torch.Tensor):
        if isinstance(buffers, torch.Tensor) and buffers.shape == tree.shape and buffers.dtype == tree.dtype:
            reused.append((buffers, tree.detach()))
            return buffers
        return copy_to_host(tree)
    if isinstance(tree, dict):
        previous = buffers if isinstance(buffers, dict) else {}
        return {key: _copy_tree(value, previous.get(key), reused) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        fits = isinstance(buffers, (list, tuple)) and len(buffers) == len(tree)
        pairs = zip(tree, buffers if fits else [None] * len(tree), strict=True)
        return type(tree)(_copy_tree(value, buffer, reused) for value, buffer in pairs)
    return tree


class AsyncScalarQueue:
    """A queue of device scalars (of one dtype and device) that are read later, in order.

    Reading one waits for the device's work up to it, and no more.  Pinned buffers are reused, because pinning memory
    synchronizes the device.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.Tensor, torch.Event | None]] = deque()
        self._free: list[tuple[torch.Tensor, torch.Event]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, scalar: torch.Tensor) -> None:
        """Queue a copy of ``scalar``."""
        if scalar.device.type == "cpu":
            self._pending.append((scalar.detach(), None))
            return
        if not self._free:
            self._free.append((torch.empty((), dtype=scalar.dtype, pin_memory=True), torch.Event(scalar.device)))
        buffer, event = self._free.pop()
        buffer.copy_(scalar.detach(), non_blocking=True)
        event.record()
        self._pending.append((buffer, event))

    def pop(self) -> float:
        """Read the oldest scalar."""
        buffer, event = self._pending.popleft()
        if event is None:
            return float(buffer)
        event.synchronize()
        self._free.append((buffer, event))
        return float(buffer)
