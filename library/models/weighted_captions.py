"""Weights of words in captions for CLIP (``--weighted_captions``): ``(red:1.3)``, ``(red)`` and ``[red]``.

The syntax and its numbers are those of A1111's web UI and sd-scripts. A weight multiplies what the text encoder returns
for the tokens of its words; the tokens themselves are those of the text without brackets.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, tensor

from .token_vectors import tokenize_words

BRACKET_FACTOR = 1.1
"""What round brackets multiply by, and square brackets divide by."""

_PIECES = re.compile(r"\\[\\()\[\]]?|:(?P<weight>[+-]?[.\d]+)\)|[()\[\]:]|[^\\()\[\]:]+")


@dataclass
class _Segment:
    text: str
    weight: float = 1.0


def parse_weights(caption: str) -> list[tuple[str, float]]:
    """Split a caption into texts and their weights; neighbors of equal weight are one text.

    A backslash makes the bracket or backslash after it part of the text, and is dropped before anything else. Brackets
    that are not closed end with the caption.
    """
    segments, open_brackets = list[_Segment](), {"(": list[int](), "[": list[int]()}

    def multiply_from(start: int, factor: float) -> None:
        for segment in segments[start:]:
            segment.weight *= factor

    for piece in _PIECES.finditer(caption):
        text, weight = piece[0], _parse_number(piece["weight"])
        if text.startswith("\\"):
            segments.append(_Segment(text[1:]))
        elif text in open_brackets:
            open_brackets[text].append(len(segments))
        elif weight is not None and open_brackets["("]:
            multiply_from(open_brackets["("].pop(), weight)
        elif text == ")" and open_brackets["("]:
            multiply_from(open_brackets["("].pop(), BRACKET_FACTOR)
        elif text == "]" and open_brackets["["]:
            multiply_from(open_brackets["["].pop(), 1 / BRACKET_FACTOR)
        else:
            segments.append(_Segment(text))
    for bracket, factor in (("(", BRACKET_FACTOR), ("[", 1 / BRACKET_FACTOR)):
        for start in open_brackets[bracket]:
            multiply_from(start, factor)
    return _merge_segments(segments)


def _parse_number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:  # 1.2.3
        return None


def _merge_segments(segments: Sequence[_Segment]) -> list[tuple[str, float]]:
    merged = list[_Segment]()
    for segment in segments:
        if merged and merged[-1].weight == segment.weight:
            merged[-1].text += segment.text
        else:
            merged.append(segment)
    return [(segment.text, segment.weight) for segment in merged] or [("", 1.0)]


def tokenize_weighted(tokenizer: Any, caption: str) -> tuple[list[int], list[float]]:
    """Return the token ids of a caption, without start and end, and the weight of each."""
    ids, weights = list[int](), list[float]()
    for text, weight in parse_weights(caption):
        (part,) = tokenize_words(tokenizer, [text])
        ids += part
        weights += [weight] * len(part)
    return ids, weights


def build_token_weights(weights: Sequence[Sequence[float]], max_tokens: int) -> Tensor:
    """Build the factors (B, max_tokens + 2) of the joined states; start, end and padding have 1."""
    rows = ([1.0, *row[:max_tokens], *[1.0] * (max_tokens - len(row)), 1.0] for row in weights)
    return tensor(list(rows))
