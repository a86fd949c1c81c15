"""Convert a state dict to the LoRA file formats of sd-scripts (kohya), diffusers and ComfyUI, and back.

The keys of a state dict are ``<component>.<module>.lora_A.weight``.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..config.validate_adapter import validate_save_format
from ..errors import UserError
from .alpha_folding import build_alpha_metadata, fold_alpha, read_alpha_dtype, unfold_alphas
from .fused_layers import FusionError, fuse_adapters, needs_scale_shift_swap, split_adapter
from .key_names import ComponentKeys, build_kohya_name, find_wrapper_names
from .original_layouts import ModuleGroup
from .state_dict import (
    ALPHA,
    COMFY_SUFFIXES,
    DIFFUSERS_SUFFIXES,
    DOWN,
    KOHYA_SUFFIXES,
    MAGNITUDE,
    PEFT_SUFFIXES,
    UP,
    ModuleAdapter,
    group_by_module,
    iter_named_tensors,
    parse_tensor_key,
)

FileFormat = Literal["kohya", "diffusers", "comfy"]
Tensors = Mapping[str, Tensor]
_COMFY_TRANSFORMER_PREFIX = "lora_transformer"
_LEGACY_ATTENTION_KEY = re.compile(r"\.to_(q|k|v|out)_lora\.")


@dataclass(frozen=True)
class AdapterFileContents:
    """The contents of a LoRA file."""

    state_dict: dict[str, Tensor]
    alphas: dict[str, float]
    """By module of the state dict, component included."""
    file_format: FileFormat
    alpha_dtype: torch.dtype = torch.float32
    """Dtype of the alphas in the file."""


def choose_file_format(adapter_types: Iterable[str], family_format: FileFormat) -> FileFormat:
    """The format that most programs load; ``family_format`` is the one for LoRA."""
    types = set(adapter_types)
    if types & {"oft", "boft"}:
        return "diffusers"
    return family_format if types <= {"lora"} else "comfy"


def convert_to_file_format(
    state_dict: Tensors,
    alphas: Mapping[str, float],
    components: Sequence[ComponentKeys],
    file_format: FileFormat,
    alpha_dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, contiguous and on the CPU, and the metadata that is needed to read them back.

    Files of sd-scripts and ComfyUI contain alphas; in diffusers files they are folded into the adapter.
    """
    if wrapped := find_wrapper_names(state_dict):
        raise ValueError(f"{len(wrapped)} keys contain names of wrappers, for example {wrapped[0]}")
    adapters = group_by_module({key: tensor.detach().cpu() for key, tensor in state_dict.items()}, alphas)
    if problems := validate_save_format((adapter.adapter_type for adapter in adapters.values()), file_format):
        raise UserError("; ".join(problems))
    prefixes = tuple(f"{component.name}." for component in components)
    if unknown := [module for module in adapters if not module.startswith(prefixes)]:
        raise ValueError(f"{unknown[0]} is in no component of the pipeline")
    tensors: dict[str, Tensor] = {}
    for component, prefix in zip(components, prefixes, strict=True):
        own = {
            module.removeprefix(prefix): adapter for module, adapter in adapters.items() if module.startswith(prefix)
        }
        for name, tensor in _format_component(own, component, file_format):
            if name in tensors:
                raise ValueError(f"duplicate key {name} in the file")
            tensors[name] = tensor.to(alpha_dtype) if name.endswith(f".{ALPHA}") else tensor.contiguous()
    # Modules may share lora_A in memory, but safetensors rejects shared tensors.
    pointers: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in pointers:
            tensors[name] = tensor.clone()
        pointers.add(tensor.data_ptr())
    return tensors, build_alpha_metadata(adapters, alpha_dtype) if file_format == "diffusers" else {}


