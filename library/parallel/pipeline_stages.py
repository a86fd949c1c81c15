"""Pipeline stages: which blocks belong to a stage, and what happens at a block that is on another rank.

The model's own ``forward`` runs on every rank.  There a block of another stage returns its input, or the output that
the other stage sent.

So no family has to be rewritten as a list of layers, which is what the pipelines of DeepSpeed need.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from inspect import Signature, signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .parallel_plan import Activations, BlockSequence


def partition_blocks(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the first block of each stage, and the number of blocks, so that the largest stage is minimal."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    best_start = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0
    for stage in range(1, num_stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                largest = max(best[stage - 1][start], sums[end] - sums[start])
                if largest < best[stage][end]:
                    best[stage][end], best_start[stage][end] = largest, start
    bounds = [count]
    for stage in range(num_stages, 0, -1):
        bounds.append(best_start[stage][bounds[-1]])
    return bounds[::-1]


class StageBoundary(Exception):
    """Leaves the model's forward at the end of a stage, with the activations for the next."""

    def __init__(self, activations: Activations):
        super().__init__()
        self.activations = activations


class StageRunner:
    """Wraps every block of a sequence and decides at each call whether to run it, skip it, or end the stage."""

    def __init__(self, block_sequence: BlockSequence, checkpoint_function: Callable[..., Any] | None = None):
        """``checkpoint_function`` runs a block with activation checkpointing."""
        self.block_sequence, self.checkpoint_function = block_sequence, checkpoint_function
        self.active_blocks: Collection[int] = range(len(block_sequence.blocks))
        """Indices of the blocks that run on this rank."""
        self._received: Activations | None = None
        """The input of the first of them, where another rank computed it."""
        self._activations: Activations = ()
        """The output of the previous block."""
        self._stop_before: int | None = None
        self._broadcast: Callable[[int, Activations], Activations] | None = None
        for index, block in block_sequence.iter_places():
            block_sequence.hooks.wrap(block, partial(self._handle_block, index, signature(block.forward)))

    def set_full_forward(
        self, active_blocks: Collection[int], broadcast: Callable[[int, Activations], Activations]
    ) -> None:
        """Make each forward one over all stages; ``broadcast`` is called after each block with its output."""
        self.active_blocks, self._broadcast, self._received, self._stop_before = active_blocks, broadcast, None, None

    def set_stage_forward(self, first: int, end: int, received: Activations | None) -> None:
        """Make the next forward one of a single stage; ``received`` is its input unless it is the first."""
        self.active_blocks, self._broadcast, self._received = range(first, end), None, received
        self._stop_before = end

    def _handle_block(
        self, index: int, signature: Signature, block_forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        bound = signature.bind(*args, **kwargs)
        activations = self.block_sequence.collect_inputs(index, bound, self._activations)
        if index == self._stop_before:
            self._activations = ()
            raise StageBoundary(activations)
        if index in self.active_blocks:
            if self.checkpoint_function is not None and torch.is_grad_enabled():
                block_forward = partial(self.checkpoint_function, block_forward)
            activations = self.block_sequence.run_block(index, block_forward, bound, activations)
        elif self._received is not None and index + 1 in self.active_blocks:
            activations = self._received
        if self._broadcast is not None:
            activations = self._broadcast(index, activations)
        self._activations = activations if index + 1 < len(self.block_sequence.blocks) else ()
        return self.block_sequence.build_output(index, activations)


def broadcast_stage_output(
    activations: Activations, group: dist.ProcessGroup, source: int, gradient_source: int | None, anchor: Tensor
) -> Activations:
    """Broadcast a stage's output from rank ``source``; backward broadcasts the gradient of rank ``gradient_source``.

    Without a ``gradient_source`` (after the last stage) all ranks compute the same from it and have the same gradient.
    ``anchor`` is any tensor that requires grad, so that backward reaches this point on every rank.
    """
    is_source = dist.get_rank() == source
    shapes_and_dtypes: list[Any] = [[(tensor.shape, tensor.dtype) for tensor in activations] if is_source else None]
    dist.broadcast_object_list(shapes_and_dtypes, source, group)
    apply: Any = _StageBroadcast.apply
    outputs: Activations = apply(anchor, group, source, gradient_source, shapes_and_dtypes[0], *activations)
    return outputs


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
        ctx.group, ctx.gradient_source, ctx.is_source = group, gradient_source, dist.get_rank() == source
        ctx.input_shapes = [(tensor.shape, tensor.dtype) for tensor in activations]
        outputs = [torch.empty(shape, dtype=dtype, device=anchor.device) for shape, dtype in shapes_and_dtypes]
        for index, tensor in enumerate(outputs):
            if ctx.is_source:
                tensor.copy_(activations[index])
            dist.broadcast(tensor, source, group)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input_grads = []
        for gradient in gradients:
            grad = gradient.contiguous()
            if ctx.gradient_source is not None:
                grad = grad.clone() if grad is gradient else grad
                dist.broadcast(grad, ctx.gradient_source, ctx.group)
            input_grads.append(grad)
        if not ctx.is_source:  # this rank's activations were placeholders and did not contribute
            input_grads = [gradients[0].new_zeros(shape, dtype=dtype) for shape, dtype in ctx.input_shapes]
        return None, None, None, None, None, *input_grads
