"""Identify a checkpoint by the keys and shapes in its header, without reading weights; no torch."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .checkpoint_header import CheckpointHeader, read_checkpoint_header
from .facts import FamilyFacts
from .gguf_file import is_gguf
from .gguf_names import INTERLEAVED_HEADS, TEXT_NAMES
from .model_configs import (
    BundledConfig,
    ConfigReader,
    JsonDict,
    ModelError,
    build_folder_reader,
    build_hub_reader,
    has_config_value,
    is_tokenizer,
    list_family_configs,
    load_bundled_config,
)
from .own_families import list_own_configs
from .quantized_keys import OTHER_FILES

DENOISER_PREFIX = "model.diffusion_model."
"""Prefix of the denoiser's keys in full checkpoints, and in some files with only the denoiser."""

_UNSUPPORTED_FILE_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        r"\.(wscales|smooth_factor|smooth_factor_orig)$",
        "an SVDQuant model of Nunchaku, whose 4-bit weights only its own kernels read; train on the file of this model "
        "in bf16, fp16, fp8 or GGUF, and use the LoRA with Nunchaku",
    ),
    (
        r"\.(pre_quant_scale|weight_s_rel|weight_codebook|weight_proj_(up|down))$",
        f"quantized in a form that is not read; {OTHER_FILES}",
    ),
    (
        r"\.(qzeros|g_idx|weight_packed)$",
        f"quantized as for a language model (AWQ, GPTQ or compressed-tensors), which is not read; {OTHER_FILES}",
    ),
    (
        r"\.lora_(down|up|A|B)\b|\.hada_w1_a|\.lokr_w|\.oft_(blocks|diag)",
        "a LoRA file, not a model; give the model that it was trained on",
    ),
    (r"^(emb_params|string_to_param)|^clip_[lg]$", "a textual inversion embedding, not a model"),
    (r"^control_model\.|controlnet_|^input_hint_block\.", "a ControlNet; train a LoRA on the model itself"),
    (r"^image_proj(_model)?\.|^ip_adapter\.", "an IP-Adapter, not a model"),
)
"""Patterns of keys of files that are never usable, and what such a file is."""


@dataclass(frozen=True)
class ComponentSignature:
    """A VAE or text encoder in a file."""

    component_type: str  # a key of _COMPONENT_SIGNATURES
    width: int  # latent channels, or hidden size


_COMPONENT_SIGNATURES: Mapping[str, tuple[str, str, int]] = {
    "clip_vision": (r"(?:^|\.)pre_layrnorm\.weight$", "CLIP image encoder of width {}", 0),
    "siglip_vision": (r"(?:^|\.)head\.probe$", "SigLIP image encoder of width {}", 2),
    "vae": (r"(?:^|\.)decoder\.(?:conv_in|conv1)(?:\.conv)?\.weight$", "VAE with {} latent channels", 1),
    "clip": (r"(?:^|\.)(?:token_embedding\.weight)$", "CLIP text encoder of width {}", 1),
    "t5": (
        r"(?:^|\.)(?:encoder\.block\.0\.layer\.0\.SelfAttention|blocks\.0\.attn)\.q\.weight$",
        "T5 text encoder of width {}",
        1,
    ),
    "llm": (r"(?:^|\.)(?:embed_tokens|word_embeddings)\.weight$", "language model of width {}", 1),
    "llm_adapter": (r"(?:^|\.)blocks\.0\.norm_cross_attn\.weight$", "adapter of Anima of width {}", 0),
}
"""The pattern of a key of each component type, the description of the type, and the axis of its width."""


def reject_unsupported_file(header: CheckpointHeader) -> None:
    """Raise if the file is neither a model nor a component of one."""
    for pattern, description in _UNSUPPORTED_FILE_PATTERNS:
        if any(re.search(pattern, name) for name in header.shapes):
            raise ModelError(f"is {description}")


def find_component_signatures(header: CheckpointHeader) -> list[ComponentSignature]:
    """Find the VAE and text encoders in a file."""
    signatures = {}
    for component_type, (pattern, _, axis) in _COMPONENT_SIGNATURES.items():
        for name, shape in header.shapes.items():
            if re.search(pattern, name) and len(shape) > axis:
                signatures[component_type, shape[axis]] = ComponentSignature(component_type, shape[axis])
    return list(signatures.values())


def describe_signature(signature: ComponentSignature) -> str:
    return _COMPONENT_SIGNATURES[signature.component_type][1].format(signature.width)


def has_denoiser(header: CheckpointHeader, facts: FamilyFacts) -> bool:
    """Whether the file contains the denoiser of a family."""
    keys = facts.detection.keys
    return bool(keys) and all(_find_shape(header, key, facts) is not None for key in keys)


def match_bundled_config(header: CheckpointHeader, family: str, facts: FamilyFacts) -> str | None:
    """The name of the family's first bundled config that matches the shapes in the file."""
    return next(iter(match_bundled_configs(header, family, facts)), None)