def _format_component(
    adapters: Mapping[str, ModuleAdapter], component: ComponentKeys, file_format: FileFormat
) -> Iterator[tuple[str, Tensor]]:
    if file_format == "diffusers":
        names = component.get_key_map(component.key_style if component.is_text_encoder else "diffusers").renames
        for module, adapter in adapters.items():
            name = f"{component.name}.{names.get(module, module)}"
            yield from iter_named_tensors(name, fold_alpha(adapter), DIFFUSERS_SUFFIXES)
        for group in _find_swapped_groups(adapters, component):
            module = str(group.modules[0])
            swapped = fold_alpha(fuse_adapters([adapters[module]], group.original))
            yield from iter_named_tensors(build_kohya_name(module, _COMFY_TRANSFORMER_PREFIX), swapped, KOHYA_SUFFIXES)
    elif file_format == "comfy" and not component.is_text_encoder and component.name != "unet":
        swapped_modules = {str(group.modules[0]) for group in _find_swapped_groups(adapters, component)}
        for module, adapter in adapters.items():
            if module not in swapped_modules:
                yield from _format_with_alpha(f"{component.name}.{module}", adapter, COMFY_SUFFIXES)
        yield from _format_kohya(
            {module: adapters[module] for module in adapters if module in swapped_modules}, component
        )
    else:
        yield from _format_kohya(adapters, component)


def _find_swapped_groups(adapters: Mapping[str, ModuleAdapter], component: ComponentKeys) -> list[ModuleGroup]:
    """Modules whose shift and scale are in another order than in the original model.

    ComfyUI ignores this when it maps diffusers keys.  So its files have these modules by their original key; files for
    diffusers repeat them under a key that diffusers skips and that ComfyUI reads last.
    """
    key_map = component.get_key_map()
    groups = key_map.group_modules(adapters) if key_map.layout else []
    return [
        group
        for group in groups
        if group.original.swaps_scale_shift and needs_scale_shift_swap(adapters[str(group.modules[0])], group.original)
    ]


def _format_kohya(adapters: Mapping[str, ModuleAdapter], component: ComponentKeys) -> Iterator[tuple[str, Tensor]]:
    for group in component.get_key_map().group_modules(adapters):
        parts = [None if module is None else adapters[module] for module in group.modules]
        try:
            fused = fuse_adapters(parts, group.original)
        except FusionError as error:
            raise UserError(f"{component.name}.{group.name}: {error}; use save_format comfy") from None
        yield from _format_with_alpha(build_kohya_name(group.name, component.key_prefix), fused, KOHYA_SUFFIXES)


