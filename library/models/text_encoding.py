"""Captions through CLIP text encoders, in one piece of 75 tokens or in several, as sd-scripts does."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..config.schema import ModelConfig

CLIP_LORA_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
"""Every linear layer inside the attentions and MLPs of CLIP's layers."""


T5_LORA_TARGET_MODULES = (
    "SelfAttention.q",
    "SelfAttention.k",
    "SelfAttention.v",
    "SelfAttention.o",
    "DenseReluDense.wi_0",
    "DenseReluDense.wi_1",
    "DenseReluDense.wo",
)
"""The same of T5's."""


CHUNK_LENGTH = 75
"""Tokens of a caption that CLIP reads at once, between the start and the end token."""


def get_last_layer_names(encoder: Any, count: int) -> tuple[str, ...]:
    """Names of everything in the last layers of CLIP, which nothing sees where an earlier layer is read."""
    total = encoder.config.num_hidden_layers
    marks = tuple(f"layers.{number}" for number in range(total - count, total))
    return tuple(name for name, _ in encoder.named_modules() if any(f".{mark}." in f".{name}." for mark in marks))


def tokenize_in_chunks(tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> Tensor:
    """Token numbers (B x pieces, 77): each prompt cut to ``length`` tokens, and these into pieces of 75.

    Each piece is made a caption of its own; where a prompt is shorter, its last pieces are empty captions.
    """
    rows = []
    for words in tokenizer(list(prompts), add_special_tokens=False, truncation=False, verbose=False).input_ids:
        for start in range(0, max_tokens, CHUNK_LENGTH):
            piece = words[:max_tokens][start : start + CHUNK_LENGTH]
            row = [tokenizer.bos_token_id, *piece, tokenizer.eos_token_id]
            rows.append(row + [tokenizer.pad_token_id] * (CHUNK_LENGTH + 2 - len(row)))
    return torch.tensor(rows)


def find_truncated_prompts(tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """The prompts of more than ``length`` tokens, of which ``token_rows`` leaves out the end."""
    words = tokenizer(list(prompts), add_special_tokens=False, truncation=False, verbose=False).input_ids
    return [prompt for prompt, each in zip(prompts, words, strict=True) if len(each) > max_tokens]


@contextmanager
def suppress_truncation_warnings(pipe: Any, *tokenizers: Any) -> Iterator[None]:
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


def build_meta_text_embeds(
    tokenizer: Any, prompts: Sequence[str], width: int, max_tokens: int, num_prefix_tokens: int = 0
) -> list[Tensor]:
    """Of texts that differ in length what an encoder says of each, without numbers: (tokens, width).

    It reads ``most`` tokens behind the ``before`` of which it says nothing.
    """
    words = tokenizer(list(prompts), truncation=False, verbose=False).input_ids
    return [torch.empty(max(1, min(len(each) - num_prefix_tokens, max_tokens)), width, device="meta") for each in words]


def join_chunks(hidden_states: Tensor, num_chunks: int) -> Tensor:
    """What was read of each piece (B x pieces, 77, width), as one text (B, 75 x pieces + 2, width).

    Of the start and end tokens only the first and the last stay.
    """
    hidden_states = hidden_states.view(-1, num_chunks, *hidden_states.shape[1:])
    inner = hidden_states[:, :, 1:-1].flatten(1, 2)
    return torch.cat([hidden_states[:, 0, :1], inner, hidden_states[:, -1, -1:]], dim=1)


def encode_with_clip(pipe: Any, prompts: Sequence[str], model_config: ModelConfig) -> Tensor:
    """Prompts through the pipeline's only text encoder; ``clip_skip`` is sd-scripts', where 1 is the last layer."""
    rows = tokenize_in_chunks(pipe.tokenizer, prompts, model_config.max_token_length)
    output = pipe.text_encoder(rows.to(pipe.text_encoder.device, non_blocking=True), output_hidden_states=True)
    states = get_normed_hidden_states(pipe.text_encoder, output, model_config.clip_skip or 1)
    return join_chunks(states, model_config.max_token_length // CHUNK_LENGTH)


def get_normed_hidden_states(encoder: Any, output: Any, layers_from_end: int) -> Tensor:
    """The states after the n-th last layer, normed as the last ones are."""
    # CLIPTextModelWithProjection has the layers in its text_model, CLIPTextModel in itself.
    normed: Tensor = getattr(encoder, "text_model", encoder).final_layer_norm(output.hidden_states[-layers_from_end])
    return normed
