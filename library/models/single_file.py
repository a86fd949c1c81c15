"""Load a component from a checkpoint, in one file or several, with diffusers or original keys.

The file is .safetensors or GGUF; weights that it stores quantized are dequantized.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.original_module_names import OriginalModule, group_by_original_module
from .checkpoint_inspection import DENOISER_PREFIX
from .facts import FamilyFacts
from .stored_weights import RowNumbers, StoredWeight, dequantize_all, read_weights
from .weights import build_empty_model, load_tensors

logger = logging.getLogger(__name__)


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
    needs_vision: bool = False
    """Whether images are encoded with the text, so that the vision part of a text encoder is used."""


def build_key_conversion(facts: FamilyFacts, component: str, config: Mapping[str, Any]) -> KeyConversion:
    """Build the conversion of the keys of a component with this config."""
    conversion = KeyConversion(facts.single_files.classes.get(component), facts.single_files.renames)
    if component == "vae" and facts.single_files.build_vae_patterns is not None:
        return replace(conversion, patterns=facts.single_files.build_vae_patterns(config))
    if component in facts.text.components:
        needs_vision = bool(facts.control.text_tokens_per_image)
        return replace(conversion, patterns=facts.single_files.text_patterns, needs_vision=needs_vision)
    if component not in facts.pipeline.denoisers:
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
    keeps_stored: bool = False,
) -> Any:
    """Build a component from its config and load its weights; its keys in the file may have one of ``prefixes``."""
    prefix, weights = _read_weights(path, prefixes, device)
    return build_component(
        component_class,
        config,
        weights,
        prefix=prefix,
        dtype=dtype,
        device=device,
        conversion=conversion,
        keeps_stored=keeps_stored,
    )


def build_component(
    component_class: Any,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor | StoredWeight],
    prefix: str,
    dtype: torch.dtype,
    device: torch.device | None,
    conversion: KeyConversion,
    keeps_stored: bool = False,
) -> Any:
    """Build a component from its config and weights that were read, whose keys have this prefix.

    ``keeps_stored``: see ``load_tensors``.
    """
    model = build_empty_model(component_class, config)
    try:
        converted = convert_weights(model, weights, prefix, conversion)
        missing = load_tensors(model, converted, dtype, device, keeps_stored=keeps_stored)
    except KeyError as error:
        missing = [str(error.args[0])]
    if missing:
        raise ValueError(f"the file lacks {len(missing)} weights, for example {missing[0]}")
    return model


def convert_weights(
    model: Any, weights: Mapping[str, Tensor | StoredWeight], prefix: str, conversion: KeyConversion
) -> Mapping[str, Tensor | StoredWeight]:
    """Convert keys; weights stay as they are stored unless the conversion does more than to move rows."""
    rows = RowNumbers(weights)
    if not rows.is_empty:
        try:
            return rows.restore(convert_keys(model, rows.stand_ins, prefix, conversion))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            logger.info("its stored weights are dequantized before their keys are converted: %s", error)
    return convert_keys(model, dequantize_all(weights), prefix, conversion)


def convert_keys(
    model: Any, tensors: Mapping[str, Tensor], prefix: str, conversion: KeyConversion
) -> Mapping[str, Tensor]:
    """Convert tensors of a component in a single file to those of diffusers or transformers."""
    if type(model).__module__.startswith("transformers."):
        return _convert_text_encoder_keys(model, tensors, prefix, conversion)
    renamed = {_rename_start(name, conversion.renames, prefix): tensor for name, tensor in tensors.items()}
    return _convert_keys(model, renamed, prefix, conversion)


def _rename_start(name: str, renames: Mapping[str, str], prefix: str) -> str:
    bare = name.removeprefix(prefix)
    start = next((old for old in renames if bare.startswith(old)), None)
    return name if start is None else f"{name[: len(name) - len(bare)]}{renames[start]}{bare[len(start) :]}"


def _read_weights(
    path: str, prefixes: Sequence[str], device: torch.device | None
) -> tuple[str, dict[str, Tensor | StoredWeight]]:
    weights = read_weights(Path(path), lambda keys: select_component_keys(keys, prefixes)[1], device)
    return select_component_keys(weights, prefixes)[0], weights


def select_component_keys(keys: Iterable[str], prefixes: Sequence[str]) -> tuple[str, list[str]]:
    """The first of the prefixes that is used, and the keys with it; an empty prefix and all keys if none is."""
    keys = list(keys)
    prefix = next((prefix for prefix in prefixes if any(key.startswith(prefix) for key in keys)), "")
    return prefix, [key for key in keys if key.startswith(prefix)]


def _convert_keys(
    model: Any, tensors: Mapping[str, Tensor], prefix: str, conversion: KeyConversion
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
    """Rename; a kernel over one frame or one pixel may have axes for it that the model's weight has not."""
    converted = {}
    for key, weight in model.state_dict().items():
        name = key
        for pattern, original in patterns.items():
            name = re.sub(pattern, original, name)
        tensor = tensors[name]
        has_more_axes = tensor.ndim > weight.ndim and tensor.numel() == weight.numel()
        converted[key] = tensor.reshape(weight.shape) if has_more_axes else tensor
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
    model: Any, tensors: Mapping[str, Tensor], prefix: str, conversion: KeyConversion
) -> Mapping[str, Tensor]:
    """Convert to the keys of the installed transformers, which differ between versions."""
    from diffusers.loaders import single_file_utils

    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if any(".resblocks." in name for name in tensors):
        convert: Any = single_file_utils.convert_open_clip_checkpoint
        tensors = convert(model, tensors, prefix="")
    known = model.state_dict()
    if conversion.patterns and not known.keys() & tensors.keys():
        return _convert_by_patterns(model, tensors, conversion.patterns)
    own_keys = {_strip_wrapper_modules(name): name for name in known}
    converted = {own_keys.get(_strip_wrapper_modules(name), name): tensor for name, tensor in tensors.items()}
    return converted | _fill_unused_weights(known, converted, needs_vision=conversion.needs_vision)


def _fill_unused_weights(
    known: Mapping[str, Tensor], converted: Mapping[str, Tensor], *, needs_vision: bool
) -> dict[str, Tensor]:
    """Fill weights that files lack and nothing reads; only hidden states of texts are used."""
    filled = {}
    if "text_projection.weight" in known and "text_projection.weight" not in converted:  # SD3 checkpoints lack it
        filled["text_projection.weight"] = torch.eye(len(known["text_projection.weight"]))
    unused = [name for name in known if name == "lm_head.weight"]
    vision = [name for name in known if ".visual." in f".{name}" or ".vision_tower." in f".{name}"]
    if vision and not converted.keys() & {*vision}:
        if needs_vision:
            text = "the file has no vision part (mmproj), and this model's text encoder reads images, too"
            raise ValueError(f"{text}; use its .safetensors file")
        unused += [name for name in known if name in vision or ".multi_modal_projector." in f".{name}"]
    return filled | {name: torch.zeros(1).expand(known[name].shape) for name in unused if name not in converted}


def _strip_wrapper_modules(name: str) -> str:
    parts = name.split(".")
    while parts[0] in ("model", "text_model", "language_model", "vision_model"):
        parts = parts[1:]
    return ".".join(parts)
