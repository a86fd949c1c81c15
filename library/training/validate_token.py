"""Checks of the new word of textual inversion against tokenizers and captions, before any model is loaded."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..config.schema import AdapterConfig
from ..dataloader.manifest import Manifest, Sample
from ..errors import ConfigError, UserError
from ..models.base import Family
from ..models.detect import DetectedModel, get_config_reader
from ..models.model_configs import is_tokenizer
from ..models.token_vectors import list_vector_tokens, tokenize_words
from ..problems import Problem
from .token_embeddings import SavedVectors, get_tokenizer, read_saved_vectors, tokenize_initial_words

logger = logging.getLogger(__name__)


def check_captions_for_token(config: AdapterConfig, manifest: Manifest) -> None:
    """Raise if no caption has the new word, so that nothing would be trained; otherwise log how many do."""
    if not config.trains_embedding:
        return
    token, samples = (config.token_string or "").lower(), [each for each in manifest.samples if not each.is_reg]
    count = sum(token in _build_whole_caption(each, manifest).lower() for each in samples)
    if not count:
        text = f"no caption has the word {config.token_string!r}, so its vectors would not be trained"
        fix = "write it into the captions, or draw captions with use_object_template or use_style_template"
        raise ConfigError([Problem("token_string", text, fix)])
    logger.info("%s: %d of %d captions have the word", config.token_string, count, len(samples))


def _build_whole_caption(sample: Sample, manifest: Manifest) -> str:
    subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
    return f"{subset.caption_prefix or ''} {sample.caption} {subset.caption_suffix or ''}"


def validate_token(config: AdapterConfig, family: Family, detected: DetectedModel) -> Iterator[Problem]:
    """Check the word, its initial words and its initial vectors against the tokenizers; nothing else is loaded."""
    if not config.trains_embedding or not config.token_string:
        return
    facts = family.facts
    if not facts.text.embedding_keys:
        text = f"the text encoders of {facts.title} take no new words here"
        yield Problem("token_string", text, "use Stable Diffusion 1, 2 or XL", others=("train",))
        return
    try:
        saved = read_saved_vectors(config, facts)
    except UserError as error:
        yield from error.problems
        saved = None
    names = [name for name in facts.components if is_tokenizer(name)]
    pipe, read_config = family.load(detected, torch.float32, names), get_config_reader(detected)
    for name in facts.text.embedding_keys:
        yield from _validate_tokens(config, get_tokenizer(pipe, name))
        if saved is not None:
            yield from _validate_vectors(config, name, saved, (read_config(f"{name}/config.json") or {}))


def _validate_tokens(config: AdapterConfig, tokenizer: Any) -> Iterator[Problem]:
    token, count = config.token_string or "", config.num_vectors_per_token
    vocabulary = tokenizer.get_vocab()
    if known := [each for each in list_vector_tokens(token, count) if each in vocabulary]:
        yield Problem("token_string", f"{known[0]!r} is a token of the model", "use a word that is none")
    elif len(tokenize_words(tokenizer, [token])[0]) == 1:
        yield Problem("token_string", f"{token!r} is a token of the model", "use a word that is none")
    if config.init_word is None or config.embedding_weights is not None:
        return
    ids = tokenize_initial_words(tokenizer, config.init_word)
    if not ids or (tokenizer.unk_token_id in ids and tokenizer.unk_token_id != tokenizer.eos_token_id):
        yield Problem("init_word", f"{config.init_word!r} has no tokens of the model", "use another word")
    elif len(ids) > count:
        text = f"{config.init_word!r} has {len(ids)} tokens, of which {count} would be used"
        yield Problem(
            "init_word",
            text,
            f"use num_vectors_per_token {len(ids)}, or a shorter word",
            others=("num_vectors_per_token",),
        )


def _validate_vectors(
    config: AdapterConfig, name: str, saved: SavedVectors, encoder: Mapping[str, Any]
) -> Iterator[Problem]:
    vectors = saved.vectors[name]
    count, width = config.num_vectors_per_token, encoder.get("hidden_size", vectors.shape[-1])
    if len(vectors) != count:
        text = f"{saved.path} has {len(vectors)} vectors, and num_vectors_per_token is {count}"
        fix = f"use num_vectors_per_token {len(vectors)}"
        yield Problem(saved.option, text, fix, others=("num_vectors_per_token",))
    if vectors.shape[-1] != width:
        text = f"{saved.path} has vectors of {vectors.shape[-1]} numbers, and those of {name} have {width}"
        yield Problem(saved.option, text, "use a file for this model")
