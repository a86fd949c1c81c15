"""Trained vectors of a new word (textual inversion): from the options to parameters of the text encoders.

The vectors are float32 parameters of ``ExtendedEmbedding`` whatever the precision of the model, so that optimizer,
EMA, checkpoints and DDP need nothing else.  ``models.token_vectors`` has the tokens and the module.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.file_reader import read_safetensors
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
    saved = read_embedding_weights(adapter, family.facts)
    for name in names:
        encoder, tokenizer = getattr(pipe, name), get_tokenizer(pipe, name)
        if name not in dict(modules.named_children()):
            modules.add_module(name, encoder.requires_grad_(False))
        table = encoder.get_input_embeddings().weight.detach().float()
        vectors = (
            saved[name].to(table)
            if saved
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


def read_embedding_weights(config: AdapterConfig, facts: FamilyFacts) -> dict[str, Tensor]:
    """Read ``embedding_weights``, the vectors of each text encoder; empty without it."""
    if config.embedding_weights is None:
        return {}
    path = Path(config.embedding_weights).expanduser()
    tensors, _ = read_safetensors(path)
    found = {name: tensors.get(key) for name, key in list_file_keys(facts).items()}
    if len(found) == 1 and None in found.values() and len(tensors) == 1:  # of diffusers: the key is the word
        found = dict.fromkeys(found, next(iter(tensors.values())))
    if missing := [key for name, key in list_file_keys(facts).items() if found[name] is None]:
        raise UserError(Problem("embedding_weights", f"{path} has no {missing[0]}: it is not of {facts.title}"))
    return {name: tensor.reshape(-1, tensor.shape[-1]) for name, tensor in found.items() if tensor is not None}
