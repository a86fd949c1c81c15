"""A part of a model that has a file or folder of its own: ``--vae``, ``--clip_l`` and the like; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .contents import Piece, pieces_in, refuse_others, said
from .header import read_header
from .reading import Json, Problem, Reader, from_folder, from_hub

_WIDTHS: Mapping[str, tuple[str, str]] = {
    "AutoencoderKL": ("vae", "latent_channels"),
    "AutoencoderKLQwenImage": ("vae", "z_dim"),
    "CLIPTextModel": ("clip", "hidden_size"),
    "CLIPTextModelWithProjection": ("clip", "hidden_size"),
    "T5EncoderModel": ("t5", "d_model"),
    "T5ForConditionalGeneration": ("t5", "d_model"),
    "Qwen3Model": ("qwen", "hidden_size"),
    "Qwen3ForCausalLM": ("qwen", "hidden_size"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen", "hidden_size"),
}
"""Class of a part -> what kind of piece it is, and where its config says its width."""


@dataclass(frozen=True)
class Separate:
    """Where one part is."""

    kind: Literal["file", "folder", "hub"]
    place: str
    subfolder: str = ""


def separate(place: str, part: str, read_model: Reader) -> Separate:
    """Look at the file, folder or hub id for ``part`` of a model; what cannot be that part is named."""
    path = Path(place).expanduser()
    index = read_model("model_index.json") or {}
    wanted = _piece(read_model(f"{part}/config.json"), (index.get(part) or ["", ""])[1])
    if path.is_file():
        header = read_header(path)
        refuse_others(header)
        found = pieces_in(header)
        _compare(found, wanted, part)
        return Separate("file", str(path))
    if not path.is_dir() and (place.count("/") != 1 or path.is_absolute() or place.endswith(".safetensors")):
        raise Problem(f"no such file or folder (looked in {path.absolute().parent})")
    kind: Literal["folder", "hub"] = "folder" if path.is_dir() else "hub"
    read = from_folder(path) if path.is_dir() else from_hub(place)
    for subfolder in ("", part):
        config = read(f"{subfolder}/config.json".removeprefix("/"))
        if config is not None:
            piece = _piece(config, config.get("_class_name") or (config.get("architectures") or [""])[0])
            _compare([piece] if piece else [], wanted, part)
            return Separate(kind, str(path) if path.is_dir() else place, subfolder)
    raise Problem(f"no config.json in it, and none in a folder {part} in it, so it is no {part} in diffusers' form")


def _compare(found: list[Piece], wanted: Piece | None, part: str) -> None:
    if not found:
        raise Problem(f"holds nothing that could be the {part}")
    if wanted is not None and wanted not in found:
        raise Problem(f"is a {' and a '.join(map(said, found))}, where the model has a {said(wanted)}")


def _piece(config: Json | None, name: str) -> Piece | None:
    """What a part is that has this config and is of the class ``name``; None when that is not known."""
    if config is None or name not in _WIDTHS:
        return None
    kind, key = _WIDTHS[name]
    width = config.get("text_config", {}).get(key, config.get(key))  # of models that see, too
    return Piece(kind, width) if isinstance(width, int) else None