def _format_with_alpha(name: str, adapter: ModuleAdapter, suffixes: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    if adapter.adapter_type == "lokr" and adapter.rank == 1 and adapter.scale != 1:
        adapter = fold_alpha(adapter)  # loaders ignore the alpha of a LoKr of two full matrices
    if adapter.adapter_type == "dora":
        magnitude = adapter.tensors[MAGNITUDE].reshape(-1, *[1] * (adapter.tensors[DOWN].dim() - 1))
        adapter = ModuleAdapter({**adapter.tensors, MAGNITUDE: magnitude}, adapter.alpha)
    yield from iter_named_tensors(name, adapter, suffixes)
    yield f"{name}.{ALPHA}", torch.tensor(float(adapter.alpha))


def convert_from_file_format(
    tensors: Tensors, metadata: Mapping[str, str], components: Sequence[ComponentKeys]
) -> AdapterFileContents:
    """Read the tensors of a file in any of the formats, for a model with these components."""
    lookup = build_key_lookup(components)
    modules, unknown = _group_by_module(tensors, lookup)
    for name in [name for name in modules if name.startswith(f"{_COMFY_TRANSFORMER_PREFIX}_")]:
        component, group = lookup[name]
        if any(f"{component.name}.{module}" in modules for module in group.modules):  # repeated for ComfyUI
            del modules[name]
    adapters: dict[str, ModuleAdapter] = {}
    for name, module_tensors in modules.items():
        component, group = lookup[name]
        try:
            parts = split_adapter(_build_module_adapter(name, module_tensors), group.original)
        except FusionError as error:
            raise UserError(f"{name}: {error}") from None
        for module, part in zip(group.modules, parts, strict=True):
            if part is None:
                continue
            if module is None:
                unknown.append(name)
            elif f"{component.name}.{module}" in adapters:
                raise UserError(f"{name}: the file contains {component.name}.{module} twice")
            else:
                adapters[f"{component.name}.{module}"] = part
    if unknown:
        raise UserError(f"{len(unknown)} of {len(tensors)} keys do not belong to this model, for example {unknown[0]}")
    adapters = unfold_alphas(adapters, metadata)
    state_dict = {
        key: tensor
        for module, adapter in adapters.items()
        for key, tensor in iter_named_tensors(module, adapter, PEFT_SUFFIXES)
    }
    alphas = {module: adapter.alpha for module, adapter in adapters.items()}
    dtypes = {tensor.dtype for key, tensor in tensors.items() if key.endswith(f".{ALPHA}")}
    alpha_dtype = dtypes.pop() if len(dtypes) == 1 else read_alpha_dtype(metadata)
    return AdapterFileContents(state_dict, alphas, detect_file_format(tensors), alpha_dtype)


def build_key_lookup(components: Iterable[ComponentKeys]) -> dict[str, tuple[ComponentKeys, ModuleGroup]]:
    """All known names of modules in files -> the component and its modules."""
    lookup: dict[str, tuple[ComponentKeys, ModuleGroup]] = {}
    for component in components:
        for name, group in component.iter_known_names():
            lookup.setdefault(name, (component, group))
    return lookup


def detect_file_format(keys: Iterable[str]) -> FileFormat:
    """The format of a file with these keys."""
    modules = {parsed[0] for key in keys if (parsed := parse_tensor_key(upgrade_diffusers_key(key))) is not None}
    if not any("." in module for module in modules):
        return "kohya"
    return "comfy" if any(key.endswith(f".{ALPHA}") for key in keys) else "diffusers"


def upgrade_diffusers_key(key: str) -> str:
    """Convert a key of older diffusers versions to that of newer ones."""
    if ".processor." not in key and "_lora." not in key:
        return key
    key = key.replace(".processor.", ".")
    names = {"q": "to_q", "k": "to_k", "v": "to_v", "out": "to_out.0"}
    if ".self_attn." in key:
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
    return _LEGACY_ATTENTION_KEY.sub(lambda match: f".{names[match[1]]}.lora.", key)


def _group_by_module(
    tensors: Tensors, key_lookup: Mapping[str, object]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Group the tensors by their module's name in the file; also return the unknown keys."""
    modules: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        parsed = parse_tensor_key(upgrade_diffusers_key(key))
        if parsed is None or parsed[0] not in key_lookup:
            unknown.append(key)
        else:
            modules.setdefault(parsed[0], {})[parsed[1]] = tensor
    return modules, unknown


def _build_module_adapter(name: str, module_tensors: Tensors) -> ModuleAdapter:
    tensors = {key: tensor for key, tensor in module_tensors.items() if key != ALPHA}
    adapter = ModuleAdapter(tensors, 0)
    if adapter.adapter_type in ("lora", "dora"):
        if not {DOWN, UP} <= tensors.keys():
            raise UserError(f"{name}: one of lora_down and lora_up is missing")
        if adapter.adapter_type == "dora":
            tensors[MAGNITUDE] = _reshape_magnitude(name, tensors)
    alpha = float(module_tensors[ALPHA]) if ALPHA in module_tensors else float(adapter.rank)
    if adapter.adapter_type == "lokr" and {"lokr_w1", "lokr_w2"} <= tensors.keys():
        alpha = 1.0  # ignored by loaders
    return ModuleAdapter(tensors, alpha)


def _reshape_magnitude(name: str, tensors: Tensors) -> Tensor:
    """The magnitude per output in peft's shape, which for convolutions is (1, outputs, 1, 1)."""
    magnitude, outputs = tensors[MAGNITUDE], len(tensors[UP])
    if magnitude.numel() != outputs or (magnitude.dim() == 2 and magnitude.shape[0] != outputs):
        raise UserError(f"{name}: its dora_scale is per input; only one value per output is supported")
    return magnitude.reshape(1, -1, 1, 1) if tensors[DOWN].dim() == 4 else magnitude.flatten()
