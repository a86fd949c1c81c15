"""Shared parts of text encoding: CLIP in chunks of 75 tokens, T5, padding and masks, and truncated captions.

Which encoders a model has, and what it takes from each, is in its family (families/).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..config.schema import ModelConfig
from ..dataloader.batch import Cond, map_cond_tensors
from ..diffusion.noise import copy_async
from .base import ControlTextFamily, Family
from .token_vectors import tokenize_words
from .weighted_captions import build_token_weights, tokenize_weighted

CHUNK_LENGTH = 75
"""Tokens of a caption per CLIP pass, without the start and end token."""
MAX_ENCODED_BYTES = 2**26
"""Memory of the device for captions that are kept encoded: 280 of SD 1 in float32, 210 of SDXL in bf16."""


def encode_text_on_meta(
    family: Family, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
) -> Cond:
    """Return the shapes of the conditioning of texts, from a pipeline on the meta device.

    Each text has control images of these (width, height), which some families encode together with it.
    """
    if isinstance(family, ControlTextFamily):
        return family.encode_prompts_with_controls_on_meta(pipe, prompts, control_sizes)
    return family.encode_prompts_on_meta(pipe, prompts)


class EncodedCaptions:
    """Outputs of text encoders that are not trained, each of one caption, as long as there is room.

    The captions of an epoch mostly come again in the next one, and give the same outputs to the bit.
    """

    def __init__(self, max_bytes: int = MAX_ENCODED_BYTES):
        self.max_bytes, self._num_bytes = max_bytes, 0
        self._kept: dict[tuple[str, bool], Cond] = {}

    def encode(self, captions: Sequence[str], encode: Callable[[list[str]], Cond], *, is_autocast: bool) -> list[Cond]:
        """Return the outputs for each caption, by ``encode`` if they are not kept; nobody else has their tensors.

        ``is_autocast``: whether ``encode`` runs under autocast, which rounds otherwise.
        """
        conds = []
        for caption in captions:
            cond = self._kept.get((caption, is_autocast))
            if cond is None:
                cond = encode([caption])
                self._keep((caption, is_autocast), cond)
            conds.append(map_cond_tensors(cond, torch.clone))
        return conds

    def _keep(self, key: tuple[str, bool], cond: Cond) -> None:
        values = [each for value in cond.values() for each in (value if isinstance(value, list) else [value])]
        num_bytes = sum(value.untyped_storage().nbytes() for value in values)
        if self._num_bytes + num_bytes <= self.max_bytes:
            self._num_bytes += num_bytes
            self._kept[key] = cond


def get_last_layer_names(encoder: Any, count: int) -> tuple[str, ...]:
    """Names of all modules in the last ``count`` layers of CLIP, which are unused with ``clip_skip``."""
    total = encoder.config.num_hidden_layers
    layers = tuple(f"layers.{index}" for index in range(total - count, total))
    return tuple(name for name, _ in encoder.named_modules() if any(f".{layer}." in f".{name}." for layer in layers))


@dataclass(frozen=True)
class ClipTokens:
    """Tokens of captions for CLIP, in chunks of 75."""

    rows: Tensor  # (B x chunks, 77)
    max_tokens: int
    weights: Tensor | None = None  # (B, 75 x chunks + 2): factors of the joined states, where captions have weights

    def join_states(self, states: Tensor) -> Tensor:
        """Join the states of chunks (B x chunks, 77, width), and apply the weights."""
        joined = join_chunks(states, self.max_tokens // CHUNK_LENGTH)
        if self.weights is None:
            return joined
        return (joined * copy_async(self.weights, joined.float()).unsqueeze(-1)).to(joined.dtype)


def tokenize_in_chunks(tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> Tensor:
    """Token ids (B x chunks, 77): prompts truncated to ``max_tokens`` and split into chunks of 75."""
    return _build_chunks(tokenizer, tokenize_words(tokenizer, prompts), max_tokens)


def _build_chunks(tokenizer: Any, input_ids: Iterable[Sequence[int]], max_tokens: int) -> Tensor:
    """Every chunk has its own start and end token; the last chunks of a short prompt are empty."""
    rows = []
    for ids in input_ids:
        for start in range(0, max_tokens, CHUNK_LENGTH):
            chunk = ids[:max_tokens][start : start + CHUNK_LENGTH]
            row = [tokenizer.bos_token_id, *chunk, tokenizer.eos_token_id]
            rows.append(row + [tokenizer.pad_token_id] * (CHUNK_LENGTH + 2 - len(row)))
    return torch.tensor(rows)


def tokenize_for_clip(tokenizer: Any, prompts: Sequence[str], model_config: ModelConfig) -> ClipTokens:
    """Tokenize captions in chunks, with weights where these are set."""
    max_tokens = model_config.max_token_length
    if not model_config.weighted_captions:
        return ClipTokens(tokenize_in_chunks(tokenizer, prompts, max_tokens), max_tokens)
    input_ids, weights = zip(*(tokenize_weighted(tokenizer, prompt) for prompt in prompts), strict=True)
    rows = _build_chunks(tokenizer, input_ids, max_tokens)
    return ClipTokens(rows, max_tokens, build_token_weights(weights, max_tokens))


def find_truncated_prompts(tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """The prompts of more than ``max_tokens`` tokens."""
    input_ids = tokenizer(list(prompts), add_special_tokens=False, truncation=False, verbose=False).input_ids
    return [prompt for prompt, ids in zip(prompts, input_ids, strict=True) if len(ids) > max_tokens]


def find_truncated_captions(tokenizer: Any, prompts: Sequence[str], model_config: ModelConfig) -> list[str]:
    """The prompts of more than ``max_token_length`` tokens of CLIP, of which weights and their brackets are none."""
    if model_config.weighted_captions:
        lengths = [len(tokenize_weighted(tokenizer, prompt)[0]) for prompt in prompts]
    else:
        lengths = [len(ids) for ids in tokenize_words(tokenizer, prompts)]
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length > model_config.max_token_length]


def find_truncated_chats(
    tokenizer: Any, prompts: Sequence[str], max_tokens: int, system_message: str | None = None
) -> list[str]:
    """The prompts that end after ``max_tokens`` tokens of a chat with them as the user's message."""
    system = [] if system_message is None else [{"role": "system", "content": system_message}]
    by_text = {}
    for prompt in prompts:
        messages = [*system, {"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=True)
        end = text.rfind(prompt)
        by_text[text[: end + len(prompt)] if end >= 0 else text] = prompt
    return [by_text[text] for text in find_truncated_prompts(tokenizer, list(by_text), max_tokens)]


@contextmanager
def suppress_truncation_warnings(pipe: Any, *tokenizers: Any) -> Iterator[None]:
    """Suppress the warnings of pipeline and tokenizers about captions longer than CLIP's 77 tokens.

    They would be repeated every step on every rank, although T5 reads the whole caption.
    """
    logger = logging.getLogger(type(pipe).__module__)
    previous_level = logger.level
    for tokenizer in tokenizers:
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(previous_level)


@contextmanager
def mask_calls(encoder: Any, build_mask: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Give calls of a text encoder, which pipelines call without a mask, one built from the ids; yield the masks."""
    masks: list[Tensor] = []

    def add_mask(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        masks.append(build_mask(args[0] if args else kwargs["input_ids"]))
        return args, {**kwargs, "attention_mask": masks[-1]}

    handle = encoder.register_forward_pre_hook(add_mask, with_kwargs=True)
    try:
        yield masks
    finally:
        handle.remove()


def find_padding_by_id(pad_token_id: int) -> Callable[[Tensor], Tensor]:
    """Mask (0) every padding token, which no text contains."""
    return lambda input_ids: (input_ids != pad_token_id).long()


def find_padding_after_end(end_token_id: int) -> Callable[[Tensor], Tensor]:
    """Mask (0) what comes after the first end token: CLIP-L pads with this token itself."""

    def build_mask(input_ids: Tensor) -> Tensor:
        is_end = input_ids == end_token_id
        return (is_end.cumsum(1) - is_end.long() == 0).long()

    return build_mask


def encode_with_t5(
    pipe: Any, prompts: Sequence[str], encoder_name: str, max_tokens: int, *, masks_padding: bool
) -> tuple[Tensor, Tensor | None]:
    """Encode prompts with the T5 of a pipeline, whose other encoders may be missing; also return its padding mask."""
    encoder, tokenizer = getattr(pipe, encoder_name), getattr(pipe, encoder_name.replace("text_encoder", "tokenizer"))
    with ExitStack() as stack:
        stack.enter_context(suppress_truncation_warnings(pipe, tokenizer))
        masks = (
            stack.enter_context(mask_calls(encoder, find_padding_by_id(tokenizer.pad_token_id)))
            if masks_padding
            else []
        )
        embeds: Tensor = pipe._get_t5_prompt_embeds(
            list(prompts), max_sequence_length=max_tokens, device=encoder.device, dtype=encoder.dtype
        )
    return embeds, masks[0].to(embeds.dtype) if masks else None


def build_meta_text_embeds(
    tokenizer: Any, prompts: Sequence[str], width: int, max_tokens: int, num_prefix_tokens: int = 0
) -> list[Tensor]:
    """Embeddings of variable length (tokens, width) on the meta device; prefix tokens are dropped."""
    input_ids = tokenizer(list(prompts), truncation=False, verbose=False).input_ids
    lengths = (max(1, min(len(ids) - num_prefix_tokens, max_tokens)) for ids in input_ids)
    return [torch.empty(length, width, device="meta") for length in lengths]


def join_chunks(hidden_states: Tensor, num_chunks: int) -> Tensor:
    """Join the states of chunks (B x chunks, 77, width) to (B, 75 x chunks + 2, width).

    Only the first start token and the last end token are kept.
    """
    hidden_states = hidden_states.view(-1, num_chunks, *hidden_states.shape[1:])
    inner = hidden_states[:, :, 1:-1].flatten(1, 2)
    return torch.cat([hidden_states[:, 0, :1], inner, hidden_states[:, -1, -1:]], dim=1)


def encode_with_clip(pipe: Any, prompts: Sequence[str], model_config: ModelConfig) -> Tensor:
    """Encode prompts with the only text encoder; ``clip_skip`` counts as in sd-scripts: 1 is the last layer."""
    tokens = tokenize_for_clip(pipe.tokenizer, prompts, model_config)
    output = pipe.text_encoder(tokens.rows.to(pipe.text_encoder.device, non_blocking=True), output_hidden_states=True)
    return tokens.join_states(get_normed_hidden_states(pipe.text_encoder, output, model_config.clip_skip or 1))


def get_normed_hidden_states(encoder: Any, output: Any, layers_from_end: int) -> Tensor:
    """Hidden states after the n-th last layer, with the final layer norm applied."""
    # transformers 5: CLIPTextModelWithProjection has a text_model, CLIPTextModel has the layers itself.
    normed: Tensor = getattr(encoder, "text_model", encoder).final_layer_norm(output.hidden_states[-layers_from_end])
    return normed


def drop_padding(embeds: Tensor, mask: Tensor) -> list[Tensor]:
    """The tokens of each text (tokens, width), without the padding after them."""
    return [row[:length] for row, length in zip(embeds, mask.sum(1).tolist(), strict=True)]


def pad_text_embeds(embeds: Tensor | Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Pad texts to the longest, rounded up to ``multiple`` tokens: (B, tokens, width), and the attention mask."""
    masks = [row.new_ones(len(row), dtype=torch.long) for row in embeds]
    padded, mask = pad_sequence(list(embeds), batch_first=True), pad_sequence(masks, batch_first=True)
    padding = -padded.shape[1] % multiple
    return pad(padded, (0, 0, 0, padding)), pad(mask, (0, padding))
