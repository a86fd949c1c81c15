"""What a single file of weights is, told by the names and shapes in its header; no torch."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .facts import FamilyFacts
from .model_configs import (
    BundledConfig,
    ConfigReader,
    JsonDict,
    ModelError,
    build_folder_reader,
    build_hub_reader,
    list_family_configs,
    load_bundled_config,
)

DENOISER_PREFIX = "model.diffusion_model."
"""What stands before the denoiser's weights in whole checkpoints, and in some files that hold it alone."""


_UNSUPPORTED_FILE_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        r"\.lora_(down|up|A|B)\b|\.hada_w1_a|\.lokr_w|\.oft_(blocks|diag)",
        "a LoRA file and no model; name the model that it was trained on",
    ),
    (r"^(emb_params|string_to_param)|^clip_[lg]$", "a textual inversion embedding and no model"),
    (r"^control_model\.|controlnet_|^input_hint_block\.", "a ControlNet; LoRAs are trained on the model itself"),
    (r"^image_proj(_model)?\.|^ip_adapter\.", "an IP-Adapter and no model"),
    (r"scaled_fp8$|\.scale_weight$|\.weight_scale$", "a model in scaled fp8; use the file with bf16 or fp16 weights"),
    (r"\.(absmax|quant_state|quant_map)\b", "a model in 4 or 8 bits; use the file with bf16 or fp16 weights"),
)
"""Pattern in the names of weights -> what the file is, when it can never be used."""


_UNSUPPORTED_SHAPES: Mapping[tuple[str, int, int], str] = {
    ("input_blocks.0.0.weight", 1, 9): "an inpainting model; its UNet takes 9 channels and not 4",
    ("input_blocks.0.0.weight", 1, 8): "a model for editing pictures; its UNet takes 8 channels and not 4",
    ("input_blocks.0.0.weight", 1, 5): "a depth model; its UNet takes 5 channels and not 4",
    ("img_in.weight", 1, 384): "FLUX.1 Fill, which fills in parts of pictures; use FLUX.1 dev",
    ("img_in.weight", 1, 128): "FLUX.1 for depth or edges; use FLUX.1 dev",
    ("label_emb.0.0.weight", 1, 2560): "the refiner of Stable Diffusion XL; LoRAs are trained on the base model",
}
"""Name of a weight, an axis and its length -> what the file is, when it cannot be trained."""


@dataclass(frozen=True)
class ComponentSignature:
    """A VAE or text encoder in a file."""

    component_type: str  # vae, clip, t5, or what else stands in _PIECES
    width: int  # latent channels, or width of the text


_COMPONENT_SIGNATURES: Mapping[str, tuple[str, str, int]] = {
    "vae": (r"(?:^|\.)decoder\.(?:conv_in|conv1)\.weight$", "VAE with {} latent channels", 1),
    "clip": (r"(?:^|\.)(?:token_embedding\.weight)$", "CLIP text encoder of width {}", 1),
    "t5": (r"(?:^|\.)encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight$", "T5 text encoder of width {}", 1),
    "qwen": (r"(?:^|\.)embed_tokens\.weight$", "language model of width {}", 1),
}
"""Kind -> pattern of the name of one of its weights, what it is called, and the axis that is its width."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file says of itself."""

    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]


def reject_unsupported_file(header: SafetensorsHeader) -> None:
    """Raise what the file is, when it is nothing that can be trained or used as a part."""
    for pattern, words in _UNSUPPORTED_FILE_PATTERNS:
        if any(re.search(pattern, name) for name in header.shapes):
            raise ModelError(f"is {words}")


def find_component_signatures(header: SafetensorsHeader) -> list[ComponentSignature]:
    """The VAE and text encoders in a file."""
    found = {}
    for kind, (pattern, _, axis) in _COMPONENT_SIGNATURES.items():
        for name, shape in header.shapes.items():
            if re.search(pattern, name) and len(shape) > axis:
                found[kind, shape[axis]] = ComponentSignature(kind, shape[axis])
    return list(found.values())


def describe_signature(signature: ComponentSignature) -> str:
    return _COMPONENT_SIGNATURES[signature.component_type][1].format(signature.width)


def has_denoiser(header: SafetensorsHeader, facts: FamilyFacts) -> bool:
    """Whether the denoiser of a family is in the file."""
    return all(_find_shape(header, key, facts) is not None for key in facts.single_file_keys)


def match_bundled_config(header: SafetensorsHeader, family: str, facts: FamilyFacts) -> str | None:
    """The shipped configuration of the family whose sizes are those of the file."""
    return next(
        (name for name in list_family_configs(family) if _matches_config(header, facts, load_bundled_config(name))),
        None,
    )


