"""Load a component from a .safetensors checkpoint, in one file or several, with diffusers or original keys."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.original_module_names import OriginalModule, group_by_original_module
from .checkpoint_inspection import DENOISER_PREFIX
from .checkpoint_shards import open_checkpoint
from .facts import FamilyFacts
from .weights import build_empty_model, load_tensors


@dataclass(frozen=True)
class KeyConversion:
    """The conversion of a component's keys in single files to those of diffusers."""

    class_name: str | None = None
    """The class whose keys it has, if diffusers does not know those of its own."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """The beginnings of keys in the file that are replaced, and what diffusers' conversion expects instead."""
    layout: tuple[OriginalModule, ...] = ()
    """The original modules, where diffusers converts no class with these keys."""
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of modules that files have instead of one in the layout: see ``SingleFileFacts.joins``."""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """Patterns of keys in diffusers or transformers, and what they are in files that are converted by these."""


def build_key_conversion(facts: FamilyFacts, component: str, config: Mapping[str, Any]) -> KeyConversion:
    """Build the conversion of the keys of a component with this config."""
    conversion = KeyConversion(facts.single_files.classes.get(component), facts.single_files.renames)
    if component == "vae" and facts.single_files.build_vae_patterns is not None:
        return replace(conversion, patterns=facts.single_files.build_vae_patterns(config))
    if component in facts.text.components:
        return replace(conversion, patterns=facts.single_files.text_patterns)
    if component != facts.denoiser_name:
        return conversion
    return replace(conversion, layout=facts.single_files.layout, joins=facts.single_files.joins)


def load_single_file_component(
    component_class: Any,
    path: str,
    config: Mapping[str, Any],
    prefixes: Sequence[str],
    dtype: torch.dtype,
    device: torch.device | None,
    conversion: KeyConversion,
) -> Any:
    """Build a component from its config and load its weights; its keys in the file may have one of ``prefixes``."""
    prefix, tensors = _read_tensors(path, prefixes)
    model = build_empty_model(component_class, config)
    is_text_encoder = component_class.__module__.startswith("transformers.")
    try:
        if is_text_encoder:
            converted = _convert_text_encoder_keys(model, tensors, prefix, conversion.patterns)
        else:
            tensors = {_rename_start(name, conversion.renames, prefix): tensor for name, tensor in tensors.items()}
            converted = _convert_keys(model, tensors, prefix, conversion)
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
    with open_checkpoint(Path(path)) as file:
        prefix, names = select_component_keys(file.keys(), prefixes)
        return prefix, {name: file.get_tensor(name) for name in names}


def select_component_keys(keys: Iterable[str], prefixes: Sequence[str]) -> tuple[str, list[str]]:
    """The first of the prefixes that is used, and the keys with it; an empty prefix and all keys if none is."""
    keys = list(keys)
    prefix = next((prefix for prefix in prefixes if any(key.startswith(prefix) for key in keys)), "")
    return prefix, [key for key in keys if key.startswith(prefix)]


def _convert_keys(
    model: Any, tensors: dict[str, Tensor], prefix: str, conversion: KeyConversion
) -> Mapping[str, Tensor]:
    """Convert original keys by the layout, or with diffusers' mapping, which requires the prefix of UNets."""
    from diffusers.loaders import single_file_model

    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if model.state_dict().keys() <= bare.keys():
        return bare
    if conversion.patterns:
        return _convert_by_patterns(model, bare, conversion.patterns)
    if conversion.layout:
        return _convert_by_layout(model, _join_modules(bare, conversion.joins), conversion.layout)
    if "input_blocks.0.0.weight" in bare:
        bare = {DENOISER_PREFIX + name: tensor for name, tensor in bare.items()}
    classes: Any = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
    convert = classes[conversion.class_name or type(model).__name__]["checkpoint_mapping_fn"]
    own = {name: bare[name] for name in model.state_dict() if name in bare}
    converted: Mapping[str, Tensor | None] = convert(checkpoint=bare, config=dict(model.config))
    found = {name: tensor for name, tensor in converted.items() if tensor is not None}  # None: the file lacks it
    return {**own, **found}


def _convert_by_patterns(model: Any, tensors: Mapping[str, Tensor], patterns: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename; a kernel of a video VAE over one frame has no axis for it where it is of images alone."""
    converted = {}
    for key, weight in model.state_dict().items():
        name = key
        for pattern, original in patterns.items():
            name = re.sub(pattern, original, name)
        tensor = tensors[name]
        converted[key] = tensor.squeeze(2) if tensor.ndim == weight.ndim + 1 else tensor
    return converted


def _join_modules(tensors: dict[str, Tensor], joins: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    joined = dict(tensors)
    for end, parts in joins.items():
        for name in tensors:
            module, _, kind = name.rpartition(".")
            if module.endswith(parts[0]):
                start = module.removesuffix(parts[0])
                joined[f"{start}{end}.{kind}"] = torch.cat([joined.pop(f"{start}{part}.{kind}") for part in parts])
    return joined


def _convert_by_layout(
    model: Any, tensors: Mapping[str, Tensor], layout: Sequence[OriginalModule]
) -> Mapping[str, Tensor]:
    """Split the outputs of fused modules; norms may call their weight ``scale``."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    converted = dict[str, Tensor]()
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in shapes)
    for group in group_by_original_module(dict.fromkeys(name.rpartition(".")[0] for name in shapes), layout):
        for kind in kinds:
            names = [f"{module}.{kind}".removeprefix(".") for module in group.modules]  # the model itself has no name
            names = [name for name in names if name in shapes]
            if not names:
                continue
            key = f"{group.name}.{kind}"
            tensor = tensors[f"{group.name}.scale" if kind == "weight" and key not in tensors else key]
            outputs, *inputs = shapes.get(f"{group.modules[0]}.weight", shapes[names[0]])
            if group.original.swaps_scale_shift and [outputs] == [2 * size for size in inputs]:
                tensor = torch.cat(tensor.chunk(2)[::-1])
            sizes = [shapes[name][0] for name in names]
            if sum(sizes) != len(tensor):
                raise KeyError(key)
            converted.update(zip(names, torch.split(tensor, sizes), strict=True))
    return converted


def _convert_text_encoder_keys(
    model: Any, tensors: dict[str, Tensor], prefix: str, patterns: Mapping[str, str]
) -> Mapping[str, Tensor]:
    """Convert to the keys of the installed transformers, which differ between versions."""
    from diffusers.loaders import single_file_utils

    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if any(".resblocks." in name for name in tensors):
        convert: Any = single_file_utils.convert_open_clip_checkpoint
        tensors = convert(model, tensors, prefix="")
    known = model.state_dict()
    if patterns and not known.keys() & tensors.keys():
        return _convert_by_patterns(model, tensors, patterns)
    own_keys = {_strip_wrapper_modules(name): name for name in known}
    converted = {own_keys.get(_strip_wrapper_modules(name), name): tensor for name, tensor in tensors.items()}
    if "text_projection.weight" in known and "text_projection.weight" not in converted:  # SD3 checkpoints lack it
        converted["text_projection.weight"] = torch.eye(len(known["text_projection.weight"]))
    if "lm_head.weight" in known and "lm_head.weight" not in converted:  # unused: only hidden states are
        converted["lm_head.weight"] = torch.zeros(1).expand(known["lm_head.weight"].shape)
    return converted


def _strip_wrapper_modules(name: str) -> str:
    parts = name.split(".")
    while parts[0] in ("model", "text_model", "language_model", "vision_model"):
        parts = parts[1:]
    return ".".join(parts)
