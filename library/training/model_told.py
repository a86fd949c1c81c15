"""What a LoRA file says of the files of the model that it was trained on: names without paths, and hashes."""

import hashlib
from pathlib import Path, PureWindowsPath

from ..config.schema import ModelConfig
from ..data.cache.file_hashes import compute_sha256


def build_model_metadata(model: ModelConfig) -> dict[str, str]:
    """sd-scripts' keys; hashes of single files only, since a folder has none that anybody would look for."""
    told = {"ss_sd_model_name": format_model_name(model.pretrained_model_name_or_path)}
    vae = model.vae or model.ae
    if vae is not None:
        told["ss_vae_name"] = format_model_name(vae)
    for place, old, new in ((model.pretrained_model_name_or_path, "ss_sd_model_hash", "ss_new_sd_model_hash"),
                            (vae, "ss_vae_hash", "ss_new_vae_hash")):  # fmt: skip
        path = Path(place).expanduser() if place is not None else None
        if path is not None and path.is_file():
            told |= {old: _compute_legacy_hash(path), new: compute_sha256(path)}
    return told


def format_model_name(source: str | None) -> str:
    """Of a path the last part; a hub id as it is."""
    if source is None:
        return "built-in"
    if PureWindowsPath(source).is_absolute():
        return PureWindowsPath(source).name
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or path.exists() else source


def _compute_legacy_hash(path: Path) -> str:
    """What web UIs once told models apart by: 64 KiB after the first MiB."""
    with path.open("rb") as file:
        file.seek(0x100000)
        return hashlib.sha256(file.read(0x10000)).hexdigest()[:8]
