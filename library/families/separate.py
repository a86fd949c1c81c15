"""A part of a model that has a file or folder of its own: ``--vae``, ``--clip_l`` and the like; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .contents import ComponentSignature, find_component_signatures, reject_unsupported_file, describe_signature
from .header import read_safetensors_header
from .reading import JsonDict, ModelError, ConfigReader, build_folder_reader, build_hub_reader

_SIGNATURE_BY_CLASS: Mapping[str, tuple[str, str]] = {
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
class ComponentSource:
    """Where one part is."""

    source_type: Literal["file", "folder", "hub"]
    path_or_id: str
    subfolder: str = ""


def resolve_component_source(path_or_id: str, component: str, read_model: ConfigReader) -> ComponentSource:
    """Look at the file, folder or hub id for ``part`` of a model; what cannot be that part is named."""
    path = Path(path_or_id).expanduser()
    index = read_model("model_index.json") or {}
    wanted = _get_signature(read_model(f"{component}/config.json"), (index.get(component) or ["", ""])[1])
    if path.is_file():
        header = read_safetensors_header(path)
        reject_unsupported_file(header)
        found = find_component_signatures(header)
        _validate_signature(found, wanted, component)
        return ComponentSource("file", str(path))
    if not path.is_dir() and (path_or_id.count("/") != 1 or path.is_absolute() or path_or_id.endswith(".safetensors")):
        raise ModelError(f"no such file or folder (looked in {path.absolute().parent})")
    kind: Literal["folder", "hub"] = "folder" if path.is_dir() else "hub"
    read = build_folder_reader(path) if path.is_dir() else build_hub_reader(path_or_id)
    for subfolder in ("", component):
        config = read(f"{subfolder}/config.json".removeprefix("/"))
        if config is not None:
            piece = _get_signature(config, config.get("_class_name") or (config.get("architectures") or [""])[0])
            _validate_signature([piece] if piece else [], wanted, component)
            return ComponentSource(kind, str(path) if path.is_dir() else path_or_id, subfolder)
    raise ModelError(f"no config.json in it, and none in a folder {component} in it, so it is no {component} in diffusers' form")


def _validate_signature(signatures: list[ComponentSignature], expected: ComponentSignature | None, component: str) -> None:
    if not signatures:
        raise ModelError(f"holds nothing that could be the {component}")
    if expected is not None and expected not in signatures:
        raise ModelError(f"is a {' and a '.join(map(describe_signature, signatures))}, where the model has a {describe_signature(expected)}")


def _get_signature(config: JsonDict | None, class_name: str) -> ComponentSignature | None:
    """What a part is that has this config and is of the class ``name``; None when that is not known."""
    if config is None or class_name not in _SIGNATURE_BY_CLASS:
        return None
    kind, key = _SIGNATURE_BY_CLASS[class_name]
    width = config.get("text_config", {}).get(key, config.get(key))  # of models that see, too
    return ComponentSignature(kind, width) if isinstance(width, int) else None
