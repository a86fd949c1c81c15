"""A part of a model from a single .safetensors file, in diffusers' or the original names."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .checkpoint_inspection import DENOISER_PREFIX
from .weights import build_empty_model, load_tensors


def load_single_file_component(
    component_class: Any,
    path: str,
    config: Mapping[str, Any],
    prefixes: Sequence[str],
    dtype: torch.dtype,
    device: torch.device | None,
) -> Any:
    """Make the part of ``config`` and fill it from a file, where its weights' names may begin with a prefix."""
    prefix, tensors = _read_tensors(path, prefixes)
    model = build_empty_model(component_class, config)
    rename = (
        _convert_text_encoder_keys
        if component_class.__module__.startswith("transformers.")
        else _convert_diffusers_keys
    )
    try:
        missing = load_tensors(model, rename(model, tensors, prefix), dtype, device)
    except KeyError as error:
        missing = [str(error.args[0])]
    if missing:
        raise ValueError(f"{len(missing)} weights are missing in the file, for example {missing[0]}")
    return model


def _read_tensors(path: str, prefixes: Sequence[str]) -> tuple[str, dict[str, Tensor]]:
    """The weights that begin with one of the prefixes, and with which; all of them when none does."""
    with safe_open(path, framework="pt") as file:
        prefix, names = select_component_keys(file.keys(), prefixes)
        return prefix, {name: file.get_tensor(name) for name in names}


def select_component_keys(keys: Iterable[str], prefixes: Sequence[str]) -> tuple[str, list[str]]:
    """The names that begin with one of the prefixes, and with which; all of them when none does."""
    every = list(keys)
    prefix = next((each for each in prefixes if any(name.startswith(each) for name in every)), "")
    return prefix, [name for name in every if name.startswith(prefix)]


def _convert_diffusers_keys(model: Any, tensors: dict[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """diffusers knows the original names of its models; it only wants to see a UNet's prefix."""
    from diffusers.loaders import single_file_model

    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if model.state_dict().keys() <= bare.keys():
        return bare
    if "input_blocks.0.0.weight" in tensors:
        tensors = {DENOISER_PREFIX + name: tensor for name, tensor in tensors.items()}
    kind = _CONVERSION_CLASSES.get(type(model).__name__, type(model).__name__)
    table: Any = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
    renamed: Mapping[str, Tensor] = table[kind]["checkpoint_mapping_fn"](
        checkpoint=bare if kind in _PREFIXLESS_CLASSES else tensors, config=dict(model.config)
    )
    return renamed


_CONVERSION_CLASSES: Mapping[str, str] = {"AutoencoderKLQwenImage": "AutoencoderKLWan"}
"""Qwen-Image's VAE is Wan's with other weights, and files name them alike."""


_PREFIXLESS_CLASSES = {"AutoencoderKLWan", "QwenImageTransformer2DModel"}
"""diffusers does not expect a prefix in these."""


def _convert_text_encoder_keys(model: Any, tensors: dict[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """Names as the installed transformers has them."""
    from diffusers.loaders import single_file_utils

    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if any(".resblocks." in name for name in tensors):
        convert: Any = single_file_utils.convert_open_clip_checkpoint
        tensors = convert(model, tensors, prefix="")
    known = model.state_dict()
    places = {_strip_wrapper_modules(name): name for name in known}
    named = {places.get(_strip_wrapper_modules(name), name): tensor for name, tensor in tensors.items()}
    if "text_projection.weight" in known and "text_projection.weight" not in named:
        named["text_projection.weight"] = torch.eye(len(known["text_projection.weight"]))  # files of SD3 leave it out
    if "lm_head.weight" in known and "lm_head.weight" not in named:  # says the next word, which nobody asks for
        named["lm_head.weight"] = torch.zeros(1).expand(known["lm_head.weight"].shape)
    return named


def _strip_wrapper_modules(name: str) -> str:
    """A weight's name without the models around its own, which differ between versions of transformers."""
    parts = name.split(".")
    while parts[0] in ("model", "text_model", "language_model"):
        parts = parts[1:]
    return ".".join(parts)
