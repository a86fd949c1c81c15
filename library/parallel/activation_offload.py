"""Offload of the activations that checkpointed blocks save (``--cpu_offload_checkpointing``) to host memory."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .async_copy import CopyStream, copy_to_host


class OffloadedTensor:
    """A tensor in host memory, and on its device from the start to the end of each copy.

    Its device memory belongs to the compute stream, which waits for the copy before the memory is freed.  So the
    allocator can reuse it at once, which it could not after ``record_stream``, as the host runs ahead.
    """

    def __init__(self, tensor: Tensor, stream: CopyStream):
        """Start the copy to the host."""
        self._stream, self._device, self._event = stream, tensor.device, None
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._host, self._event = stream.run_after_compute(lambda: copy_to_host(tensor))

    def prefetch(self) -> None:
        """Start the copy to the device, unless the tensor is there."""
        if self._tensor is None:
            buffer = torch.empty_like(self._host, device=self._device)
            copy = self._stream.run_after_compute(lambda: buffer.copy_(self._host, non_blocking=True))
            (self._tensor, self._event), self._version = copy, buffer._version

    def take(self) -> Tensor:
        """Return the tensor on the device, which from now on belongs to the caller."""
        self.prefetch()
        tensor = self._tensor
        assert tensor is not None
        self.release()
        return tensor

    def release(self) -> None:
        """Give up the device memory, once the copy is done."""
        self._stream.wait_for_event(self._event)
        tensor, self._tensor, self._event = self._tensor, None, None
        if tensor is not None and tensor._version != self._version:
            raise RuntimeError("a block modified its input in place, so it cannot be recomputed from an offloaded copy")

    def __del__(self) -> None:
        self._stream.wait_for_event(self._event)


class OffloadedBlock:
    """The tensors that one checkpointed block saved."""

    def __init__(self, previous: "OffloadedBlock | None"):
        self.tensors: list[OffloadedTensor] = []
        self._get_previous = (lambda: None) if previous is None else weakref.ref(previous)

    def take(self, tensor: OffloadedTensor) -> Tensor:
        """Return one of the tensors, and start to copy back those of the block before, whose backward is next."""
        taken, previous = tensor.take(), self._get_previous()
        for other in [] if previous is None else previous.tensors:
            other.prefetch()
        return taken


class ActivationOffload:
    """Offloads what checkpointed blocks save for backward to (pinned) host memory, on a stream of its own.

    The input of a block is copied to the host while the block computes, and back while the block after it is
    recomputed.  torch 2.11's ``save_on_cpu`` synchronizes after each copy.
    """

    def __init__(self, build_stream: Callable[[torch.device], CopyStream] = CopyStream):
        self._build_stream = build_stream
        self._streams: dict[torch.device, CopyStream] = {}
        self._last_block: OffloadedBlock | None = None

    @contextmanager
    def offload_saved_tensors(self) -> Iterator[None]:
        """Offload the tensors that one block saves inside."""
        if self._last_block is not None:  # its input had the time of the whole block to be copied
            for tensor in self._last_block.tensors:
                tensor.release()
        block = self._last_block = OffloadedBlock(self._last_block)

        def pack(tensor: Tensor) -> OffloadedTensor | Tensor:
            if not tensor.numel():  # torch 2.11 saves an empty tensor of its own with the inputs
                return tensor.detach()
            if tensor.device not in self._streams:
                self._streams[tensor.device] = self._build_stream(tensor.device)
            block.tensors.append(OffloadedTensor(tensor, self._streams[tensor.device]))
            return block.tensors[-1]

        def unpack(saved: OffloadedTensor | Tensor) -> Tensor:
            return saved if isinstance(saved, Tensor) else block.take(saved)

        with saved_tensors_hooks(pack, unpack):
            yield
