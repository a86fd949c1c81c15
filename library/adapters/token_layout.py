"""Where samples and tokens are in the activations of a layer, and numbers of tokens that do not depend on padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

OTHER_TOKENS = ""
"""The segment of all tokens that are in no other one: those of the image and its control images."""
SEGMENT_STRIDE = 2**18
"""Numbers between the first tokens of two segments: more than any of them has tokens."""


class ShardedTokens(Protocol):
    """The tokens of a sequence that this rank has under context parallelism."""

    @property
    def positions(self) -> Tensor:
        """The positions of this rank's tokens in the whole sequence."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the whole sequence."""


@dataclass(frozen=True)
class TokenLayout:
    """How the activations of a layer are laid out: (batch, tokens, width), unless it says otherwise.

    Texts are padded to the longest of a batch, or to a multiple in pipelines and compiled models.  So the position of a
    token says which token it is only within its own segment of the sequence: a text, padded at its end, or the image.
    """

    batch_axis: int = 0
    """0, or 1 where tokens come first."""
    is_padded_before: bool = False
    """Whether texts are padded at their beginning, so that their tokens are numbered from their end."""
    segments: tuple[str, ...] = (OTHER_TOKENS,)
    """The segments of the sequence in order: arguments of the denoiser's ``forward`` that hold padded texts
    (batch, tokens, ...), and ``OTHER_TOKENS``, which needs no argument where it comes last."""

    @property
    def text_arguments(self) -> tuple[str, ...]:
        """The segments whose lengths have to be known: all of them, if there are several."""
        return tuple(name for name in self.segments if name != OTHER_TOKENS)

    def number_tokens(self, positions: Tensor, num_tokens: int, lengths: Mapping[str, Tensor]) -> Tensor:
        """Number the tokens at these positions of a sequence; ``lengths`` are those of padded texts.

        The lengths are tensors, since compiled code would be specialized on integers.
        """
        if not self.text_arguments:
            return positions
        others = num_tokens - sum(lengths[name] for name in self.text_arguments)
        numbers, end = positions, positions.new_zeros(())
        for index, name in enumerate(self.segments):
            start, end = end, end + (others if name == OTHER_TOKENS else lengths[name])
            is_reversed = self.is_padded_before and name != OTHER_TOKENS
            own = end - 1 - positions if is_reversed else positions - start
            numbers = numbers.where(positions < start, own + index * SEGMENT_STRIDE)
        return numbers


PLAIN_LAYOUT = TokenLayout()
