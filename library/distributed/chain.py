"""The blocks of a denoiser as a chain that can be cut: each process runs some of them and passes the others by.

The model's own forward runs on every process, with embeddings before the chain and what comes behind it, which is
little.  Only blocks are kept apart: one that is not here hands on what came in, or what another process made of it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn

from .gates import BlockHooks

Activations = tuple[Tensor, ...]
"""What goes from block to block, in the order in which a block returns it."""


@dataclass(frozen=True)
class BlockSequence:
    """Blocks in the order in which they run, and the names of the arguments that they hand on."""

    blocks: tuple[nn.Module, ...] = ()
    activation_args: tuple[str, ...] = ()
    hooks: BlockHooks = field(default_factory=BlockHooks, compare=False)

    @classmethod
    def from_lists(cls, model: nn.Module, block_lists: Sequence[str], activation_args: Sequence[str]) -> "BlockSequence":
        """From the names of the lists that hold the blocks."""
        blocks = [block for name in block_lists for block in model.get_submodule(name).children()]
        return cls(tuple(blocks), tuple(activation_args))

    def count_block_parameters(self) -> list[int]:
        """How large each block is."""
        return [sum(item.numel() for item in block.parameters()) for block in self.blocks]

    def collect_inputs(self, index: int, bound_arguments: BoundArguments, previous: Activations) -> Activations:
        """What comes to a block, which the model calls with ``bound``; ``before`` left the one before it."""
        return tuple(bound_arguments.arguments[name] for name in self.activation_args)

    def run_block(self, index: int, block_forward: Callable[..., Any], bound_arguments: BoundArguments, activations: Activations) -> Activations:
        """What leaves a block that is here."""
        made = block_forward(*bound_arguments.args, **bound_arguments.kwargs)
        made = made if isinstance(made, tuple) else (made,)
        # The last block of a model may make nothing of the text, which nobody asks for any more.
        return tuple(old if new is None else new for new, old in zip(made, activations, strict=True))

    def build_output(self, index: int, activations: Activations) -> Any:
        """What the model gets as the block's result."""
        return activations if len(activations) > 1 else activations[0]


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

    def run_all_stages(self, active_blocks: Collection[int], broadcast: Callable[[int, Activations], Activations]) -> None:
        """A forward is one of all processes; after each block ``hand_over`` says what they go on with."""
        self.active_blocks, self._broadcast, self._received, self._stop_before = active_blocks, broadcast, None, None

    def run_stage(self, first: int, end: int, received: Activations | None) -> None:
        """A forward is one of these blocks; ``arrived`` is what the first gets, unless it begins the chain."""
        self.active_blocks, self._broadcast, self._received = range(first, end), None, received
        self._stop_before = end

    def _handle_block(self, index: int, signature: Signature, block_forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
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
