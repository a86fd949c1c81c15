"""The blocks of a denoiser as a chain that can be cut: each process runs some of them and passes the others by.

The model's own forward runs on every process, with embeddings before the chain and what comes behind it, which is
little.  Only blocks are kept apart: one that is not here hands on what came in, or what another process made of it.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from inspect import Signature, signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .blocks import Activations, BlockSequence


def partition_blocks(costs: Sequence[float], num_stages: int) -> list[int]:
    """Where stages begin, and the end: so that the heaviest stage is as light as can be."""
    sums = [0.0]
    for weight in costs:
        sums.append(sums[-1] + weight)
    count = len(costs)
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    before = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0
    for stage in range(1, num_stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                heaviest = max(best[stage - 1][start], sums[end] - sums[start])
                if heaviest < best[stage][end]:
                    best[stage][end], before[stage][end] = heaviest, start
    found = [count]
    for stage in range(num_stages, 0, -1):
        found.append(before[stage][found[-1]])
    return found[::-1]


class StageBoundary(Exception):
    """Raised in the middle of a model's forward: what is still to be done is another process's to do."""

    def __init__(self, activations: Activations):
        super().__init__()
        self.activations = activations


class StageRunner:
    """Decides at each block what happens there; one for a chain."""

    def __init__(self, block_sequence: BlockSequence):
        self.block_sequence = block_sequence
        self.active_blocks: Collection[int] = range(len(block_sequence.blocks))
        """The places of blocks that run now."""
        self._received: Activations | None = None
        """What the first of them gets, where another process made it."""
        self._activations: Activations = ()
        """What left the block before."""
        self._stop_before: int | None = None
        self._broadcast: Callable[[int, Activations], Activations] | None = None
        self.checkpoint_function: Callable[..., Any] | None = None
        """Runs a block so that its activations are computed again in backward."""
        for place, block in enumerate(block_sequence.blocks):
            block_sequence.hooks.wrap(block, partial(self._handle_block, place, signature(block.forward)))

    def run_all_stages(
        self, active_blocks: Collection[int], broadcast: Callable[[int, Activations], Activations]
    ) -> None:
        """A forward is one of all processes; after each block ``hand_over`` says what they go on with."""
        self.active_blocks, self._broadcast, self._received, self._stop_before = active_blocks, broadcast, None, None

    def run_stage(self, first: int, end: int, received: Activations | None) -> None:
        """A forward is one of these blocks; ``arrived`` is what the first gets, unless it begins the chain."""
        self.active_blocks, self._broadcast, self._received = range(first, end), None, received
        self._stop_before = end

    def _handle_block(
        self, index: int, signature: Signature, block_forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        bound = signature.bind(*args, **kwargs)
        flow = self.block_sequence.collect_inputs(index, bound, self._activations)
        if index == self._stop_before:
            self._activations = ()
            raise StageBoundary(flow)
        if index in self.active_blocks:
            if self.checkpoint_function is not None and torch.is_grad_enabled():
                block_forward = partial(self.checkpoint_function, block_forward)
            flow = self.block_sequence.run_block(index, block_forward, bound, flow)
        elif self._received is not None and index + 1 in self.active_blocks:
            flow = self._received
        if self._broadcast is not None:
            flow = self._broadcast(index, flow)
        self._activations = flow if index + 1 < len(self.block_sequence.blocks) else ()
        return self.block_sequence.build_output(index, flow)


def broadcast_stage_output(
    activations: Activations, group: dist.ProcessGroup, source: int, gradient_source: int | None, anchor: Tensor
) -> Activations:
    """``flow`` of process ``source`` on all of ``group``; in backward the gradient is that of ``consumer``.

    Without a consumer all of them compute the same from it, and so have the same gradient.  ``anchor`` is anything
    that needs a gradient, so that backward comes by here on every process.
    """
    is_source = dist.get_rank() == source
    likeness: list[Any] = [[(tensor.shape, tensor.dtype) for tensor in activations] if is_source else None]
    dist.broadcast_object_list(likeness, source, group)
    apply: Any = _StageBroadcast.apply
    found: Activations = apply(anchor, group, source, gradient_source, likeness[0], *activations)
    return found


class _StageBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        group: Any,
        source: int,
        gradient_source: int | None,
        shapes_and_dtypes: list[tuple[torch.Size, torch.dtype]],
        *activations: Tensor,
    ) -> Activations:
        ctx.group, ctx.consumer, ctx.is_source = group, gradient_source, dist.get_rank() == source
        ctx.own = [(tensor.shape, tensor.dtype) for tensor in activations]
        found = [torch.empty(shape, dtype=dtype, device=anchor.device) for shape, dtype in shapes_and_dtypes]
        for number, tensor in enumerate(found):
            if ctx.is_source:
                tensor.copy_(activations[number])
            dist.broadcast(tensor, source, group)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = []
        for gradient in gradients:
            own = gradient.contiguous()
            if ctx.consumer is not None:
                own = own.clone() if own is gradient else own
                dist.broadcast(own, ctx.consumer, ctx.group)
            found.append(own)
        if not ctx.is_source:  # what was here was no more than a way for the gradient to come by
            found = [gradients[0].new_zeros(shape, dtype=dtype) for shape, dtype in ctx.own]
        return None, None, None, None, None, *found
