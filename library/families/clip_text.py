"""Captions through CLIP text encoders, in one piece of 75 tokens or in several, as sd-scripts does."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..config.schema import ModelConfig

CLIP_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
"""Every linear layer inside the attentions and MLPs of CLIP's layers."""
T5_LORA_TARGETS = (
    "SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o", "DenseReluDense.wi_0",
    "DenseReluDense.wi_1", "DenseReluDense.wo",
)  # fmt: skip
"""The same of T5's."""
PIECE = 75
"""Tokens of a caption that CLIP reads at once, between the start and the end token."""


def last_layers(encoder: Any, count: int) -> tuple[str, ...]:
    """Names of everything in the last layers of CLIP, which nothing sees where an earlier layer is read."""
    total = encoder.config.num_hidden_layers
    marks = tuple(f"layers.{number}" for number in range(total - count, total))
    return tuple(name for name, _ in encoder.named_modules() if any(f".{mark}." in f".{name}." for mark in marks))


def token_rows(tokenizer: Any, prompts: Sequence[str], length: int) -> Tensor:
    """Token numbers (B x pieces, 77): each prompt cut to ``length`` tokens, and these into pieces of 75.

    Each piece is made a caption of its own; where a prompt is shorter, its last pieces are empty captions.
    """
    rows = []
    for words in tokenizer(list(prompts), add_special_tokens=False, truncation=False, verbose=False).input_ids:
        for start in range(0, length, PIECE):
            piece = words[:length][start : start + PIECE]
            row = [tokenizer.bos_token_id, *piece, tokenizer.eos_token_id]
            rows.append(row + [tokenizer.pad_token_id] * (PIECE + 2 - len(row)))
    return torch.tensor(rows)


def too_long(tokenizer: Any, prompts: Sequence[str], length: int) -> list[str]:
    """The prompts of more than ``length`` tokens, of which ``token_rows`` leaves out the end."""
    words = tokenizer(list(prompts), add_special_tokens=False, truncation=False, verbose=False).input_ids
    return [prompt for prompt, each in zip(prompts, words, strict=True) if len(each) > length]


@contextmanager
def cut_in_silence(pipe: Any, *tokenizers: Any) -> Iterator[None]:
    """While the pipeline encodes long captions, of which CLIP reads the beginning and T5 all, or what was told.

    It would write out what CLIP does not read, each time and on each process; its tokenizers warn of errors to come.
    """
    logger = logging.getLogger(type(pipe).__module__)
    before = logger.level
    for tokenizer in tokenizers:
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def sized(tokenizer: Any, prompts: Sequence[str], width: int, most: int, before: int = 0) -> list[Tensor]:
    """Of texts that differ in length what an encoder says of each, without numbers: (tokens, width).

    It reads ``most`` tokens behind the ``before`` of which it says nothing.
    """
    words = tokenizer(list(prompts), truncation=False, verbose=False).input_ids
    return [torch.empty(max(1, min(len(each) - before, most)), width, device="meta") for each in words]


def joined(states: Tensor, pieces: int) -> Tensor:
    """What was read of each piece (B x pieces, 77, width), as one text (B, 75 x pieces + 2, width).

    Of the start and end tokens only the first and the last stay.
    """
    states = states.view(-1, pieces, *states.shape[1:])
    inner = states[:, :, 1:-1].flatten(1, 2)
    return torch.cat([states[:, 0, :1], inner, states[:, -1, -1:]], dim=1)


def encode_with_one(pipe: Any, prompts: Sequence[str], options: ModelConfig) -> Tensor:
    """Prompts through the pipeline's only text encoder; ``clip_skip`` is sd-scripts', where 1 is the last layer."""
    rows = token_rows(pipe.tokenizer, prompts, options.max_token_length)
    output = pipe.text_encoder(rows.to(pipe.text_encoder.device, non_blocking=True), output_hidden_states=True)
    states = layer_from_end(pipe.text_encoder, output, options.clip_skip or 1)
    return joined(states, options.max_token_length // PIECE)


def layer_from_end(encoder: Any, output: Any, number: int) -> Tensor:
    """The states after the n-th last layer, normed as the last ones are."""
    # CLIPTextModelWithProjection has the layers in its text_model, CLIPTextModel in itself.
    normed: Tensor = getattr(encoder, "text_model", encoder).final_layer_norm(output.hidden_states[-number])
    return normed
