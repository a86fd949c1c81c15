"""Checks of textual inversion (``token_string``) against other options, and what a command of sd-scripts implies."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..problems import Problem
from .options import ExplicitOptions, iter_group_options
from .schema import AdapterConfig, RunConfig
from .schema_full import IS_LORA
from .types import parse_env_bool

ADAPTER_OPTIONS = {
    "network_weights",
    *(option.name for option in iter_group_options(AdapterConfig) if option.needs and IS_LORA in option.needs),
}
"""Options that say that an adapter is trained, where ``train`` is not set."""
_FIX_LAYOUT = "use DDP (--multi_gpu) or one process"
_FIX_TOKEN = "use one word of letters and digits that no model knows, such as sks_cat or <cat-toy>"


def resolve_embedding_run(config: RunConfig, explicit: ExplicitOptions) -> RunConfig:
    """Train the vectors alone where no option of an adapter is set, as sd-scripts does, and name the file by the word.

    There textual inversion has a script of its own, which needs no option that says so.
    """
    token, adapter = config.adapter.token_string, config.adapter
    if token and "train" not in explicit and not explicit & ADAPTER_OPTIONS:
        adapter = replace(adapter, train="embedding")
    if adapter.train != "embedding":
        return config
    save = config.save
    if "output_name" not in explicit:
        save = replace(save, output_name=token if token and re.fullmatch(r"\w[\w-]*", token) else "embedding")
    return replace(config, adapter=adapter, save=save)


def validate_embedding_run(config: RunConfig) -> Iterator[Problem]:
    """Refuse what textual inversion does not support, and words that no caption could have, all at once."""
    adapter = config.adapter
    token = adapter.token_string
    if token is None:
        if adapter.train == "embedding":
            fix = "add --token_string WORD, the word for what is in the images"
            yield Problem(
                "token_string", "missing: train embedding trains the vectors of a word", fix, others=("train",)
            )
        return
    if adapter.is_full:
        text = "train full trains the model, and not the vectors of a word"
        yield Problem("token_string", text, "use train embedding, or lora for both", others=("train",))
        return
    yield from _validate_token(config, token)
    yield from _validate_engines(config)
    yield from _validate_other_options(config)


def _validate_token(config: RunConfig, token: str) -> Iterator[Problem]:
    adapter, longest = config.adapter, config.model.max_token_length
    if not token or re.search(r"[\s,{}|]", token):
        text = f"{token!r}: spaces, commas, braces and bars cannot be part of it"
        yield Problem("token_string", text, _FIX_TOKEN)
    elif config.model.weighted_captions and re.search(r"[()\[\]:\\]", token):
        text = f"{token!r} has a sign of the weights of words"
        yield Problem("token_string", text, _FIX_TOKEN, others=("weighted_captions",))
    elif adapter.bundle_emb and "." in token:
        yield Problem(
            "token_string", f"{token!r}: a point ends a name in LoRA files", "leave it out", others=("bundle_emb",)
        )
    if adapter.num_vectors_per_token > longest:
        text = f"{adapter.num_vectors_per_token}; a caption has {longest} tokens, and each vector takes one"
        yield Problem("num_vectors_per_token", text, "1 to 16 are usual", others=("max_token_length",))
    if adapter.use_object_template and adapter.use_style_template:
        others = ("use_object_template",)
        yield Problem("use_style_template", "contradicts use_object_template", "remove one of them", others=others)
    if (file := adapter.embedding_weights) is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            yield Problem("embedding_weights", f"{file}: no such file (looked in {path.absolute().parent})")
        elif path.suffix != ".safetensors":
            text = f"{file}: only .safetensors files are read, since others can run code"
            yield Problem("embedding_weights", text, "convert it")


def _validate_engines(config: RunConfig) -> Iterator[Problem]:
    """Refuse the strategies that shard or split the model that the vectors are an input of."""
    engines = {
        "fsdp": _is_used("FSDP", config.sharding.fsdp),
        "deepspeed": _is_used("DEEPSPEED", config.deepspeed.deepspeed),
        "device_map": config.parallel.device_map is not None,
        **{name: size > 1 for name, size in config.parallel.model_parallel_sizes.items()},
    }
    for name, is_used in engines.items():
        if is_used:
            yield _refuse(name, "the vectors are whole on every process, with a whole model", _FIX_LAYOUT)


def _is_used(engine: str, switch: bool | None) -> bool:
    """Whether our option, or the launcher where it is not set, asks for an engine."""
    return bool(parse_env_bool(os.environ.get(f"ACCELERATE_USE_{engine}"))) if switch is None else switch


def _validate_other_options(config: RunConfig) -> Iterator[Problem]:
    adapter = config.adapter
    for name in ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"):
        if getattr(config.cache, name):
            yield _refuse(name, "what the text encoders return changes with the vectors")
    if config.data.slider_prompts is not None:
        yield _refuse("slider_prompts", "its texts are encoded once", "use one of the two")
    if config.model.control != "none":
        yield _refuse("control", "it is trained as a LoRA alone")
    if option := config.preservation.active_option:
        yield _refuse(option, "its targets are those of text encoders that stay as they are")
    if config.distributed.cuda_graphs:
        yield _refuse("cuda_graphs", "text encoders run before the graph")
    if config.distributed.mixed_precision == "fp8":
        yield _refuse("mixed_precision", "fp8 has no float32 vectors", "use bf16")
    if config.train.gpu_memory is not None:
        yield _refuse("gpu_memory", "memory is estimated for a LoRA")
    for name in ("network_weights", "training_adapter") if adapter.train == "embedding" else ():
        if getattr(adapter, name):
            yield Problem(name, "train embedding has no LoRA", "merge it with base_weights", others=("train",))
    if adapter.bundle_emb and config.save.save_format == "diffusers":
        text = "files of this format hold no embeddings"
        yield Problem("save_format", text, "use kohya, or leave bundle_emb out", others=("bundle_emb",))


def _refuse(option: str, reason: str, fix: str = "remove it") -> Problem:
    return Problem(option, f"not supported with token_string: {reason}", fix, others=("token_string",))
