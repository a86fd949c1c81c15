"""Trained vectors of a new word (textual inversion): from the options to parameters of the text encoders.

The vectors are float32 parameters of ``ExtendedEmbedding`` whatever the precision of the model, so that optimizer,
EMA, checkpoints and DDP need nothing else.  ``models.token_vectors`` has the tokens and the module.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.file_reader import iter_tensors, read_safetensors
from ..adapters.kohya_diffusers_comfyui_keys import EMBEDDING_PREFIX
from ..config.schema import AdapterConfig, RunConfig
from ..config.schema_optim import OptimConfig
from ..errors import UserError
from ..models.base import Family
from ..models.facts import FamilyFacts
from ..models.token_vectors import (
    add_vector_tokens,
    extend_text_encoder,
    list_extended_embeddings,
    list_vector_tokens,
    tokenize_words,
)
from ..models.trained_components import get_embedding_lr, select_extended_text_encoders
from ..optim.optimizers import ParamGroup
from ..problems import Problem
from ..randomness import Purpose, derive_generator
from .trainable_modules import TrainableModules, prepare_for_training

logger = logging.getLogger(__name__)

SINGLE_KEY = "emb_params"
"""The key in embedding files of models with one text encoder."""


def get_tokenizer(pipe: Any, encoder_name: str) -> Any:
    return getattr(pipe, encoder_name.replace("text_encoder", "tokenizer"))


def build_embedding_modules(config: RunConfig, family: Family, pipe: Any) -> TrainableModules:
    """Freeze the model, give its text encoders the vectors, and switch to training mode."""
    denoiser_name = family.facts.denoiser_name
    denoiser = getattr(pipe, denoiser_name).requires_grad_(False)
    modules = TrainableModules(denoiser_name, {denoiser_name: denoiser})
    add_token_vectors(modules, config, family, pipe)
    return modules


def add_token_vectors(modules: TrainableModules, config: RunConfig, family: Family, pipe: Any) -> None:
    """Add the vectors to the text encoders of a pipeline, and these to the trainable modules."""
    adapter = config.adapter
    names = select_extended_text_encoders(adapter, family.facts)
    saved = read_saved_vectors(adapter, family.facts)
    if saved is not None:
        logger.info("%s: the vectors start from those of %s", saved.option, saved.path)
        if adapter.init_word:  # which embedding_weights excludes, and a LoRA file only if it has vectors
            logger.warning("no effect on this run: --init_word (%s has the vectors)", saved.path)
    for name in names:
        encoder, tokenizer = getattr(pipe, name), get_tokenizer(pipe, name)
        if name not in dict(modules.named_children()):
            modules.add_module(name, encoder.requires_grad_(False))
        table = encoder.get_input_embeddings().weight.detach().float()
        vectors = (
            saved.vectors[name].to(table)
            if saved is not None
            else build_initial_vectors(adapter, config.train.seed, name, tokenizer, table)
        )
        ids = add_vector_tokens(tokenizer, adapter.token_string or "", adapter.num_vectors_per_token)
        extend_text_encoder(encoder, tokenizer, ids[0], vectors)
    prepare_for_training(modules, names, config.train)


def build_initial_vectors(config: AdapterConfig, seed: int, encoder: str, tokenizer: Any, table: Tensor) -> Tensor:
    """Build the vectors before the first step: the embeddings of the initial words in turn, or draws like others."""
    count = config.num_vectors_per_token
    if config.init_word:
        ids = tokenize_initial_words(tokenizer, config.init_word)
        return table[[ids[number % len(ids)] for number in range(count)]].clone()
    noise = torch.randn(count, table.shape[1], generator=derive_generator(seed, f"{Purpose.TOKEN_VECTORS}/{encoder}"))
    return table.mean(0) + table.std(0) * noise.to(table)


def tokenize_initial_words(tokenizer: Any, words: str) -> list[int]:
    return tokenize_words(tokenizer, [" ".join(re.split(r"[,\s]+", words.strip(", ")))])[0]


def build_embedding_param_group(modules: nn.Module, config: AdapterConfig, optim: OptimConfig) -> ParamGroup:
    """Group the vectors of all text encoders, with their learning rate."""
    vectors = [each.vectors for each in list_extended_embeddings(modules).values()]
    return ParamGroup("embedding", vectors, get_embedding_lr(config, optim))


def format_embedding_summary(modules: nn.Module, config: AdapterConfig) -> list[str]:
    """Describe the vectors of each text encoder."""
    return [
        f"training {name.partition('.')[0]}: {len(each.vectors)} x {each.embedding_dim} vectors for"
        f" {' '.join(list_vector_tokens(config.token_string or '', len(each.vectors)))}"
        for name, each in list_extended_embeddings(modules).items()
    ]


def list_file_keys(facts: FamilyFacts) -> dict[str, str]:
    """List the key of each text encoder in an embedding file, as A1111, ComfyUI and sd-scripts read it."""
    keys = facts.text.embedding_keys
    return dict.fromkeys(keys, SINGLE_KEY) if len(keys) == 1 else dict(keys)


def collect_vectors(modules: nn.Module, facts: FamilyFacts) -> dict[str, Tensor]:
    """Collect the vectors of each text encoder, by its key in an embedding file."""
    keys = list_file_keys(facts)
    found = list_extended_embeddings(modules).items()
    return {keys[name.partition(".")[0]]: each.vectors.detach() for name, each in found}


@dataclass(frozen=True)
class SavedVectors:
    """The vectors of each text encoder that training goes on from, and where they are."""

    vectors: Mapping[str, Tensor]
    option: str
    """``embedding_weights``, or ``network_weights`` for a LoRA file that has the vectors of the word, too."""
    path: Path


def read_saved_vectors(config: AdapterConfig, facts: FamilyFacts) -> SavedVectors | None:
    """Read the vectors of ``embedding_weights``, or those of the word in ``network_weights``, if there are any."""
    if config.embedding_weights is not None:
        path = Path(config.embedding_weights).expanduser()
        tensors, _ = read_safetensors(path)
        found = _find_bundled_vectors(tensors, config, facts) or _find_vectors(tensors, facts)
        if missing := [key for name, key in list_file_keys(facts).items() if found.get(name) is None]:
            raise UserError(Problem("embedding_weights", f"{path} has no {missing[0]}: it is not of {facts.title}"))
        return SavedVectors(found, "embedding_weights", path)
    if config.network_weights is not None and config.token_string:
        path = Path(config.network_weights).expanduser()
        bundled = (item for item in iter_tensors(path) if item[0].startswith(EMBEDDING_PREFIX))
        if found := _find_bundled_vectors(dict(bundled), config, facts):
            return SavedVectors(found, "network_weights", path)
    return None


def _find_vectors(tensors: Mapping[str, Tensor], facts: FamilyFacts) -> dict[str, Tensor]:
    """Find the vectors of each text encoder in an embedding file."""
    keys = list_file_keys(facts)
    if len(keys) == len(tensors) == 1:  # of diffusers: the key is the word
        keys = dict(zip(keys, tensors, strict=True))
    return {name: _as_rows(tensors[key]) for name, key in keys.items() if key in tensors}


def _find_bundled_vectors(
    tensors: Mapping[str, Tensor], config: AdapterConfig, facts: FamilyFacts
) -> dict[str, Tensor]:
    """Find the vectors of the word in a LoRA file; empty unless it has those of all text encoders."""
    start = f"{EMBEDDING_PREFIX}{config.token_string}."
    keys = {name: f"{start}{key}" for name, key in facts.text.embedding_keys.items()}
    return {name: _as_rows(tensors[key]) for name, key in keys.items()} if {*keys.values()} <= tensors.keys() else {}


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
