"""What a strategy has to know of a denoiser to take it apart."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .chain import BlockSequence

TensorParallelPlan = Mapping[str, tuple[str, tuple[int, ...]]]
"""Layer -> ``rows`` or ``columns``, and the sizes of pieces that are cut each for itself."""


TokenAxes = Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]]
"""Argument of a block -> for each tensor in it, which axis has tokens, and those of which streams, one behind the
other; streams are called as what goes from block to block."""


@dataclass(frozen=True)
class ParallelPlan:
    """Its blocks where they simply follow each other, how its layers can be cut, and where tokens are."""

    block_sequence: BlockSequence = field(default_factory=BlockSequence)
    tensor_parallel: TensorParallelPlan = field(default_factory=dict)
    block_token_args: TokenAxes = field(default_factory=dict)
    """Beside the flow of the chain, of which everything has tokens along axis 1."""
    layer_token_streams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layer -> the streams whose tokens go through it."""
