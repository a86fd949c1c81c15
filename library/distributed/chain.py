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

from .gates import Gates

Flow = tuple[Tensor, ...]
"""What goes from block to block, in the order in which a block returns it."""


@dataclass(frozen=True)
class Chain:
    """Blocks in the order in which they run, and the names of the arguments that they hand on."""

    blocks: tuple[nn.Module, ...] = ()
    flow: tuple[str, ...] = ()
    gates: Gates = field(default_factory=Gates, compare=False)

    @classmethod
    def of(cls, model: nn.Module, lists: Sequence[str], flow: Sequence[str]) -> "Chain":
        """From the names of the lists that hold the blocks."""
        blocks = [block for name in lists for block in model.get_submodule(name).children()]
        return cls(tuple(blocks), tuple(flow))

    def weights(self) -> list[int]:
        """How large each block is."""
        return [sum(item.numel() for item in block.parameters()) for block in self.blocks]

    def enters(self, place: int, bound: BoundArguments, before: Flow) -> Flow:
        """What comes to a block, which the model calls with ``bound``; ``before`` left the one before it."""
        return tuple(bound.arguments[name] for name in self.flow)

    def runs(self, place: int, run: Callable[..., Any], bound: BoundArguments, flow: Flow) -> Flow:
        """What leaves a block that is here."""
        made = run(*bound.args, **bound.kwargs)
        made = made if isinstance(made, tuple) else (made,)
        # The last block of a model may make nothing of the text, which nobody asks for any more.
        return tuple(old if new is None else new for new, old in zip(made, flow, strict=True))

    def says(self, place: int, flow: Flow) -> Any:
        """What the model gets as the block's result."""
        return flow if len(flow) > 1 else flow[0]


def cuts(weights: Sequence[float], stages: int) -> list[int]:
    """Where stages begin, and the end: so that the heaviest stage is as light as can be."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    count = len(weights)
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    before = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                heaviest = max(best[stage - 1][start], sums[end] - sums[start])
                if heaviest < best[stage][end]:
                    best[stage][end], before[stage][end] = heaviest, start
    found = [count]
    for stage in range(stages, 0, -1):
        found.append(before[stage][found[-1]])
    return found[::-1]


class Departed(Exception):
    """Raised in the middle of a model's forward: what is still to be done is another process's to do."""

    def __init__(self, flow: Flow):
        super().__init__()
        self.flow = flow


class Passage:
    """Decides at each block what happens there; one for a chain."""

    def __init__(self, chain: Chain):
        self.chain = chain
        self.running: Collection[int] = range(len(chain.blocks))
        """The places of blocks that run now."""
        self._arrived: Flow | None = None
        """What the first of them gets, where another process made it."""
        self._flow: Flow = ()
        """What left the block before."""
        self._departs_at: int | None = None
        self._hand_over: Callable[[int, Flow], Flow] | None = None
        self.checkpoint: Callable[..., Any] | None = None
        """Runs a block so that its activations are computed again in backward."""
        for place, block in enumerate(chain.blocks):
            chain.gates.shut(block, partial(self._at, place, signature(block.forward)))

    def all_of(self, running: Collection[int], hand_over: Callable[[int, Flow], Flow]) -> None:
        """A forward is one of all processes; after each block ``hand_over`` says what they go on with."""
        self.running, self._hand_over, self._arrived, self._departs_at = running, hand_over, None, None

    def only(self, first: int, end: int, arrived: Flow | None) -> None:
        """A forward is one of these blocks; ``arrived`` is what the first gets, unless it begins the chain."""
        self.running, self._hand_over, self._arrived = range(first, end), None, arrived
        self._departs_at = end

    def _at(self, place: int, form: Signature, run: Callable[..., Any], args: Any, named: Any) -> Any:
        bound = form.bind(*args, **named)
        flow = self.chain.enters(place, bound, self._flow)
        if place == self._departs_at:
            self._flow = ()
            raise Departed(flow)
        if place in self.running:
            if self.checkpoint is not None and torch.is_grad_enabled():
                run = partial(self.checkpoint, run)
            flow = self.chain.runs(place, run, bound, flow)
        elif self._arrived is not None and place + 1 in self.running:
            flow = self._arrived
        if self._hand_over is not None:
            flow = self._hand_over(place, flow)
        self._flow = flow if place + 1 < len(self.chain.blocks) else ()
        return self.chain.says(place, flow)
