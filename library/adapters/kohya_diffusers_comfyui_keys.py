"""Convert a state dict to the LoRA file formats of sd-scripts (kohya), diffusers and ComfyUI, and back.

The keys of a state dict are ``<component>.<module>.lora_A.weight``; the names that programs have for the modules are in
``original_module_names`` and in the files of the families.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..config.network_args import LORA_TYPES
from ..config.validate_adapter import validate_save_format
from ..errors import UserError
from .alpha_folding import build_alpha_metadata, fold_alpha, read_alpha_dtype, unfold_alphas
from .component_key_names import ComponentKeys, build_kohya_name, find_wrapper_names
from .fused_qkv import FusionError, fuse_adapters, split_adapter, swap_magnitude
from .merge import compose_tucker_down
from .module_adapter import (
    ALPHA,
    BIAS,
    COMFY_SUFFIXES,
    DIFFUSERS_SUFFIXES,
    DORA_SCALE,
    DOWN,
    INPUT_MAGNITUDE,
    KOHYA_SUFFIXES,
    MAGNITUDE,
    MID,
    PEFT_SUFFIXES,
    ModuleAdapter,
    group_by_module,
    iter_named_tensors,
    parse_tensor,
    parse_tensor_key,
)
from .original_module_names import T5_KEYS, ModuleGroup
from .peft_metadata import apply_peft_alphas
from .validate_file import (
    describe_origin,
    describe_size_problems,
    describe_unknown_keys,
    find_size_problems,
    join_messages,
)
from .validate_tensors import find_tensor_problems

FileFormat = Literal["kohya", "diffusers", "comfy"]
Tensors = Mapping[str, Tensor]
EMBEDDING_PREFIX = "bundle_emb."
"""Prefix of the embeddings that OneTrainer adds to a LoRA file."""
TYPES_WITHOUT_ALPHA = ("norm", "full")


@dataclass(frozen=True)
class FusedAdapter:
    """The update of a fused module that cannot be split into its parts; it can be merged."""

    update: ModuleAdapter
    component: str
    group: ModuleGroup
    reason: str

    @property
    def way_out(self) -> str:
        """What the user can do with an adapter that this file format cannot hold."""
        if INPUT_MAGNITUDE in self.update.tensors:  # depends on the weights of all parts
            return "--base_weights of a run can merge it"
        return "lora resize writes it as LoRA, lora merge --model merges it into a model"


@dataclass(frozen=True)
class AdapterFileContents:
    """The contents of a LoRA file."""

    state_dict: dict[str, Tensor]
    alphas: dict[str, float]
    """The alpha of each module of the state dict; names begin with the component."""
    file_format: FileFormat
    alpha_dtype: torch.dtype = torch.float32
    """Dtype of the alphas in the file."""
    fused: Mapping[str, FusedAdapter] = field(default_factory=dict)
    """Adapters of fused layers, by their name in the file."""
    embeddings: Mapping[str, Tensor] = field(default_factory=dict)
    """Bundled embeddings of OneTrainer, by key."""
    num_tucker: int = 0
    """Tucker LoRA modules, whose core was multiplied into ``lora_A``."""

    @property
    def updates(self) -> dict[str, ModuleAdapter]:
        return group_by_module(self.state_dict, self.alphas)


def convert_to_file_format(
    state_dict: Tensors,
    alphas: Mapping[str, float],
    components: Sequence[ComponentKeys],
    file_format: FileFormat,
    alpha_dtype: torch.dtype = torch.float32,
    equal_alphas: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, contiguous and on the CPU, and the metadata that is needed to read them back.

    Files of sd-scripts and ComfyUI contain alphas; in diffusers files they are folded into the adapter.
    ``equal_alphas`` writes one alpha for all modules, by folding the rest.
    """
    if wrapped := find_wrapper_names(state_dict):
        raise ValueError(f"{len(wrapped)} keys contain names of wrappers, for example {wrapped[0]}")
    adapters = group_by_module({key: tensor.detach().cpu() for key, tensor in state_dict.items()}, alphas)
    types = {adapter.adapter_type for adapter in adapters.values()}
    has_biases = any(BIAS in adapter.tensors for adapter in adapters.values())
    if problems := validate_save_format({*types, BIAS} if has_biases else types, file_format):
        raise UserError("; ".join(map(str, problems)))
    prefixes = tuple(f"{component.name}." for component in components)
    if unknown := [module for module in adapters if not module.startswith(prefixes)]:
        raise ValueError(f"{unknown[0]} is in no component of the pipeline")
    if file_format == "comfy":
        file_format = resolve_comfy_format(file_format, types, components)
        components = [part.use_comfyui_names() if file_format == "kohya" else part for part in components]
    alpha = max((adapter.alpha for adapter in adapters.values()), default=1.0) if equal_alphas else None
    encoders = tuple(f"{component.name}." for component in components if component.is_text_encoder)
    written = {
        module: _set_file_alpha(adapter, file_format, alpha, module.startswith(encoders))
        for module, adapter in adapters.items()
    }
    tensors: dict[str, Tensor] = {}
    for component, prefix in zip(components, prefixes, strict=True):
        own = {module.removeprefix(prefix): adapter for module, adapter in written.items() if module.startswith(prefix)}
        for name, tensor in _FORMATTERS[file_format](own, component):
            if name in tensors:
                raise ValueError(f"duplicate key {name} in the file")
            tensors[name] = _cast_alpha(tensor, alpha_dtype) if name.endswith(f".{ALPHA}") else tensor.contiguous()
    # Modules may share lora_A in memory, but safetensors rejects shared tensors.
    pointers: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in pointers:
            tensors[name] = tensor.clone()
        pointers.add(tensor.data_ptr())
    return tensors, build_alpha_metadata(adapters, written, file_format != "diffusers", alpha_dtype)


