"""Block swap (``--blocks_to_swap``): frozen weights in host memory, copied to the device block by block, ahead of use.

Which blocks are swapped is decided in frozen_base.py.

The weights of a block are one tensor of bytes in pinned host memory, so that a block takes one copy and one event.
Copies go to a ring of device buffers (``--block_swap_ring_size``), each as large as the largest swapped block, which
are allocated once.  Weights are frozen, so nothing is ever copied back; trained ones are in trained_block_swap.py.

A block is visited in each forward, and in each backward pass, where activation checkpointing also recomputes it.  The
order of visits is recorded; a visit starts the copies of the blocks that follow into buffers that are not needed
sooner.  So the last blocks of the forward are still there when the backward begins, and likewise the first blocks in
the next step.  Of a model of two experts, of which a step uses one, no block of the other is copied ahead: if the ring
holds the blocks of one expert, the idle one waits in host memory, and steps of the same expert copy nothing.

The host waits for nothing: a copy waits on the device for the work that was queued before its visit, and so for the
last use of its buffer, and the compute stream waits for the copy's event.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .async_copy import CopyStream, PinnedMemory
from .quantize import FetchWeight, QuantizedWeight

logger = logging.getLogger(__name__)
MIN_RING_SIZE = 2
"""Buffers by default: the block that computes and the one that is copied."""
DEFAULT_RING_BYTES = 2**29
"""The ring has more buffers by default if they fit into this: models of many small blocks have irregular times."""
ALIGNMENT = 256


@dataclass(frozen=True)
class OffloadedBytes:
    """The bytes that ``--blocks_to_swap`` keeps in host memory, and the buffers that it needs on the device."""

    total: int = 0
    largest_block: int = 0
    ring_size: int = 0

    @classmethod
    def from_blocks(cls, block_bytes: Sequence[int], ring_size: int = 0) -> "OffloadedBytes":
        """Choose the size of the ring, unless it is given, for blocks of these sizes."""
        largest = max(block_bytes, default=0)
        ring_size = ring_size or max(MIN_RING_SIZE, DEFAULT_RING_BYTES // max(1, largest))
        return cls(sum(block_bytes), largest, min(ring_size, len(block_bytes)))

    @property
    def device_bytes(self) -> int:
        return self.ring_size * self.largest_block


def count_block_bytes(weights: Sequence[QuantizedWeight]) -> int:
    """Count the bytes of the weights of a block, with what aligns them."""
    return sum(align_bytes(tensor.nbytes) for weight in weights for tensor in weight.tensors)


def align_bytes(nbytes: int) -> int:
    """Round a number of bytes up, so that what follows is aligned."""
    return nbytes + -nbytes % ALIGNMENT


class Visit(NamedTuple):
    """A use of a block's weights: in forward or, with the recomputation before it, in backward."""

    block: int
    is_backward: bool


class HostBlock:
    """The weights of one block as one tensor of bytes in host memory."""

    def __init__(self, weights: Sequence[QuantizedWeight], memory: PinnedMemory, device: torch.device):
        """``device`` is the one that they are copied to, which may not be where they are."""
        tensors = [tensor for weight in weights for tensor in weight.tensors]
        self._ends = [*accumulate(align_bytes(tensor.nbytes) for tensor in tensors)]
        self._layouts = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        layouts = iter(self._layouts)
        self._weights = [weight.map_tensors(lambda _: next(layouts)) for weight in weights]
        self.nbytes = self._ends[-1]
        self.bytes = memory.allocate(self.nbytes, device)
        if device.type != "meta":
            for copy, tensor in zip(self._view_tensors(self.bytes), tensors, strict=True):
                copy.copy_(tensor.detach(), non_blocking=True)

    def view_weights(self, buffer: Tensor) -> list[QuantizedWeight]:
        """View the weights in a buffer to which the block is copied."""
        tensors = self._view_tensors(buffer)
        return [weight.map_tensors(lambda _: next(tensors)) for weight in self._weights]

    def _view_tensors(self, buffer: Tensor) -> Iterator[Tensor]:
        for end, layout in zip(self._ends, self._layouts, strict=True):
            start = end - align_bytes(layout.nbytes)
            values = buffer[start : start + layout.nbytes].view(layout.dtype)
            yield values.as_strided(layout.shape, layout.stride())


