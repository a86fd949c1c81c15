"""The demo model's CLIP tokenizer: known words are one token each, any other text is split into subwords."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer

VOCABULARY_SIZE = 1600
"""Without the start and end tokens."""
START, END = "<|startoftext|>", "<|endoftext|>"
MAX_TOKENS = 77


def train_tokenizer(known_words: Iterable[str], other_words: Iterable[str], directory: Path) -> CLIPTokenizer:
    """Learn a vocabulary in which each of ``known_words`` is one token, and write it to ``directory``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    singles = [*letters, *(f"{letter}</w>" for letter in letters)]
    counts = {**dict.fromkeys(other_words, 1), **dict.fromkeys(known_words, 1000)}
    merges = learn_merges(counts, VOCABULARY_SIZE - len(singles))
    tokens = list(dict.fromkeys([*singles, *("".join(pair) for pair in merges), START, END]))
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (directory / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return load_tokenizer(directory)


def load_tokenizer(directory: Path) -> CLIPTokenizer:
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(str(directory), model_max_length=MAX_TOKENS)
    return tokenizer


def learn_merges(counts: dict[str, int], limit: int) -> list[tuple[str, str]]:
    """Learn byte-pair merges: the most frequent pair first; of equally frequent ones, the first in the alphabet.

    The trainer of the tokenizers package does not break ties in the same way each time.
    """
    words = {(*word[:-1], f"{word[-1]}</w>"): count for word, count in sorted(counts.items())}
    pairs: Counter[tuple[str, str]] = Counter()
    words_with: defaultdict[tuple[str, str], set[tuple[str, ...]]] = defaultdict(set)

    def count_pairs(tokens: tuple[str, ...], count: int) -> None:
        for pair in pairwise(tokens):
            pairs[pair] += count
            words_with[pair].add(tokens)

    for tokens, count in words.items():
        count_pairs(tokens, count)
    merges: list[tuple[str, str]] = []
    while len(merges) < limit and (best := min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)):
        merges.append(best)
        for tokens in sorted(words_with.pop(best)):
            count = words.pop(tokens, 0)
            if count:
                count_pairs(tokens, -count)
                merged = _merge(tokens, best)
                words[merged] = count
                count_pairs(merged, count)
        pairs = +pairs
    return merges


def _merge(tokens: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return tuple(merged)