def match_bundled_configs(
    header: CheckpointHeader, family: str, facts: FamilyFacts, version: Mapping[str, object] | None = None
) -> list[str]:
    """The names of the family's bundled configs that match the shapes in the file, the main one first.

    ``version`` has values of the denoiser's config, where the user says which of several models with the same weights
    the file is: then a key that only some files of a model have need not be there.
    """
    names = list_family_configs(family) or [*list_own_configs(family).values()]
    configs = {name: load_bundled_config(name) for name in names}
    denoisers = {name: config.get(f"{facts.denoiser_name}/config.json", {}) for name, config in configs.items()}
    return [
        name
        for name, config in configs.items()
        if all(has_config_value(denoisers[name], key, value) for key, value in (version or {}).items())
        and all(
            actual == expected or (version and actual is False)
            for actual, expected in _iter_shape_checks(header, facts, config)
        )
    ]


def find_component_names(header: CheckpointHeader, facts: FamilyFacts) -> tuple[str, ...]:
    """The family's components in the file; the denoiser may have no prefix."""
    names = [
        component
        for component, prefixes in facts.single_files.prefixes.items()
        if any(key.startswith(prefix) for prefix in prefixes for key in header.shapes)
    ]
    names = [name for name in names if name not in facts.pipeline.denoisers or name == facts.file_denoiser]
    if has_denoiser(header, facts) and facts.file_denoiser not in names:
        names.insert(0, facts.file_denoiser)
    return tuple(names)


def list_denoiser_formats(header: CheckpointHeader, facts: FamilyFacts) -> tuple[str, ...]:
    """The formats in which weights of the denoiser are stored quantized, the most frequent first."""
    others = [
        prefix
        for component, prefixes in facts.single_files.prefixes.items()
        if component not in facts.pipeline.denoisers
        for prefix in prefixes
    ]
    names = Counter(each.name for key, each in header.formats.items() if not key.startswith(tuple(others)))
    return tuple(name for name, _ in names.most_common())


def reject_unsupported_model(
    header: CheckpointHeader, families: Iterable[FamilyFacts], *, is_unmatched: bool = False
) -> None:
    """Raise if the model is of a type of its family that cannot be trained.

    Shapes that configurations have as well are those of no model of the family, and may be those of another one: they
    count where no configuration matches, with ``is_unmatched``.
    """
    for facts in families:
        if not has_denoiser(header, facts):
            continue
        for (key, axis, length), description in facts.detection.unsupported_shapes.items():
            if ((key, axis) in facts.detection.shape_checks) != is_unmatched:
                continue
            shape = _find_shape(header, key, facts)
            if shape is not None and len(shape) > axis and shape[axis] == length:
                raise ModelError(f"is {description}")


def _iter_shape_checks(
    header: CheckpointHeader, facts: FamilyFacts, config: BundledConfig
) -> Iterator[tuple[object, object]]:
    """The family's ``shape_checks``: the value in the file, and the value in the config."""
    for (key, axis), (component, *steps) in facts.detection.shape_checks.items():
        value: object = config.get(f"{component}/config.json")
        for step in steps:
            if isinstance(value, dict) or (isinstance(value, list) and isinstance(step, int) and step < len(value)):
                value = value.get(step) if isinstance(value, dict) else value[int(step)]
        shape = _find_shape(header, key, facts)
        if axis is None:
            yield shape is not None, bool(value)
            continue
        yield (shape[axis] if shape is not None and axis < len(shape) else None), value


def _find_shape(header: CheckpointHeader, key: str, facts: FamilyFacts | None = None) -> tuple[int, ...] | None:
    """The shape of a weight by its original or its diffusers key, with or without prefix."""
    own = facts.single_files.prefixes.get(facts.denoiser_name, ()) if facts else ()
    prefixes = dict.fromkeys((DENOISER_PREFIX, "", *own))
    keys = (key, facts.detection.diffusers_keys.get(key, key) if facts else key)
    names = [prefix + each for each in keys for prefix in prefixes]
    return next((header.shapes[name] for name in names if name in header.shapes), None)


_SIGNATURE_BY_CLASS: Mapping[str, tuple[str, str]] = {
    "AutoencoderKL": ("vae", "latent_channels"),
    "AutoencoderKLFlux2": ("vae", "latent_channels"),
    "AutoencoderKLQwenImage": ("vae", "z_dim"),
    "AutoencoderKLWan": ("vae", "z_dim"),
    "AutoencoderKLHunyuanImage": ("vae", "latent_channels"),
    "AutoencoderKLHunyuanVideo": ("vae", "latent_channels"),
    "AutoencoderKLHunyuanVideo15": ("vae", "latent_channels"),
    "AutoencoderKLLTXVideo": ("vae", "latent_channels"),
    "AutoencoderKLCogVideoX": ("vae", "latent_channels"),
    "AutoencoderKLMochi": ("vae", "latent_channels"),
    "CLIPTextModel": ("clip", "hidden_size"),
    "CLIPTextModelWithProjection": ("clip", "hidden_size"),
    "CLIPVisionModel": ("clip_vision", "hidden_size"),
    "CLIPVisionModelWithProjection": ("clip_vision", "hidden_size"),
    "SiglipVisionModel": ("siglip_vision", "hidden_size"),
    "Siglip2VisionModel": ("siglip_vision", "hidden_size"),
    "T5EncoderModel": ("t5", "d_model"),
    "T5ForConditionalGeneration": ("t5", "d_model"),
    "UMT5EncoderModel": ("t5", "d_model"),
    "Qwen3Model": ("llm", "hidden_size"),
    "Qwen3ForCausalLM": ("llm", "hidden_size"),
    "Qwen2_5_VLForConditionalGeneration": ("llm", "hidden_size"),
    "AnimaTextConditioner": ("llm_adapter", "model_dim"),
}
"""The component type of each class, and the key of its width in the config; others are language models."""


