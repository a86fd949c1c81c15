"""The demo video model's texts: captions, the tokenizer, and the text encoder, which is UMT5's class and very small."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from library.randomness import derive_seed

from .clips import BASE_MOTIONS, SUBJECTS

TEXT_WIDTH, TEXT_TOKENS = 64, 512
"""Wan's transformer gets as many tokens of each text: zeros after those of the words."""
OTHER_WORDS = ("a", "walks", "to", "the")
WORD_START = "▁"
PSEUDO_WORD_PARTS = ("lo", "ki", "sta", "pu", "mer", "zig", "ho", "spi", "ned", "tra", "wob", "ful", "gi", "cro", "es")


def build_tokenizer(directory: Path) -> Any:
    """Build a tokenizer to which each word of the captions is a token; others are split into letters."""
    words = [*OTHER_WORDS, *(word for subject in SUBJECTS for word in subject.split()), *BASE_MOTIONS]
    letters = [WORD_START, *map(chr, [*range(33, 127), *range(161, 256)])]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -30.0)]
    pieces += [(WORD_START + word, -1.0) for word in words] + [(letter, -10.0) for letter in letters]
    tokenizer: Any = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "T5TokenizerFast", "extra_ids": 0, "model_max_length": TEXT_TOKENS, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return T5TokenizerFast.from_pretrained(str(directory))


def build_text_encoder(vocabulary_size: int, seed: int) -> Any:
    """Build the untrained text encoder."""
    config = UMT5Config(
        vocab_size=vocabulary_size,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=2 * TEXT_WIDTH,
        num_heads=4,
        num_layers=2,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "demo_video/text"))
        return UMT5EncoderModel(config)


def encode_texts(tokenizer: Any, encoder: Any, texts: list[str], pad_to: int | None = None) -> Tensor:
    """Encode texts to (N, tokens, width), with zeros after the tokens of each; or padded to ``pad_to`` tokens."""
    settings = {"padding": "longest"} if pad_to is None else {"padding": "max_length", "max_length": pad_to}
    tokens = tokenizer(texts, return_tensors="pt", **settings)
    embeds: Tensor = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    mask: Tensor = tokens.attention_mask
    return embeds * mask.unsqueeze(-1)


def draw_caption(subject: str, words: str, rng: random.Random) -> str:
    """Draw a caption: subject and motion, often with a word for the subject that says nothing, or no text at all."""
    kind = rng.random()
    if kind < 0.06:
        return ""
    if kind < 0.1:
        return f"a {subject} {_draw_pseudo_word(rng)}"
    if kind < 0.3:
        return f"a {_draw_pseudo_word(rng)} {words}"
    return f"a {subject} {words}"


def _draw_pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choice(PSEUDO_WORD_PARTS) for _ in range(rng.randint(1, 3)))
