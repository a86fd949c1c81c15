"""One LoRA file to another with other names; every bit can be found again."""

from pathlib import Path
from typing import Any

from ..adapters import file
from ..adapters.folding import ALL_TOLD, is_exact
from ..adapters.formats import to_file
from ..adapters.metadata import with_hashes
from ..adapters.updates import updates_of
from ..errors import UserError
from .lora_files import read_lora


def convert(source: Path, target: Path, form: Any) -> str:
    """Write ``target`` with the names of ``form``; returns what was done, in words."""
    found = read_lora(source)
    content = found.content
    try:
        tensors, told = to_file(content.state, content.alphas, found.parts, form, content.alpha_dtype)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    kept = {key: value for key, value in found.metadata.items() if key not in ALL_TOLD}
    file.write(target, tensors, with_hashes(tensors, {**kept, **told}), trained=False)
    updates = updates_of(content.state, content.alphas)
    ranks = sorted({update.rank for update in updates.values()})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    size = "" if found.is_of_known_size else " (of a size that is not known here; found by its names)"
    lines = [f"{source.name}: {found.family}{size}, {len(updates)} modules, rank {rank}, names of {content.format}",
             f"{target}: names of {form}, {len(tensors)} tensors"]  # fmt: skip
    rounded = [name for name, update in updates.items() if form == "diffusers" and not is_exact(update)]
    if rounded:
        lines.append(f"{len(rounded)} modules are rounded in their last bit, since alpha / rank is no power of two; "
                     "kohya and comfy keep every bit")  # fmt: skip
    return "\n".join(lines)
