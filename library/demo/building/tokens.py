"""A small vocabulary of CLIP's kind: whole words where they are known, and pieces of words for any other text."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer

SIZE = 1600
"""Tokens before the first and the last one."""
START, END = "<|startoftext|>", "<|endoftext|>"
MAX_TOKENS = 77


def make(known: Iterable[str], others: Iterable[str], folder: Path) -> CLIPTokenizer:
    """Learn merges from words, of which the ``known`` become one token each; written to ``folder``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    singles = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges = _merges({**dict.fromkeys(others, 1), **dict.fromkeys(known, 1000)}, SIZE - len(singles))
    tokens = list(dict.fromkeys([*singles, *("".join(pair) for pair in merges), START, END]))
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return load(folder)


def load(folder: Path) -> CLIPTokenizer:
    """What ``make`` wrote."""
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(str(folder), model_max_length=MAX_TOKENS)
    return tokenizer


def _merges(counts: dict[str, int], most: int) -> list[tuple[str, str]]:
    """Byte-pair encoding: again and again the most frequent pair becomes one; of equals, the first in the alphabet.

    Not by the tokenizers package, which does not choose the same among equals each time.
    """
    words = {(*word[:-1], f"{word[-1]}</w>"): count for word, count in sorted(counts.items())}
    pairs: Counter[tuple[str, str]] = Counter()
    homes: defaultdict[tuple[str, str], set[tuple[str, ...]]] = defaultdict(set)

    def enter(pieces: tuple[str, ...], count: int) -> None:
        for pair in pairwise(pieces):
            pairs[pair] += count
            homes[pair].add(pieces)

    for pieces, count in words.items():
        enter(pieces, count)
    merges: list[tuple[str, str]] = []
    while len(merges) < most and (best := min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)):
        merges.append(best)
        for pieces in sorted(homes.pop(best)):
            count = words.pop(pieces, 0)
            if count:
                enter(pieces, -count)
                joined = _joined(pieces, best)
                words[joined] = count
                enter(joined, count)
        pairs = +pairs
    return merges


def _joined(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    if pair[0] not in pieces:
        return pieces
    out: list[str] = []
    for piece in pieces:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return tuple(out)
