"""``python -m library convert IN OUT --to FORMAT``: convert a LoRA file to another program's key names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .preflight import check_convert_arguments

if TYPE_CHECKING:  # torch is imported only after the arguments were checked
    from torch import Tensor

    from ..adapters.formats import AdapterFileContents
    from ..adapters.key_names import ComponentKeys

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
    from ..adapters import lora_file
    from ..adapters.alpha_folding import ALPHA_METADATA_KEYS, is_fold_exact
    from ..adapters.client_support import format_client_losses, list_client_losses
    from ..adapters.formats import convert_to_file_format
    from ..adapters.metadata import add_model_hashes
    from ..adapters.peft_metadata import PEFT_METADATA_KEY

    lora = read_lora_file(source)
    content = lora.contents
    try:
        tensors, alpha_metadata = convert_to_file_format(
            content.state_dict, content.alphas, lora.components, file_format, content.alpha_dtype
        )
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    has_embeddings = bool(content.embeddings) and file_format != "diffusers"
    if has_embeddings:
        tensors |= content.embeddings
    # diffusers takes rank and alpha from peft's settings if there are any; here they are in the tensors.
    replaced = {*ALPHA_METADATA_KEYS, PEFT_METADATA_KEY}
    metadata = {key: value for key, value in lora.metadata.items() if key not in replaced} | alpha_metadata
    lora_file.write_adapter_file(target, tensors, add_model_hashes(tensors, metadata), is_trained=False)
    updates = content.updates
    ranks = sorted({update.rank for update in updates.values()})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    size = "" if lora.is_known_size else " (of unknown size; detected from the keys)"
    lines = [
        f"{source.name}: {lora.family}{size}, {len(updates)} modules, rank {rank}, {content.file_format} format",
        f"{target}: {file_format} format, {len(tensors)} tensors",
    ]
    if content.num_tucker:
        lines.append(f"{content.num_tucker} Tucker modules are written as LoRA of the same rank and effect")
    if content.embeddings:
        kept = "are kept" if has_embeddings else "are left out; diffusers' LoRA files have none"
        lines.append(f"{len(content.embeddings)} bundled embeddings of OneTrainer {kept}")
    rounded = [
        name
        for name, update in updates.items()
        if (file_format == "diffusers" or update.adapter_type in ("loha", "lokr")) and not is_fold_exact(update)
    ]
    if rounded:
        lines.append(f"{len(rounded)} modules are rounded in the last bit, as alpha / rank is not a power of two")
    if losses := list_client_losses(updates, lora.components, file_format):
        lines.append(f"not every program reads it right (docs/files.md): {format_client_losses(losses)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class IdentifiedLora:
    """A LoRA file and the model that it is for."""

    family: str
    contents: "AdapterFileContents"
    components: "Sequence[ComponentKeys]"
    metadata: Mapping[str, str]
    is_known_size: bool


def read_lora_file(path: Path) -> IdentifiedLora:
    """Read a LoRA file in any supported format, and detect its model."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (looked in {path.absolute().parent})")
    from ..adapters.file_reader import read_adapter_file

    tensors, metadata = read_adapter_file(path)
    try:
        lora = identify_lora(tensors, metadata)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if lora.contents.fused:
        name, fused = next(iter(lora.contents.fused.items()))
        raise UserError(f"{path}: {name}: {fused.reason}; --base_weights can merge it")
    return lora


def identify_lora(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> IdentifiedLora:
    """Find the model that has layers of these names and shapes, or else of these names."""
    from ..adapters.formats import convert_from_file_format, upgrade_diffusers_key
    from ..adapters.state_dict import parse_tensor_key
    from ..adapters.validate_file import (
        describe_origin,
        describe_size_problems,
        describe_unknown_keys,
        find_size_problems,
    )
    from ..checkpoint.known_models import iter_known_models

    adapter_keys = [key for key in tensors if parse_tensor_key(upgrade_diffusers_key(key)) is not None]
    if not adapter_keys:
        first = next(iter(tensors), "")
        kind = describe_unknown_keys(list(tensors), len(tensors))
        kind = f": it {kind}" if kind.startswith("contains") else ""
        raise UserError(
            f"not a LoRA file{kind or f': none of its {len(tensors)} tensors has the name of a LoRA weight'}"
            f"; the first is {first}"
        )
    same_names: IdentifiedLora | None = None
    stated, failure, misfit = _find_stated_family(metadata), "", ""
    for model in iter_known_models():
        try:
            content = convert_from_file_format(tensors, metadata, model.components)
        except UserError as error:
            if "keys do not belong to this model" not in str(error):
                failure = str(error)
            continue
        problems = list(find_size_problems(content.updates, model.shapes))
        if not problems:
            return IdentifiedLora(model.family, content, model.components, metadata, True)
        if len(problems) < len(content.alphas) / 2:  # of this model, except for a few layers
            misfit = misfit or describe_size_problems(problems, len(content.alphas), {})
        if same_names is None or (same_names.family != stated and model.family == stated):
            same_names = IdentifiedLora(model.family, content, model.components, metadata, False)
    if misfit or (failure and same_names is None):
        raise UserError(misfit or failure)
    if same_names is None:
        raise UserError(
            f"LoRA of an unknown model; one of its {len(tensors)} keys is {adapter_keys[0]}{describe_origin(metadata)}"
        )
    return same_names


def _find_stated_family(metadata: Mapping[str, str]) -> str | None:
    architecture = metadata.get("modelspec.architecture", "")
    return next((family for start, family in _MODELSPEC_ARCHITECTURES.items() if architecture.startswith(start)), None)


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
