"""LoRA files as sd-scripts, diffusers and ComfyUI write them, from the state of our adapters and back.

A state names each tensor ``<part>.<module>.lora_A.weight``, the part being the pipeline's own name for it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..config.validate_adapter import validate_save_format
from ..errors import UserError
from .alpha import build_alpha_metadata, fold_alpha, read_alpha_dtype, unfold_alphas
from .fused_layers import FusionError, fuse_updates, needs_scale_shift_swap, split_update
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
    ModuleUpdate,
    group_updates,
    iter_named_tensors,
    parse_tensor_key,
)

FileFormat = Literal["kohya", "diffusers", "comfy"]


Tensors = Mapping[str, Tensor]


_COMFY_TRANSFORMER_PREFIX = "lora_transformer"


_LEGACY_ATTENTION_KEY = re.compile(r"\.to_(q|k|v|out)_lora\.")


@dataclass(frozen=True)
class AdapterFileContents:
    """What is in a LoRA file."""

    state_dict: dict[str, Tensor]
    alphas: dict[str, float]
    """Of each module of the state, part included."""
    file_format: FileFormat
    alpha_dtype: torch.dtype = torch.float32
    """How the file wrote its alphas."""


def choose_file_format(adapter_types: Iterable[str], family_format: FileFormat) -> FileFormat:
    """What most programs read for these kinds of updates; ``family`` is that for LoRA."""
    found = set(adapter_types)
    if found & {"oft", "boft"}:
        return "diffusers"
    return family_format if found <= {"lora"} else "comfy"


def convert_to_file_format(
    state_dict: Tensors,
    alphas: Mapping[str, float],
    components: Sequence[ComponentKeys],
    file_format: FileFormat,
    alpha_dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU, each in one piece, and the metadata that is needed to undo it.

    Files of sd-scripts and ComfyUI hold alphas.  diffusers' do not: what alpha does is multiplied into the update.
    """
    if left := find_wrapper_names(state_dict):
        raise ValueError(f"{len(left)} names of weights are not clean, for example {left[0]}")
    updates = {module: _move_to_cpu(update) for module, update in group_updates(state_dict, alphas).items()}
    if problems := validate_save_format((update.adapter_type for update in updates.values()), file_format):
        raise UserError("; ".join(problems))
    tensors: dict[str, Tensor] = {}
    for part in components:
        start = f"{part.name}."
        own = {module.removeprefix(start): update for module, update in updates.items() if module.startswith(start)}
        for name, tensor in _format_component(own, part, file_format):
            if name in tensors:
                raise ValueError(f"two tensors are called {name} in the file")
            tensors[name] = tensor.to(alpha_dtype) if name.endswith(f".{ALPHA}") else tensor.contiguous()
    if strangers := [
        module for module in updates if not module.startswith(tuple(f"{part.name}." for part in components))
    ]:
        raise ValueError(f"{strangers[0]} is in no part that files can hold")
    # Modules may share a matrix in memory, and a file has it once for each of them.
    taken: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in taken:
            tensors[name] = tensor.clone()
        taken.add(tensor.data_ptr())
    return tensors, build_alpha_metadata(updates, alpha_dtype) if file_format == "diffusers" else {}


def _move_to_cpu(update: ModuleUpdate) -> ModuleUpdate:
    return ModuleUpdate({name: tensor.detach().cpu() for name, tensor in update.tensors.items()}, update.alpha)


def _format_component(
    updates: Mapping[str, ModuleUpdate], component: ComponentKeys, file_format: FileFormat
) -> Iterator[tuple[str, Tensor]]:
    """One part's updates as tensors of a file."""
    if file_format == "diffusers":
        names = component.get_key_map(component.key_style if component.is_text_encoder else "diffusers").renames
        for module, update in updates.items():
            yield from iter_named_tensors(
                f"{component.name}.{names.get(module, module)}", fold_alpha(update), DIFFUSERS_SUFFIXES
            )
        for group in _find_swapped_groups(updates, component):
            turned = fold_alpha(fuse_updates([updates[str(group.modules[0])]], group.original))
            yield from iter_named_tensors(
                build_kohya_name(str(group.modules[0]), _COMFY_TRANSFORMER_PREFIX), turned, KOHYA_SUFFIXES
            )
    elif file_format == "comfy" and not component.is_text_encoder and component.name != "unet":
        apart = {str(group.modules[0]) for group in _find_swapped_groups(updates, component)}
        for module, update in updates.items():
            if module not in apart:
                yield from _format_with_alpha(f"{component.name}.{module}", update, COMFY_SUFFIXES)
        yield from _format_kohya({module: updates[module] for module in updates if module in apart}, component)
    else:
        yield from _format_kohya(updates, component)


def _find_swapped_groups(updates: Mapping[str, ModuleUpdate], component: ComponentKeys) -> list[ModuleGroup]:
    """Modules whose halves stand in another order than in the original.

    ComfyUI forgets it when it reads diffusers' names of them.  So it gets them by the original name, or, in a file for
    diffusers, which passes over it, by one that it reads after diffusers' own.
    """
    groups = component.get_key_map().group_modules(updates) if component.get_key_map().layout else []
    return [
        group
        for group in groups
        if group.original.swaps_scale_shift and needs_scale_shift_swap(updates[str(group.modules[0])], group.original)
    ]


def _format_kohya(updates: Mapping[str, ModuleUpdate], component: ComponentKeys) -> Iterator[tuple[str, Tensor]]:
    for group in component.get_key_map().group_modules(updates):
        try:
            whole = fuse_updates(
                [None if module is None else updates[module] for module in group.modules], group.original
            )
        except FusionError as error:
            raise UserError(f"{component.name}.{group.name}: {error}; take save_format comfy") from None
        yield from _format_with_alpha(build_kohya_name(group.name, component.key_prefix), whole, KOHYA_SUFFIXES)


