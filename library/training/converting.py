"""One LoRA file to another with other names; every bit can be found again."""

from pathlib import Path
from typing import Any

from ..adapters import file
from ..adapters.folding import ALPHA_METADATA_KEYS, is_fold_exact
from ..adapters.formats import convert_to_file_format
from ..adapters.metadata import add_model_hashes
from ..adapters.updates import group_updates
from ..errors import UserError
from .lora_files import read_lora_file


def convert_lora_file(source: Path, target: Path, file_format: Any) -> str:
    """Write ``target`` with the names of ``form``; returns what was done, in words."""
    found = read_lora_file(source)
    content = found.contents
    try:
        tensors, told = convert_to_file_format(content.state_dict, content.alphas, found.components, file_format, content.alpha_dtype)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    kept = {key: value for key, value in found.metadata.items() if key not in ALPHA_METADATA_KEYS}
    file.write_adapter_file(target, tensors, add_model_hashes(tensors, {**kept, **told}), is_trained=False)
    updates = group_updates(content.state_dict, content.alphas)
    ranks = sorted({update.rank for update in updates.values()})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    size = "" if found.is_known_size else " (of a size that is not known here; found by its names)"
    lines = [f"{source.name}: {found.family}{size}, {len(updates)} modules, rank {rank}, names of {content.file_format}",
             f"{target}: names of {file_format}, {len(tensors)} tensors"]  # fmt: skip
    rounded = [name for name, update in updates.items() if file_format == "diffusers" and not is_fold_exact(update)]
    if rounded:
        lines.append(f"{len(rounded)} modules are rounded in their last bit, since alpha / rank is no power of two; "
                     "kohya and comfy keep every bit")  # fmt: skip
    return "\n".join(lines)