def find_component_names(header: SafetensorsHeader, facts: FamilyFacts) -> tuple[str, ...]:
    """The parts of the family whose weights are in the file; a denoiser may be there without a prefix."""
    found = [
        part
        for part, prefixes in facts.single_file_prefixes.items()
        if any(name.startswith(prefix) for prefix in prefixes for name in header.shapes)
    ]
    bare = has_denoiser(header, facts) and facts.denoiser_name not in found
    return (facts.denoiser_name, *found) if bare else tuple(found)


def reject_unsupported_model(header: SafetensorsHeader) -> None:
    """Raise what the model is, when it is of a kind that cannot be trained."""
    for (key, axis, length), words in _UNSUPPORTED_SHAPES.items():
        shape = _find_shape(header, key)
        if shape is not None and len(shape) > axis and shape[axis] == length:
            raise ModelError(f"is {words}")


def _matches_config(header: SafetensorsHeader, facts: FamilyFacts, config: BundledConfig) -> bool:
    return all(theirs == ours for theirs, ours in _iter_compared_sizes(header, facts, config))


def _iter_compared_sizes(
    header: SafetensorsHeader, facts: FamilyFacts, config: BundledConfig
) -> Iterator[tuple[object, object]]:
    """Each size that is compared: in the file, and in the configuration."""
    for (key, axis), (part, *steps) in facts.shape_checks.items():
        value: object = config.get(f"{part}/config.json")
        for step in steps:
            if isinstance(value, dict) or (isinstance(value, list) and isinstance(step, int) and step < len(value)):
                value = value.get(step) if isinstance(value, dict) else value[int(step)]
        shape = _find_shape(header, key, facts)
        if axis is None:
            yield shape is not None, bool(value)
            continue
        yield (shape[axis] if shape is not None and axis < len(shape) else None), value


def _find_shape(header: SafetensorsHeader, key: str, facts: FamilyFacts | None = None) -> tuple[int, ...] | None:
    """The shape of a weight by its original name, under which, or under diffusers' own, it is in the file."""
    own = facts.diffusers_keys.get(key, key) if facts else key
    places = (DENOISER_PREFIX + key, key, own)
    return next((header.shapes[place] for place in places if place in header.shapes), None)


_MAX_HEADER_BYTES = 100_000_000
"""Bytes of the longest header that safetensors itself reads."""


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Look into a file; what is no safetensors file is named."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            raw = file.read(length) if 2 <= length <= _MAX_HEADER_BYTES else b""
            more = start + raw[:64] if raw else start + file.read(64)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}") from None
    if not raw.startswith(b"{"):
        raise ModelError(_describe_file_type(more))
    if len(raw) < length:
        raise ModelError("is cut off; download or copy it again")
    try:
        data = json.loads(raw)
        metadata = data.pop("__metadata__", {})
        header = SafetensorsHeader({name: tuple(entry["shape"]) for name, entry in data.items()}, metadata)
        end = 8 + length + max((entry["data_offsets"][1] for entry in data.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError("is a damaged safetensors file; download or copy it again") from None
    if (size := path.stat().st_size) < end:
        raise ModelError(f"is cut off: {size:,} of {end:,} bytes are there; download or copy it again")
    return header


def _describe_file_type(first_bytes: bytes) -> str:
    """What a file is that is no safetensors file."""
    if first_bytes.startswith((b"PK", b"\x80")):
        return (
            "is a pickle (.ckpt, .pt, .bin), which can run code when it is opened and is never read; use the "
            ".safetensors file of this model"
        )
    if first_bytes.startswith(b"GGUF"):
        return "is a GGUF file, made for drawing; use the .safetensors file of this model"
    if first_bytes.startswith(b"version https://git-lfs"):
        return "is only a pointer of git-lfs; run `git lfs pull` where it lies"
    if first_bytes.lstrip().lower().startswith((b"<!doctype", b"<html", b'{"error', b"<?xml")):
        return "is a web page and no model; the download went wrong"
    return "is empty" if not first_bytes else "is no safetensors file"


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
    raise ModelError(
        f"no config.json in it, and none in a folder {component} in it, so it is no {component} in diffusers' form"
    )


def _validate_signature(
    signatures: list[ComponentSignature], expected: ComponentSignature | None, component: str
) -> None:
    if not signatures:
        raise ModelError(f"holds nothing that could be the {component}")
    if expected is not None and expected not in signatures:
        raise ModelError(
            f"is a {' and a '.join(map(describe_signature, signatures))}, where the model has a {describe_signature(expected)}"
        )


def _get_signature(config: JsonDict | None, class_name: str) -> ComponentSignature | None:
    """What a part is that has this config and is of the class ``name``; None when that is not known."""
    if config is None or class_name not in _SIGNATURE_BY_CLASS:
        return None
    kind, key = _SIGNATURE_BY_CLASS[class_name]
    width = config.get("text_config", {}).get(key, config.get(key))  # of models that see, too
    return ComponentSignature(kind, width) if isinstance(width, int) else None
