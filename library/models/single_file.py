"""Load a component from a single .safetensors file with diffusers or original keys."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
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
    conversion_class: str | None = None,
    renames: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Build a component from its config and load its weights; its keys in the file may have one of ``prefixes``.

    ``conversion_class`` is the class whose keys in single files it has, if diffusers does not know those of its own;
    ``renames`` are applied to the beginnings of keys before.
    """
    prefix, tensors = _read_tensors(path, prefixes)
    model = build_empty_model(component_class, config)
    is_text_encoder = component_class.__module__.startswith("transformers.")
    try:
        if is_text_encoder:
            converted = _convert_text_encoder_keys(model, tensors, prefix)
        else:
            tensors = {_rename_start(name, renames, prefix): tensor for name, tensor in tensors.items()}
            converted = _convert_diffusers_keys(model, tensors, prefix, conversion_class)
        missing = load_tensors(model, converted, dtype, device)
    except KeyError as error:
        missing = [str(error.args[0])]
    if missing:
        raise ValueError(f"the file lacks {len(missing)} weights, for example {missing[0]}")
    return model


def _rename_start(name: str, renames: Mapping[str, str], prefix: str) -> str:
    bare = name.removeprefix(prefix)
    start = next((old for old in renames if bare.startswith(old)), None)
    return name if start is None else f"{name[: len(name) - len(bare)]}{renames[start]}{bare[len(start) :]}"


def _read_tensors(path: str, prefixes: Sequence[str]) -> tuple[str, dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        prefix, names = select_component_keys(file.keys(), prefixes)
        return prefix, {name: file.get_tensor(name) for name in names}


def select_component_keys(keys: Iterable[str], prefixes: Sequence[str]) -> tuple[str, list[str]]:
    """The first of the prefixes that is used, and the keys with it; an empty prefix and all keys if none is."""
    keys = list(keys)
    prefix = next((prefix for prefix in prefixes if any(key.startswith(prefix) for key in keys)), "")
    return prefix, [key for key in keys if key.startswith(prefix)]


def _convert_diffusers_keys(
    model: Any, tensors: dict[str, Tensor], prefix: str, class_name: str | None = None
) -> Mapping[str, Tensor]:
    """Convert original keys with diffusers' mapping of this class, which requires the prefix of UNets."""
    from diffusers.loaders import single_file_model

    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if model.state_dict().keys() <= bare.keys():
        return bare
    if "input_blocks.0.0.weight" in bare:
        bare = {DENOISER_PREFIX + name: tensor for name, tensor in bare.items()}
    classes: Any = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
    convert = classes[class_name or type(model).__name__]["checkpoint_mapping_fn"]
    own = {name: bare[name] for name in model.state_dict() if name in bare}
    converted: Mapping[str, Tensor | None] = convert(checkpoint=bare, config=dict(model.config))
    found = {name: tensor for name, tensor in converted.items() if tensor is not None}  # None: the file lacks it
    return {**own, **found}


def _convert_text_encoder_keys(model: Any, tensors: dict[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """Convert to the keys of the installed transformers, which differ between versions."""
    from diffusers.loaders import single_file_utils

    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if any(".resblocks." in name for name in tensors):
        convert: Any = single_file_utils.convert_open_clip_checkpoint
        tensors = convert(model, tensors, prefix="")
    known = model.state_dict()
    own_keys = {_strip_wrapper_modules(name): name for name in known}
    converted = {own_keys.get(_strip_wrapper_modules(name), name): tensor for name, tensor in tensors.items()}
    if "text_projection.weight" in known and "text_projection.weight" not in converted:  # SD3 checkpoints lack it
        converted["text_projection.weight"] = torch.eye(len(known["text_projection.weight"]))
    if "lm_head.weight" in known and "lm_head.weight" not in converted:  # unused: only hidden states are
        converted["lm_head.weight"] = torch.zeros(1).expand(known["lm_head.weight"].shape)
    return converted


def _strip_wrapper_modules(name: str) -> str:
    parts = name.split(".")
    while parts[0] in ("model", "text_model", "language_model"):
        parts = parts[1:]
    return ".".join(parts)