def resolve_comfy_format(
    file_format: FileFormat, types: Collection[str], components: Sequence[ComponentKeys]
) -> FileFormat:
    """The layout that ``comfy`` stands for: kohya where ComfyUI knows the layers by their original names only."""
    has_original_names = any(
        part.name == "unet" or (part.key_style.is_kohya_in_comfyui and {"lora", "dora", "input-dora"}.issuperset(types))
        for part in components
    )
    return "kohya" if file_format == "comfy" and has_original_names else file_format


def writes_fused_layers(
    file_format: FileFormat, adapters: Mapping[str, ModuleAdapter], components: Sequence[ComponentKeys]
) -> bool:
    """Whether files have the layers of the original model, into which several of diffusers' are fused."""
    types = {adapter.adapter_type for adapter in adapters.values()}
    return resolve_comfy_format(file_format, types, components) == "kohya"


def _cast_alpha(alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the type of the alphas in the file, unless that changes the value, as for fused and split layers."""
    cast = alpha.to(dtype)
    return cast if torch.equal(cast.double(), alpha.double()) else alpha.float()


def _set_file_alpha(
    adapter: ModuleAdapter, file_format: FileFormat, alpha: float | None, is_text_encoder: bool
) -> ModuleAdapter:
    """The adapter with the alpha that it has in the file.

    LoHa and LoKr get alpha = rank in every format: LyCORIS 4.1.3 applies alpha / rank twice when it merges them, and
    diffusers 0.42.1 reads no alpha of LoKr.
    """
    without_alpha = file_format == "diffusers" or (file_format == "comfy" and is_text_encoder)
    if without_alpha or adapter.adapter_type in ("loha", "lokr"):
        return fold_alpha(adapter)
    return adapter if alpha is None else fold_alpha(adapter, alpha)


def _format_kohya(adapters: Mapping[str, ModuleAdapter], component: ComponentKeys) -> Iterator[tuple[str, Tensor]]:
    for group in component.get_key_map().group_modules(adapters):
        parts = [None if module is None else adapters[module] for module in group.modules]
        try:
            fused = fuse_adapters(parts, group.original)
        except FusionError as error:
            types = {part.adapter_type for part in parts if part is not None}
            is_other = resolve_comfy_format("comfy", types, [component]) == "comfy"
            other = "comfy" if is_other else "diffusers"
            raise UserError(f"{component.name}.{group.name}: {error}; use {other}") from None
        name = build_kohya_name(group.name, component.key_prefix)
        yield from iter_named_tensors(name, _reshape_dora_scale(fused), KOHYA_SUFFIXES)
        if fused.adapter_type not in TYPES_WITHOUT_ALPHA:
            yield f"{name}.{ALPHA}", torch.tensor(float(fused.alpha))


def _format_diffusers(adapters: Mapping[str, ModuleAdapter], component: ComponentKeys) -> Iterator[tuple[str, Tensor]]:
    """Transformers have each DoRA magnitude twice: diffusers skips ``dora_scale``, and ComfyUI reads nothing else."""
    suffixes = PEFT_SUFFIXES if component.is_text_encoder else DIFFUSERS_SUFFIXES
    for group, adapter in _iter_modules(adapters, component):
        name = _build_diffusers_name(group, component)
        if component.key_style.has_original_names_in_diffusers and adapter.adapter_type in LORA_TYPES:
            name = f"diffusion_model.{group.name}"
        yield from iter_named_tensors(name, adapter, suffixes)
        if adapter.adapter_type == "dora" and component.name != "unet":
            scale = _reshape_dora_scale(swap_magnitude(adapter, group.original)).tensors[MAGNITUDE]
            yield f"{name}.{DORA_SCALE}", scale


def _format_comfy(adapters: Mapping[str, ModuleAdapter], component: ComponentKeys) -> Iterator[tuple[str, Tensor]]:
    """Diffusers' names, as ComfyUI reads them; alphas only where no program stumbles over them."""
    for group, adapter in _iter_modules(adapters, component):
        name, is_lycoris = _build_diffusers_name(group, component), DOWN not in adapter.tensors
        if component.is_text_encoder and is_lycoris:
            name = build_kohya_name(group.name, component.key_prefix)
        elif component.key_style.has_names_of_comfy and not component.is_text_encoder:
            name = f"diffusion_model.{group.name}"  # where diffusers applies alphas
        written = _reshape_dora_scale(swap_magnitude(adapter, group.original))
        yield from iter_named_tensors(name, written, COMFY_SUFFIXES)
        has_alpha = component.is_text_encoder == is_lycoris or adapter.adapter_type in ("glora", "diag-oft")
        if has_alpha and adapter.adapter_type not in TYPES_WITHOUT_ALPHA:
            yield f"{name}.{ALPHA}", torch.tensor(float(adapter.alpha))


def _iter_modules(
    adapters: Mapping[str, ModuleAdapter], component: ComponentKeys
) -> Iterator[tuple[ModuleGroup, ModuleAdapter]]:
    """Each module alone, with its name in files and the original module that it is, or is a part of."""
    key_map = component.get_key_map()
    for module, adapter in adapters.items():
        (group,) = key_map.group_modules([module])
        if key_map.layout:
            group = ModuleGroup(module, (module,), group.original)
        yield group, adapter


def _build_diffusers_name(group: ModuleGroup, component: ComponentKeys) -> str:
    """The name of a module in diffusers' files, which have none for T5: there it is the one that ComfyUI reads."""
    if component.key_style == T5_KEYS:
        return build_kohya_name(group.name, component.key_prefix)
    return f"{component.name}.{group.name if component.is_text_encoder else group.modules[0]}"


def _reshape_dora_scale(adapter: ModuleAdapter) -> ModuleAdapter:
    """The magnitudes of a DoRA as one column, or those for each input as one row."""
    dims = adapter.tensors[DOWN].dim() if DOWN in adapter.tensors else 2
    shapes = {MAGNITUDE: (-1, *[1] * (dims - 1)), INPUT_MAGNITUDE: (1, -1, *[1] * (dims - 2))}
    scales = {name: adapter.tensors[name].reshape(shape) for name, shape in shapes.items() if name in adapter.tensors}
    return ModuleAdapter({**adapter.tensors, **scales}, adapter.alpha) if scales else adapter


_FORMATTERS: Mapping[
    FileFormat, Callable[[Mapping[str, ModuleAdapter], ComponentKeys], Iterator[tuple[str, Tensor]]]
] = {
    "kohya": _format_kohya,
    "diffusers": _format_diffusers,
    "comfy": _format_comfy,
}


def convert_from_file_format(
    tensors: Tensors,
    metadata: Mapping[str, str],
    components: Sequence[ComponentKeys],
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> AdapterFileContents:
    """Read the tensors of a file in any of the formats, for a model with these components, of these sizes if given."""
    lookup = build_key_lookup(components)
    modules, unknown, problems = group_by_file_module(tensors, lookup)
    if unknown:
        raise UserError(describe_unknown_keys(unknown, len(tensors)) + describe_origin(metadata))
    problems += [f"{name}: {each}" for name, own in modules.items() for each in find_tensor_problems(own)]
    if problems:
        raise UserError(join_messages(problems))
    if misfits := list(find_size_problems(modules, lookup, shapes)) if shapes is not None else []:
        raise UserError(describe_size_problems(misfits, len(modules), metadata))
    updates, fused, with_alpha = _build_adapters(modules, lookup, tensors)
    denoiser = next((part.name for part in components if not part.is_text_encoder), "")
    updates = apply_peft_alphas(updates, with_alpha, metadata, [part.name for part in components], denoiser)
    adapters = unfold_alphas(updates, metadata)
    state_dict = {
        key: tensor
        for module, adapter in adapters.items()
        for key, tensor in iter_named_tensors(module, adapter, PEFT_SUFFIXES)
    }
    alphas = {module: adapter.alpha for module, adapter in adapters.items()}
    dtypes = {tensor.dtype for key, tensor in tensors.items() if key.endswith(f".{ALPHA}")}
    alpha_dtype = dtypes.pop() if len(dtypes) == 1 else read_alpha_dtype(metadata)
    num_tucker = sum(MID in module_tensors for module_tensors in modules.values())
    embeddings = {key: tensor for key, tensor in tensors.items() if key.startswith(EMBEDDING_PREFIX)}
    file_format = detect_file_format(key for key in tensors if key not in embeddings)
    if file_format == "kohya" and any(part.has_comfyui_names(modules) for part in components):
        file_format = "comfy"
    return AdapterFileContents(
        state_dict=state_dict,
        alphas=alphas,
        file_format=file_format,
        alpha_dtype=alpha_dtype,
        fused=fused,
        embeddings=embeddings,
        num_tucker=num_tucker,
    )


def _build_adapters(
    modules: Mapping[str, Tensors], lookup: Mapping[str, tuple[ComponentKeys, ModuleGroup]], tensors: Tensors
) -> tuple[dict[str, ModuleAdapter], dict[str, FusedAdapter], set[str]]:
    """Split fused modules; return the updates, those that cannot be split, and the names of modules with alpha."""
    updates: dict[str, ModuleAdapter] = {}
    fused: dict[str, FusedAdapter] = {}
    with_alpha: set[str] = set()
    names: dict[str, str] = {}
    problems: list[str] = []
    for name, module_tensors in modules.items():
        component, group = lookup[name]
        update = _build_module_adapter(module_tensors)
        vector, is_own_name = f"{name}.lora_magnitude_vector", group.modules == (group.name,)
        if f"{name}.{DORA_SCALE}" in tensors and (vector in tensors or is_own_name) and not component.is_text_encoder:
            update = _restore_magnitude(update, group.name, vector, tensors, component)
        try:
            parts = split_adapter(update, group.original)
        except FusionError as error:
            fused[name] = FusedAdapter(update, component.name, group, str(error))
            continue
        for module, part in zip(group.modules, parts, strict=True):
            if part is None:
                continue
            path = f"{component.name}.{module}"
            if module is None:
                problems.append(f"{name}: this model has only some of its parts")
            elif path in updates:
                problems.append(f"{names[path]} and {name} are the same layer, {path}; remove one of them")
            else:
                updates[path], names[path] = part, name
                with_alpha |= {path} if ALPHA in module_tensors else set()
    if problems:
        raise UserError(join_messages(problems))
    return updates, fused, with_alpha


def _restore_magnitude(
    adapter: ModuleAdapter, module: str, vector: str, tensors: Tensors, component: ComponentKeys
) -> ModuleAdapter:
    """Take a DoRA magnitude under a diffusers name from diffusers' tensor, or from ComfyUI's, in its order."""
    if vector in tensors:
        return ModuleAdapter({**adapter.tensors, MAGNITUDE: tensors[vector].flatten()}, adapter.alpha)
    ((group, _),) = _iter_modules({module: adapter}, component)
    return swap_magnitude(adapter, group.original)


def build_key_lookup(components: Iterable[ComponentKeys]) -> dict[str, tuple[ComponentKeys, ModuleGroup]]:
    """Map every name that a module may have in a file to its component and the modules that the name stands for."""
    lookup: dict[str, tuple[ComponentKeys, ModuleGroup]] = {}
    for component in components:
        for name, group in component.iter_known_names():
            lookup.setdefault(name, (component, group))
    return lookup


def detect_file_format(keys: Iterable[str]) -> FileFormat:
    """The format of a file with these keys."""
    names = [parsed for key in keys if (parsed := parse_tensor_key(key)) is not None]
    if not any("." in module for module, _ in names):
        return "kohya"
    is_comfy = any(name == ALPHA or name.startswith(("hada_", "lokr_")) for _, name in names)
    return "comfy" if is_comfy else "diffusers"


def group_by_file_module(
    tensors: Tensors, lookup: Mapping[str, tuple[ComponentKeys, ModuleGroup]]
) -> tuple[dict[str, dict[str, Tensor]], list[str], list[str]]:
    """Group the tensors by their module's name in the file; also return unknown keys, and keys that contradict."""
    modules: dict[str, dict[str, Tensor]] = {}
    sources: dict[tuple[str, str], str] = {}
    unknown, problems = [], []
    for key, tensor in tensors.items():
        parsed = parse_tensor(key, tensor)
        if key.startswith(EMBEDDING_PREFIX):
            continue
        if parsed is None or parsed[0] not in lookup:
            unknown.append(key)
            continue
        own = modules.setdefault(parsed[0], {})
        if parsed[1] in own and not _has_equal_values(own[parsed[1]], tensor, parsed[1]):
            problems.append(f"{sources[parsed]} and {key} are one tensor with two values; remove one of them")
        own[parsed[1]], sources[parsed] = tensor, key
    for name in [name for name in modules if name.startswith("lora_transformer_")]:
        component, group = lookup[name]
        if any(f"{component.name}.{module}" in modules for module in group.modules):
            del modules[name]  # version 0.1 repeated a module of SD3 under this name
    return modules, unknown, problems


def _has_equal_values(one: Tensor, other: Tensor, name: str) -> bool:
    """Whether two tensors of one name are equal; the magnitudes of one layer may be in the orders of two programs."""
    if name == MAGNITUDE:
        one, other = one.flatten().sort().values, other.flatten().sort().values
    return one.shape == other.shape and torch.equal(one.double(), other.double())


def _build_module_adapter(module_tensors: Tensors) -> ModuleAdapter:
    tensors = {key: tensor for key, tensor in module_tensors.items() if key not in (ALPHA, MID)}
    if MID in module_tensors:
        tensors[DOWN] = compose_tucker_down(tensors[DOWN], module_tensors[MID])
    update = ModuleAdapter(tensors, 0)
    if MAGNITUDE in tensors:  # in peft's shape, which for convolutions is (1, outputs, 1, 1)
        tensors[MAGNITUDE] = tensors[MAGNITUDE].reshape((1, -1, 1, 1) if len(update.kernel) == 2 else (-1,))
    if INPUT_MAGNITUDE in tensors:
        tensors[INPUT_MAGNITUDE] = tensors[INPUT_MAGNITUDE].flatten()
    if update.adapter_type == "diag-oft":
        alpha = 0.0  # no constraint
    else:
        alpha = float(update.rank)
    if ALPHA in module_tensors:
        alpha = float(module_tensors[ALPHA])
    if update.adapter_type == "lokr" and {"lokr_w1", "lokr_w2"} <= tensors.keys():
        alpha = 1.0  # ignored by loaders
    return ModuleAdapter(tensors, alpha)