class DeviceBuffer:
    """A buffer of the ring, and the block that it holds."""

    def __init__(self, nbytes: int, device: torch.device):
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.block: int | None = None
        self.event: Any = None
        """The event after the copy, until the compute stream waits for it."""
        self.last_visit = -1
        self._weights: dict[int, list[QuantizedWeight]] = {}

    def view_weights(self, index: int, block: HostBlock) -> list[QuantizedWeight]:
        """View the weights of a block in this buffer; views are built once."""
        if index not in self._weights:
            self._weights[index] = block.view_weights(self.bytes)
        return self._weights[index]


class BlockOffloader:
    """Blocks in host memory, whose weights are fetched by their index in the block."""

    def __init__(self, device: torch.device, sizes: OffloadedBytes, stream: CopyStream | None = None):
        self.device, self.sizes, self.blocks = device, sizes, list[HostBlock]()
        self._experts = list[int]()
        """The expert of each block."""
        self.copied_blocks = self.copied_ahead = 0
        """Copies of a block to the device, and those that were started before the visit."""
        self._stream = CopyStream(device) if stream is None else stream
        self._memory = PinnedMemory(sizes.total)
        self._ring = [DeviceBuffer(sizes.largest_block, device) for _ in range(sizes.ring_size)]
        self._buffer_by_block: dict[int, DeviceBuffer] = {}
        self._following: dict[Visit, Visit] = {}
        self._visit: Visit | None = None
        self._visit_count = 0
        self._weights: list[QuantizedWeight] = []
        """The weights of the visited block, on the device."""

    @property
    def device_buffers(self) -> list[Tensor]:
        """The memory that the ring takes on the device, from the beginning on."""
        return [each.bytes for each in self._ring]

    def offload_block(self, weights: Sequence[QuantizedWeight], expert: int = 0) -> list[FetchWeight]:
        """Move the weights of a block of an expert to host memory; return the functions that fetch them."""
        self.blocks.append(HostBlock(weights, self._memory, self.device))
        self._experts.append(expert)
        return [partial(self.fetch, len(self.blocks) - 1, index) for index in range(len(weights))]

    def fetch(self, block: int, index: int, in_backward: bool = False, has_backward: bool = False) -> QuantizedWeight:
        """Return a weight on the device, which is valid until the next visit of the ring's buffer.

        Whether its layer is in backward or has one is no matter here: in a backward pass a whole block stays.
        """
        visit = (block, torch._C._current_graph_task_id() != -1)
        if visit != self._visit:
            self._start_visit(Visit(*visit))
        return self._weights[index]

    def _start_visit(self, visit: Visit) -> None:
        """Wait for the block of a visit, and start the copies of those that follow."""
        if self._visit is not None and self._experts[self._visit.block] == self._experts[visit.block]:
            self._following[self._visit] = visit
        self._visit = visit
        self._visit_count += 1
        needed = self._predict_blocks(visit)
        if visit.block in self._buffer_by_block:
            self.copied_ahead += self._buffer_by_block[visit.block].event is not None
        else:
            self._start_copy(visit.block, needed)
        buffer = self._buffer_by_block[visit.block]
        self._stream.wait_for_event(buffer.event)
        buffer.event, buffer.last_visit = None, self._visit_count
        self._weights = buffer.view_weights(visit.block, self.blocks[visit.block])
        for block in needed:
            if block not in self._buffer_by_block:
                self._start_copy(block, needed)

    def _predict_blocks(self, visit: Visit) -> list[int]:
        """List the next different blocks, as many as the ring holds, beginning with the visited one."""
        blocks, following = dict.fromkeys([visit.block]), self._following.get(visit)
        for _ in range(2 * len(self._ring)):
            if following is None or len(blocks) == len(self._ring):
                break
            blocks[following.block] = None
            following = self._following.get(following)
        return list(blocks)

    def _start_copy(self, block: int, needed: Sequence[int]) -> None:
        """Copy a block into the buffer that was not used for longest, among those whose block is not needed soon."""
        buffer = min((each for each in self._ring if each.block not in needed), key=lambda each: each.last_visit)
        if buffer.block is not None:
            del self._buffer_by_block[buffer.block]
        self._buffer_by_block[block], buffer.block = buffer, block
        source = self.blocks[block].bytes
        target = buffer.bytes[: len(source)]
        _, copied = self._stream.run_after_compute(lambda: target.copy_(source, non_blocking=True))
        buffer.event = copied
        self.copied_blocks += 1