def _format_with_alpha(name: str, update: ModuleUpdate, suffixes: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    if update.adapter_type == "lokr" and update.rank == 1 and update.scale != 1:
        update = fold_alpha(update)  # loaders do not look at the alpha of two full matrices
    if update.adapter_type == "dora":
        scale = update.tensors[MAGNITUDE].reshape(-1, *[1] * (update.tensors[DOWN].dim() - 1))
        update = ModuleUpdate({**update.tensors, MAGNITUDE: scale}, update.alpha)
    yield from iter_named_tensors(name, update, suffixes)
    yield f"{name}.{ALPHA}", torch.tensor(float(update.alpha))


def convert_from_file_format(
    tensors: Tensors, metadata: Mapping[str, str], components: Sequence[ComponentKeys]
) -> AdapterFileContents:
    """What a file of any of these programs holds, for a model with these parts."""
    known = build_key_lookup(components)
    found, unknown = _group_by_module(tensors, known)
    for name in [name for name in found if name.startswith(f"{_COMFY_TRANSFORMER_PREFIX}_")]:
        part, group = known[name]
        if any(f"{part.name}.{module}" in found for module in group.modules):  # it is there for ComfyUI, once more
            del found[name]
    updates: dict[str, ModuleUpdate] = {}
    for name, whole in found.items():
        part, group = known[name]
        try:
            pieces = split_update(_build_update(name, whole), group.original)
        except FusionError as error:
            raise UserError(f"{name}: {error}") from None
        for module, piece in zip(group.modules, pieces, strict=True):
            if piece is None:
                continue
            if module is None:
                unknown.append(name)
            elif f"{part.name}.{module}" in updates:
                raise UserError(f"{name}: the file holds {part.name}.{module} twice")
            else:
                updates[f"{part.name}.{module}"] = piece
    if unknown:
        raise UserError(f"{len(unknown)} of {len(tensors)} keys are none of this model's, for example {unknown[0]}")
    updates = unfold_alphas(updates, metadata)
    state = {
        key: tensor
        for module, update in updates.items()
        for key, tensor in iter_named_tensors(module, update, PEFT_SUFFIXES)
    }
    written = {tensor.dtype for key, tensor in tensors.items() if key.endswith(f".{ALPHA}")}
    dtype = written.pop() if len(written) == 1 else read_alpha_dtype(metadata)
    return AdapterFileContents(
        state, {module: update.alpha for module, update in updates.items()}, detect_file_format(tensors), dtype
    )


def build_key_lookup(components: Iterable[ComponentKeys]) -> dict[str, tuple[ComponentKeys, ModuleGroup]]:
    """What files call the modules of these parts."""
    known: dict[str, tuple[ComponentKeys, ModuleGroup]] = {}
    for part in components:
        for name, group in part.iter_known_names():
            known.setdefault(name, (part, group))
    return known


def detect_file_format(keys: Iterable[str]) -> FileFormat:
    """Whose file has such keys."""
    modules = {named[0] for key in keys if (named := parse_tensor_key(upgrade_diffusers_key(key))) is not None}
    if not any("." in module for module in modules):
        return "kohya"
    return "comfy" if any(key.endswith(f".{ALPHA}") for key in keys) else "diffusers"


def upgrade_diffusers_key(key: str) -> str:
    """A key of older diffusers versions as newer ones write it."""
    if ".processor." in key or "_lora." in key:
        key = key.replace(".processor.", ".")
        ends = (
            {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
            if ".self_attn." in key
            else {"q": "to_q", "k": "to_k", "v": "to_v", "out": "to_out.0"}
        )
        return _LEGACY_ATTENTION_KEY.sub(lambda found: f".{ends[found[1]]}.lora.", key)
    return key


def _group_by_module(
    tensors: Tensors, key_lookup: Mapping[str, object]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """The tensors by what the file calls a module and what they are; and the keys that are of no module."""
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        place = parse_tensor_key(upgrade_diffusers_key(key))
        if place is None or place[0] not in key_lookup:
            unknown.append(key)
        else:
            found.setdefault(place[0], {})[place[1]] = tensor
    return found, unknown


def _build_update(name: str, module_tensors: Tensors) -> ModuleUpdate:
    """One module's tensors as they stand in a file."""
    tensors = {key: tensor for key, tensor in module_tensors.items() if key != ALPHA}
    update = ModuleUpdate(tensors, 0)
    if update.adapter_type in ("lora", "dora"):
        if not {DOWN, UP} <= tensors.keys():
            raise UserError(f"{name}: one of lora_down and lora_up is missing")
        if update.adapter_type == "dora":
            tensors[MAGNITUDE] = _reshape_magnitude(name, tensors)
    alpha = float(module_tensors[ALPHA]) if ALPHA in module_tensors else float(update.rank)
    if update.adapter_type == "lokr" and {"lokr_w1", "lokr_w2"} <= tensors.keys():
        alpha = 1.0  # no loader looks at it
    return ModuleUpdate(tensors, alpha)


def _reshape_magnitude(name: str, tensors: Tensors) -> Tensor:
    """As in a model: one number for each output, along the second dimension where it is a convolution."""
    scale, outputs = tensors[MAGNITUDE], len(tensors[UP])
    if scale.numel() != outputs or (scale.dim() == 2 and scale.shape[0] != outputs):
        raise UserError(f"{name}: its dora_scale belongs to inputs, and only one for each output can be used")
    return scale.reshape(1, -1, 1, 1) if tensors[DOWN].dim() == 4 else scale.flatten()
