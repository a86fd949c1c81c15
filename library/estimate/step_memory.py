"""Memory of one micro-batch, block by block: what forward saves, the peaks of forward and backward, gradients.

Parts that follow each other on a device add up: backward runs in reverse order, and frees what forward saved.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ..parallel.parallel_plan import Activations
from .meta_memory_meter import MemoryMeter, MeterReading


@dataclass(frozen=True)
class StepMemory:
    """Activation memory of one micro-batch in the model or in a part of it, without weights and gradients."""

    saved: int = 0
    """Bytes that forward saves for backward."""
    forward_peak: int = 0
    """The peak of bytes during forward, above those in use before it."""
    backward_peak: int = 0
    """The peak of bytes during backward, above those in use after forward."""
    flops: int = 0
    kernels: int = 0
    gradients: int = 0
    """Bytes of the gradients that backward leaves, where the model itself is trained; adapters have them beforehand."""
    growing_peak: int = 0
    """The peak during backward above the bytes after forward, where gradients exist from when they are computed."""

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.saved + self.backward_peak)

    @property
    def peak_with_gradients(self) -> int:
        """The peak of a step that begins without gradients, with those that exist at that time."""
        return max(self.forward_peak, self.saved + self.growing_peak)

    def add_to_peaks(self, num_bytes: int, kernels: int = 0) -> "StepMemory":
        """Let it need so many bytes more while it computes, and launch so many kernels more."""
        return replace(
            self,
            forward_peak=self.forward_peak + num_bytes,
            backward_peak=self.backward_peak + num_bytes,
            growing_peak=self.growing_peak + num_bytes,
            kernels=self.kernels + kernels,
        )

    def split_batch(self, parts: int) -> "StepMemory":
        """Divide the batch; as many kernels are launched for each part, and gradients are as large."""
        backward_peak = self.backward_peak // parts
        return replace(
            self,
            saved=self.saved // parts,
            forward_peak=self.forward_peak // parts,
            backward_peak=backward_peak,
            flops=self.flops // parts,
            growing_peak=backward_peak + self.growing_peak - self.backward_peak,
        )

    def __add__(self, after: "StepMemory") -> "StepMemory":
        """Combine with the part that follows on the same device; backward runs in reverse order."""
        forward_peak = max(self.forward_peak, self.saved + after.forward_peak)
        backward_peak = max(after.backward_peak, self.backward_peak - after.saved)
        return StepMemory(
            saved=self.saved + after.saved,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            flops=self.flops + after.flops,
            kernels=self.kernels + after.kernels,
            gradients=self.gradients + after.gradients,
            growing_peak=max(after.growing_peak, self.growing_peak - after.saved + after.gradients),
        )


@dataclass(frozen=True)
class MetaStep:
    """Activation memory of one micro-batch: of each block, and of what is computed before and after the blocks."""

    head: StepMemory
    blocks: tuple[StepMemory, ...]
    tail: StepMemory
    flows: tuple[int, ...]
    """Bytes of the activations that enter each block, and of those that leave the last."""

    def run_stage(self, first: int, end: int) -> StepMemory:
        """Activation memory of a pipeline stage with the blocks from ``first`` up to ``end``, and what it receives."""
        received = self.flows[first] - self.flows[0]
        stage = sum(self.blocks[first:end], StepMemory(received, received) + self.head)
        if end == len(self.blocks):
            return stage + self.tail
        # A stage holds the activations that it sent until its backward has ended.
        sent = self.flows[end]
        return replace(stage, backward_peak=stage.backward_peak + sent, growing_peak=stage.growing_peak + sent)

    @cached_property
    def total(self) -> StepMemory:
        return self.run_stage(0, len(self.blocks))

    def add_to_blocks(self, num_bytes: int, kernels: int) -> "MetaStep":
        """Let each block need so many bytes more while it computes, and launch so many kernels more."""
        return replace(self, blocks=tuple(block.add_to_peaks(num_bytes, kernels) for block in self.blocks))

    def split_batch(self, parts: int) -> "MetaStep":
        """Divide the batch; as many kernels are launched for each part."""
        head, *blocks, tail = (part.split_batch(parts) for part in (self.head, *self.blocks, self.tail))
        return MetaStep(head, tuple(blocks), tail, tuple(size // parts for size in self.flows))

    def mix_blocks(self, other: "MetaStep", every: int) -> "MetaStep":
        """Take every n-th block, from the first one on, and what is around the blocks from ``other``."""
        blocks = [
            theirs if not index % every else ours
            for index, (ours, theirs) in enumerate(zip(self.blocks, other.blocks, strict=True))
        ]
        return replace(other, blocks=tuple(blocks))


class StepRecorder:
    """Reads a meter at each block boundary: in forward directly, in backward by hooks on activations."""

    def __init__(self) -> None:
        self.start(MemoryMeter(torch.device("meta")))

    def start(self, meter: MemoryMeter) -> None:
        self._meter, self._block = meter, 0
        self._forward: list[MeterReading] = []
        self._backward: dict[int, MeterReading] = {}
        self._flows: list[int] = []

    def add_gradient(self, parameter: Tensor) -> None:
        """Count the gradient of a parameter, which backward has just completed."""
        self._meter.grown += parameter.nbytes

    def end_forward(self) -> None:
        """Record the end of the head, of a block or of the tail, when all that backward does not need is freed."""
        self._forward.append(self._meter.read_and_reset())

    def watch(self, block_index: int, activations: Activations) -> None:
        """Record when backward reaches the activations that enter a block; a stream of sound may be ``None``."""
        activations = tuple(tensor for tensor in activations if tensor is not None)
        self._flows.append(sum(tensor.nbytes for tensor in activations))
        self._block = block_index
        for tensor in activations:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._end_backward, block_index))  # type: ignore[no-untyped-call]

    def _end_backward(self, block_index: int, _: Tensor) -> None:
        if block_index <= self._block:
            self._backward[self._block] = self._meter.read_and_reset()
            self._block = block_index - 1

    def build_step(self) -> MetaStep:
        self._backward[self._block] = self._meter.read_and_reset()
        parts, before, ends = list[StepMemory](), 0, self._list_gradients()
        for number, forward in enumerate(self._forward):
            backward = self._backward.get(number - 1, MeterReading(0, forward.live, 0, 0))
            grown_before = ends[number + 1]
            part = StepMemory(
                saved=forward.live - before,
                forward_peak=forward.peak - before,
                backward_peak=backward.peak - forward.live,
                flops=forward.flops + backward.flops,
                kernels=forward.kernels + backward.kernels,
                gradients=ends[number] - grown_before,
                growing_peak=max(backward.peak, backward.grown_peak - grown_before) - forward.live,
            )
            parts.append(part)
            before = forward.live
        return MetaStep(parts[0], tuple(parts[1:-1]), parts[-1], tuple(self._flows))

    def _list_gradients(self) -> list[int]:
        """List the bytes of the gradients that exist when backward has gone through each part; 0 at the end."""
        grown = [0]
        for number in reversed(range(len(self._forward))):
            reading = self._backward.get(number - 1)
            grown.append(grown[-1] if reading is None else reading.grown)
        return grown[::-1]
