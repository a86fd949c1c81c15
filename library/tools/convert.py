"""``python -m library convert IN OUT --to FORMAT``: a LoRA file with the names of another program, without loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..adapters import checkpoint_file
from ..adapters.alpha import ALPHA_METADATA_KEYS, is_fold_exact
from ..adapters.checkpoint_file import InvalidAdapterFileError, read_safetensors
from ..adapters.formats import (
    AdapterFileContents,
    convert_from_file_format,
    convert_to_file_format,
    upgrade_diffusers_key,
)
from ..adapters.key_names import ComponentKeys
from ..adapters.metadata import add_model_hashes
from ..adapters.state_dict import DOWN, UP, group_updates, parse_tensor_key
from ..checkpoint.component_keys import build_component_keys, list_adaptable_components
from ..errors import ConfigError, UserError
from ..models.base import Family
from ..models.detect import DetectedModel, detect_model
from ..models.families import FAMILIES, FAMILY_FACTS
from ..models.loading import load_components_on_meta
from ..models.model_configs import list_family_configs
from ..registry import suggest_name

USAGE = "usage: python -m library convert IN.safetensors OUT.safetensors --to kohya|diffusers|comfy"


FORMAT_DESCRIPTIONS = {
    "kohya": "as sd-scripts writes them; read by ComfyUI, Forge and diffusers for SD 1, SD 2 and SDXL",
    "diffusers": "as diffusers writes them; alpha is multiplied into the weights, and told in the metadata",
    "comfy": "as ComfyUI reads them, with alpha: like kohya for SD and SDXL, diffusers' names for the others",
}


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Convert one file."""
    if not argv or set(argv) & {"--help", "-h"}:
        lines = [
            USAGE,
            "",
            *(f"  {name:<10} {what}" for name, what in FORMAT_DESCRIPTIONS.items()),
            "",
            "Which model the LoRA is for is found from its names. docs/files.md says who reads what.",
        ]
        return "\n".join(lines), 0
    source, target, form = _parse_arguments(list(argv))
    pass

    return convert_lora_file(source, target, form), 0


def _parse_arguments(argv: list[str]) -> tuple[Path, Path, str]:
    problems, form = [], ""
    if "--to" in argv:
        at = argv.index("--to")
        form = "".join(argv[at + 1 : at + 2])
        del argv[at : at + 2]
    if form not in FORMAT_DESCRIPTIONS:
        what = f"--to: no format {form!r}{suggest_name(form, FORMAT_DESCRIPTIONS)}" if form else "--to: missing"
        problems.append(f"{what}; there are: {', '.join(FORMAT_DESCRIPTIONS)}")
    problems += [f"{word}: no such option" for word in argv if word.startswith("--")]
    paths = [Path(word).expanduser() for word in argv if not word.startswith("--")]
    if len(paths) != 2:
        problems.append(f"expected two files, and found {len(paths)}; {USAGE}")
    elif paths[1].exists():
        problems.append(f"{paths[1]}: is there already; it is not overwritten")
    elif paths[1].suffix != ".safetensors":
        problems.append(f"{paths[1]}: LoRA files end in .safetensors")
    if problems:
        raise ConfigError(problems)
    return paths[0], paths[1], form


def convert_lora_file(source: Path, target: Path, file_format: Any) -> str:
    """Write ``target`` with the names of ``form``; returns what was done, in words."""
    found = read_lora_file(source)
    content = found.contents
    try:
        tensors, told = convert_to_file_format(
            content.state_dict, content.alphas, found.components, file_format, content.alpha_dtype
        )
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    kept = {key: value for key, value in found.metadata.items() if key not in ALPHA_METADATA_KEYS}
    checkpoint_file.write_adapter_file(target, tensors, add_model_hashes(tensors, {**kept, **told}), is_trained=False)
    updates = group_updates(content.state_dict, content.alphas)
    ranks = sorted({update.rank for update in updates.values()})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    size = "" if found.is_known_size else " (of a size that is not known here; found by its names)"
    lines = [
        f"{source.name}: {found.family}{size}, {len(updates)} modules, rank {rank}, names of {content.file_format}",
        f"{target}: names of {file_format}, {len(tensors)} tensors",
    ]
    rounded = [name for name, update in updates.items() if file_format == "diffusers" and not is_fold_exact(update)]
    if rounded:
        lines.append(
            f"{len(rounded)} modules are rounded in their last bit, since alpha / rank is no power of two; "
            "kohya and comfy keep every bit"
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
    """Read a LoRA file of any program that is known here."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (looked in {path.absolute().parent})")
    try:
        tensors, metadata = read_safetensors(path)
    except InvalidAdapterFileError as error:
        hint = "; only .safetensors files are read" if path.suffix != ".safetensors" else ""
        raise UserError(f"{error}{hint}") from None
    try:
        return identify_lora(tensors, metadata)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def identify_lora(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> IdentifiedLora:
    """The model whose names and shapes these are; where only the names are, the model is of another size."""
    own = [key for key in tensors if parse_tensor_key(upgrade_diffusers_key(key)) is not None]
    if not own:
        first = next(iter(tensors), None)
        raise UserError(
            f"is no LoRA file: it holds {len(tensors)} tensors, and no name is that of an adapter's"
            + (f"; the first is {first}" if first else "")
        )
    named: IdentifiedLora | None = None
    said = next(
        (
            family
            for start, family in _MODELSPEC_ARCHITECTURES.items()
            if metadata.get("modelspec.architecture", "").startswith(start)
        ),
        None,
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
        if named is None or (named.family != said and family == said):
            named = IdentifiedLora(family, content, parts, metadata, False)
    if named is None:
        raise UserError(f"is a LoRA file of a model that is not known here; among its {len(tensors)} keys is {own[0]}")
    return named


def _iter_candidates() -> Iterator[DetectedModel]:
    """Published sizes and the built-in model before tiny ones."""
    every = [(family, config) for family in FAMILY_FACTS for config in list_family_configs(family)]
    published, tiny = (
        [_build_detected(*one) for one in every if ("tiny" in one[1]) == is_tiny] for is_tiny in (False, True)
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
"""What the metadata may say; only asked where no size is known."""


def _has_matching_shapes(contents: AdapterFileContents, models: Mapping[str, nn.Module]) -> bool:
    """Whether all LoRA matrices have the sizes of the layers; other kinds are told by their names."""
    for name, update in group_updates(contents.state_dict, contents.alphas).items():
        part, _, module = name.partition(".")
        weight = models[part].get_submodule(module).weight
        if not isinstance(weight, Tensor) or DOWN not in update.tensors:
            continue
        if update.tensors[DOWN].shape[1:] != weight.shape[1:] or len(update.tensors[UP]) != len(weight):
            return False
    return True


def load_meta_components(family: type[Family], detected: DetectedModel) -> dict[str, nn.Module]:
    """The same parts of a model that is not loaded, without weights."""
    names = list_adaptable_components(family)
    pipe = load_components_on_meta(detected, names)
    return {name: getattr(pipe, name) for name in names}