@dataclass(frozen=True)
class ComponentSource:
    """The file or folder that one component is loaded from."""

    source_type: Literal["file", "folder", "hub"]
    path_or_id: str
    subfolder: str = ""


def resolve_component_source(
    path_or_id: str, component: str, read_model: ConfigReader, *, needs_vision: bool = False
) -> ComponentSource:
    """Resolve the file, folder or hub id given for a component, and check that it fits the model.

    ``needs_vision``: whether it is a text encoder that reads images, too.
    """
    path = Path(path_or_id).expanduser()
    if is_tokenizer(component):
        return _resolve_tokenizer_source(path)
    index = read_model("model_index.json") or {}
    expected = _get_signature(read_model(f"{component}/config.json"), (index.get(component) or ["", ""])[1])
    if path.is_file():
        header = read_checkpoint_header(path)
        reject_unsupported_file(header)
        if is_gguf(path):
            _reject_unread_encoder(header, needs_vision=needs_vision)
        _require_signature(find_component_signatures(header), expected, component)
        return ComponentSource("file", str(path))
    if not path.is_dir() and (path_or_id.count("/") != 1 or path.is_absolute() or path_or_id.endswith(".safetensors")):
        raise ModelError(f"no such file or folder (looked in {path.absolute().parent})")
    source_type: Literal["folder", "hub"] = "folder" if path.is_dir() else "hub"
    read = build_folder_reader(path) if path.is_dir() else build_hub_reader(path_or_id)
    for subfolder in ("", component):
        config = read(f"{subfolder}/config.json".removeprefix("/"))
        if config is not None:
            signature = _get_signature(config, config.get("_class_name") or (config.get("architectures") or [""])[0])
            _require_signature([signature] if signature else [], expected, component)
            return ComponentSource(source_type, str(path) if path.is_dir() else path_or_id, subfolder)
    raise ModelError(f"no config.json in it or in its subfolder {component}; give a {component} in diffusers format")


def _reject_unread_encoder(header: CheckpointHeader, *, needs_vision: bool) -> None:
    """Raise if a GGUF file is none of a text encoder that is read."""
    if header.architecture not in TEXT_NAMES:
        known = ", ".join(TEXT_NAMES)
        raise ModelError(
            f"is a GGUF file of architecture {header.architecture or '(none)'}; of components beside the denoiser text "
            f"encoders by llama.cpp are read ({known}); use the .safetensors file"
        )
    if needs_vision:
        raise ModelError(
            "is a GGUF file without the vision part (mmproj), and this model's text encoder reads images, too; "
            "use the .safetensors file"
        )
    if header.architecture == INTERLEAVED_HEADS and not all(header.heads):
        raise ModelError("does not say how many attention heads it has; use the .safetensors file")


def resolve_denoiser_source(name: str, facts: FamilyFacts, config: BundledConfig) -> ComponentSource:
    """Resolve the file of another denoiser, which has the sizes of the one that the config describes."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise ModelError(f"no such file (looked in {path.absolute().parent})")
    header = read_checkpoint_header(path)
    reject_unsupported_file(header)
    is_same = all(actual == expected for actual, expected in _iter_shape_checks(header, facts, config))
    if not has_denoiser(header, facts) or not is_same:
        raise ModelError(f"contains no transformer of {facts.title} with the sizes of the other one")
    return ComponentSource("file", str(path))


def _resolve_tokenizer_source(path: Path) -> ComponentSource:
    if not path.is_dir():
        raise ModelError(f"no such folder (looked in {path.absolute().parent})")
    names = ("tokenizer.json", "spiece.model")
    if not any((path / name).is_file() for name in names):
        raise ModelError(f"contains no tokenizer ({' or '.join(names)})")
    return ComponentSource("folder", str(path))


def _require_signature(
    signatures: list[ComponentSignature], expected: ComponentSignature | None, component: str
) -> None:
    if not signatures:
        raise ModelError(f"contains no {component}")
    if expected is not None and expected not in signatures:
        actual = " and a ".join(map(describe_signature, signatures))
        raise ModelError(f"is a {actual}, but the model has a {describe_signature(expected)}")


def _get_signature(config: JsonDict | None, class_name: str) -> ComponentSignature | None:
    if config is None:
        return None
    component_type, key = _SIGNATURE_BY_CLASS.get(class_name, ("llm", "hidden_size"))
    width = config.get("text_config", {}).get(key, config.get(key))  # text_config: vision-language models
    return ComponentSignature(component_type, width) if isinstance(width, int) else None
