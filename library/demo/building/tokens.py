"""A small vocabulary of CLIP's kind: whole words where they are known, and pieces of words for any other text."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer

SIZE = 1600
"""Tokens before the first and the last one."""
START, END = "<|startoftext|>", "<|endoftext|>"
MAX_TOKENS = 77


def make(known: Iterable[str], others: Iterable[str], folder: Path) -> CLIPTokenizer:
    """Learn merges from words, of which the ``known`` become one token each; written to ``folder``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    singles = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges = _merges({**dict.fromkeys(others, 1), **dict.fromkeys(known, 1000)}, letters, SIZE - len(singles))
    tokens = list(dict.fromkeys([*singles, *("".join(pair) for pair in merges), START, END]))
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(str(folder), model_max_length=MAX_TOKENS)
    return tokenizer


def _merges(counts: dict[str, int], letters: list[str], most: int) -> list[tuple[str, str]]:
    learner: Any = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Letters at the end of a word count towards the size, and are not made from the alphabet.
    trainer = trainers.BpeTrainer(vocab_size=len(letters) + 40 + most, initial_alphabet=letters, min_frequency=1,
                                  end_of_word_suffix="</w>", show_progress=False)  # fmt: skip
    repeated = (" ".join([word] * count) for word, count in sorted(counts.items()))
    learner.train_from_iterator(repeated, trainer)
    found = json.loads(learner.to_str())["model"]["merges"]
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in found]
    return pairs[:most]
