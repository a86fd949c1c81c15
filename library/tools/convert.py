"""``python -m library convert IN OUT --to FORMAT``: convert a LoRA file to another program's key names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..problems import report_file
from .validate_arguments import check_convert_arguments

if TYPE_CHECKING:  # torch is imported only after the arguments were checked
    from .lora.identification import IdentifiedLora

USAGE = "usage: python -m library convert IN.safetensors OUT.safetensors --to kohya|diffusers|comfy [--family NAME]"
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
            "The model is detected from metadata, keys and sizes; --family names it where these fit several.",
            "For which program reads which format, see docs/files.md.",
        ]
        return "\n".join(lines), 0
    return convert_lora_file(*_parse_arguments(list(argv))), 0


def _parse_arguments(argv: list[str]) -> tuple[Path, Path, str, str | None]:
    file_format, family = _take_value(argv, "--to"), _take_value(argv, "--family")
    check_convert_arguments(argv, file_format or "", FORMAT_DESCRIPTIONS, USAGE)
    source, target = (Path(word).expanduser() for word in argv)
    return source, target, file_format or "", family


def _take_value(argv: list[str], name: str) -> str | None:
    """Remove an option and its value from the arguments; return the value, which is empty if it is missing."""
    if name not in argv:
        return None
    at = argv.index(name)
    value = "".join(argv[at + 1 : at + 2])
    del argv[at : at + 2]
    return value


def convert_lora_file(source: Path, target: Path, file_format: Any, family: str | None = None) -> str:
    """Convert one file; return a summary."""
    from ..adapters import file_writer
    from ..adapters.alpha_folding import ALPHA_METADATA_KEYS
    from ..adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
    from ..adapters.metadata import add_model_hashes, list_network_sizes, update_network_metadata
    from ..adapters.peft_metadata import PEFT_METADATA_KEY
    from ..models.known_models import load_known_models
    from .lora.identification import read_lora_file, select_models

    lora = read_lora_file(source, models=select_models(load_known_models(), family))
    content = lora.contents
    try:
        tensors, alpha_metadata = convert_to_file_format(
            content.state_dict, content.alphas, lora.components, file_format, content.alpha_dtype
        )
    except UserError as error:
        raise UserError(report_file(source, str(error))) from None
    if content.embeddings and file_format != "diffusers":
        tensors |= content.embeddings
    # diffusers takes rank and alpha from peft's settings if there are any; here they are in the tensors.
    replaced = {*ALPHA_METADATA_KEYS, PEFT_METADATA_KEY}
    metadata = {key: value for key, value in lora.metadata.items() if key not in replaced} | alpha_metadata
    metadata = update_network_metadata(metadata, lora.sizes, list_network_sizes(tensors))
    lines = _describe_conversion(source, lora, target, file_format, len(tensors))
    components, shapes = lora.components, lora.shapes if lora.is_known_size else None
    layers = file_writer.list_changing_layers(content.updates)
    del lora, content  # reading the new file back needs memory, too

    def check(part: Path) -> None:
        file_writer.verify_layers(part, layers, components, shapes)

    file_writer.write_adapter_file(target, tensors, add_model_hashes(tensors, metadata), is_trained=False, check=check)
    return "\n".join(lines)


def _describe_conversion(
    source: Path, lora: "IdentifiedLora", target: Path, file_format: Any, num_tensors: int
) -> list[str]:
    """The summary: what was read and what was written, and what is not the same in the new format."""
    from ..adapters.alpha_folding import is_fold_exact
    from ..adapters.client_compatibility import format_client_losses, list_client_losses

    content, updates = lora.contents, lora.contents.updates
    ranks = sorted({update.rank for update in updates.values()})
    count = f"{len(updates)} module" + "s" * (len(updates) != 1)
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    size = "" if lora.is_known_size else " (of unknown size; detected from the keys)"
    lines = [
        f"{source.name}: {lora.family}{size}, {count}, rank {rank}, {content.file_format} format, {lora.num_tensors}"
        " tensors",
        f"{target}: {file_format} format, {num_tensors} tensors",
    ]
    if content.num_tucker:
        lines.append(f"{content.num_tucker} Tucker modules are written as LoRA of the same rank and effect")
    if content.embeddings:
        kept = "are kept" if file_format != "diffusers" else "are left out; diffusers' LoRA files have none"
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
    return lines
