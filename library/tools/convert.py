"""``python -m library convert IN OUT --to FORMAT``: convert a LoRA file to another program's key names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..adapters import lora_file
from ..adapters.alpha_folding import ALPHA_METADATA_KEYS, is_fold_exact
from ..adapters.formats import (
    AdapterFileContents,
    convert_from_file_format,
    convert_to_file_format,
    upgrade_diffusers_key,
)
from ..adapters.key_names import ComponentKeys
from ..adapters.lora_file import InvalidAdapterFileError, read_safetensors
from ..adapters.metadata import add_model_hashes
from ..adapters.state_dict import DOWN, UP, group_by_module, parse_tensor_key
from ..checkpoint.component_keys import build_component_keys, list_adaptable_components
from ..errors import UserError
from ..models.base import Family
from ..models.detect import DetectedModel, detect_model
from ..models.families import FAMILIES, FAMILY_FACTS
from ..models.loading import load_components_on_meta
from ..models.model_configs import list_family_configs
from .preflight import check_convert_arguments

USAGE = "usage: python -m library convert IN.safetensors OUT.safetensors --to kohya|diffusers|comfy"
FORMAT_DESCRIPTIONS = {
    "kohya": "sd-scripts' keys; read by ComfyUI, Forge and diffusers for SD 1, SD 2 and SDXL",
    "diffusers": "diffusers' keys; alpha is multiplied into the weights, and stored in the metadata",
    "comfy": "keys that ComfyUI reads, with alpha: kohya for SD and SDXL, diffusers' for other models",
}


def run_convert(argv: Sequence[str]) -> tuple[str, int]:
    """Convert one file."""
    if not argv or set(argv) & {"--help", "-h"}:
        lines = [
            USAGE,
            "",
            *(f"  {name:<10} {what}" for name, what in FORMAT_DESCRIPTIONS.items()),
            "",
            "The model is detected from the keys. For which program reads which format, see docs/files.md.",
        ]
        return "\n".join(lines), 0
    return convert_lora_file(*_parse_arguments(list(argv))), 0


def _parse_arguments(argv: list[str]) -> tuple[Path, Path, str]:
    file_format = ""
    if "--to" in argv:
        at = argv.index("--to")
        file_format = "".join(argv[at + 1 : at + 2])
        del argv[at : at + 2]
    check_convert_arguments(argv, file_format, FORMAT_DESCRIPTIONS, USAGE)
    source, target = (Path(word).expanduser() for word in argv)
    return source, target, file_format


def convert_lora_file(source: Path, target: Path, file_format: Any) -> str:
    """Convert one file; return a summary."""
    lora = read_lora_file(source)
    content = lora.contents
    try:
        tensors, alpha_metadata = convert_to_file_format(
            content.state_dict, content.alphas, lora.components, file_format, content.alpha_dtype
        )
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    metadata = {key: value for key, value in lora.metadata.items() if key not in ALPHA_METADATA_KEYS} | alpha_metadata
    lora_file.write_adapter_file(target, tensors, add_model_hashes(tensors, metadata), is_trained=False)
    updates = group_by_module(content.state_dict, content.alphas)
    ranks = sorted({update.rank for update in updates.values()})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    size = "" if lora.is_known_size else " (of unknown size; detected from the keys)"
    lines = [
        f"{source.name}: {lora.family}{size}, {len(updates)} modules, rank {rank}, {content.file_format} format",
        f"{target}: {file_format} format, {len(tensors)} tensors",
    ]
    rounded = [name for name, update in updates.items() if file_format == "diffusers" and not is_fold_exact(update)]
    if rounded:
        lines.append(
            f"{len(rounded)} modules are rounded in the last bit, as alpha / rank is not a power of two; "
            "kohya and comfy are exact"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class IdentifiedLora:
    """A LoRA file and the model that it is for."""

    family: str
    contents: AdapterFileContents
    components: Sequence[ComponentKeys]
    metadata: Mapping[str, str]
    is_known_size: bool


def read_lora_file(path: Path) -> IdentifiedLora:
    """Read a LoRA file in any supported format, and detect its model."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (looked in {path.absolute().parent})")
    try:
        tensors, metadata = read_safetensors(path)
    except InvalidAdapterFileError as error:
        hint = "; only .safetensors files can be read" if path.suffix != ".safetensors" else ""
        raise UserError(f"{error}{hint}") from None
    try:
        return identify_lora(tensors, metadata)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def identify_lora(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> IdentifiedLora:
    """Find the model that has layers of these names and shapes, or else of these names."""
    adapter_keys = [key for key in tensors if parse_tensor_key(upgrade_diffusers_key(key)) is not None]
    if not adapter_keys:
        first = next(iter(tensors), None)
        raise UserError(
            f"not a LoRA file: none of its {len(tensors)} tensors has the name of a LoRA weight"
            + (f"; the first is {first}" if first else "")
        )
    same_names: IdentifiedLora | None = None
    architecture = metadata.get("modelspec.architecture", "")
    stated = next(
        (family for start, family in _MODELSPEC_ARCHITECTURES.items() if architecture.startswith(start)), None
    )
    for model in _iter_candidates():
        family = model.family
        models = load_meta_components(FAMILIES.get(family), model)
        parts = [build_component_keys(FAMILIES.get(family), name, model) for name, model in models.items()]
        try:
            content = convert_from_file_format(tensors, metadata, parts)
        except UserError:
            continue
        if _has_matching_shapes(content, models):
            return IdentifiedLora(family, content, parts, metadata, True)
        if same_names is None or (same_names.family != stated and family == stated):
            same_names = IdentifiedLora(family, content, parts, metadata, False)
    if same_names is None:
        raise UserError(f"LoRA of an unknown model; one of its {len(tensors)} keys is {adapter_keys[0]}")
    return same_names


def _iter_candidates() -> Iterator[DetectedModel]:
    """Yield published models and the built-in one before tiny ones."""
    every = [(family, config) for family in FAMILY_FACTS for config in list_family_configs(family)]
    published, tiny = (
        [_build_detected(family, config) for family, config in every if ("tiny" in config) == is_tiny]
        for is_tiny in (False, True)
    )
    yield from (*published, detect_model(None), *tiny)


def _build_detected(family: str, config: str) -> DetectedModel:
    return DetectedModel(family, "", 8, source_type="random", bundled_config=config)


_MODELSPEC_ARCHITECTURES = {
    "stable-diffusion-v1": "sd1",
    "stable-diffusion-v2": "sd2",
    "stable-diffusion-xl": "sdxl",
    "stable-diffusion-3": "sd3",
    "flux-1": "flux",
    "z-image": "z_image",
    "qwen-image": "qwen_image",
}
"""Prefixes of ``modelspec.architecture``; used only if no known model has these shapes."""


def _has_matching_shapes(contents: AdapterFileContents, models: Mapping[str, nn.Module]) -> bool:
    """Whether all LoRA matrices fit the layers; of other adapter types, only names are compared."""
    for name, update in group_by_module(contents.state_dict, contents.alphas).items():
        part, _, module = name.partition(".")
        weight = models[part].get_submodule(module).weight
        if not isinstance(weight, Tensor) or DOWN not in update.tensors:
            continue
        if update.tensors[DOWN].shape[1:] != weight.shape[1:] or len(update.tensors[UP]) != len(weight):
            return False
    return True


def load_meta_components(family: type[Family], detected: DetectedModel) -> dict[str, nn.Module]:
    """Load the modules that can have a LoRA on the meta device."""
    names = list_adaptable_components(family)
    pipe = load_components_on_meta(detected, names)
    return {name: getattr(pipe, name) for name in names}
