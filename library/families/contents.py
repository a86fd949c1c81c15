"""What a single file of weights is, told by the names and shapes in its header; no torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .configs import BundledConfig, list_family_configs, load_bundled_config
from .facts import FamilyFacts
from .header import SafetensorsHeader
from .reading import ModelError

DENOISER_PREFIX = "model.diffusion_model."
"""What stands before the denoiser's weights in whole checkpoints, and in some files that hold it alone."""

_UNSUPPORTED_FILE_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"\.lora_(down|up|A|B)\b|\.hada_w1_a|\.lokr_w|\.oft_(blocks|diag)", "a LoRA file and no model; "
     "name the model that it was trained on"),
    (r"^(emb_params|string_to_param)|^clip_[lg]$", "a textual inversion embedding and no model"),
    (r"^control_model\.|controlnet_|^input_hint_block\.", "a ControlNet; LoRAs are trained on the model itself"),
    (r"^image_proj(_model)?\.|^ip_adapter\.", "an IP-Adapter and no model"),
    (r"scaled_fp8$|\.scale_weight$|\.weight_scale$", "a model in scaled fp8; use the file with bf16 or fp16 weights"),
    (r"\.(absmax|quant_state|quant_map)\b", "a model in 4 or 8 bits; use the file with bf16 or fp16 weights"),
)  # fmt: skip
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
    return next((name for name in list_family_configs(family) if _matches_config(header, facts, load_bundled_config(name))), None)


def find_component_names(header: SafetensorsHeader, facts: FamilyFacts) -> tuple[str, ...]:
    """The parts of the family whose weights are in the file; a denoiser may be there without a prefix."""
    found = [part for part, prefixes in facts.single_file_prefixes.items()
             if any(name.startswith(prefix) for prefix in prefixes for name in header.shapes)]  # fmt: skip
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


def _iter_compared_sizes(header: SafetensorsHeader, facts: FamilyFacts, config: BundledConfig) -> Iterator[tuple[object, object]]:
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
