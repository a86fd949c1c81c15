"""What a single file of weights is, told by the names and shapes in its header; no torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .configs import Config, names_of, read_config
from .facts import Facts
from .header import Header
from .reading import Problem

DENOISER_PREFIX = "model.diffusion_model."
"""What stands before the denoiser's weights in whole checkpoints, and in some files that hold it alone."""

_OTHERS: tuple[tuple[str, str], ...] = (
    (r"\.lora_(down|up|A|B)\b|\.hada_w1_a|\.lokr_w|\.oft_(blocks|diag)", "a LoRA file and no model; "
     "name the model that it was trained on"),
    (r"^(emb_params|string_to_param)|^clip_[lg]$", "a textual inversion embedding and no model"),
    (r"^control_model\.|controlnet_|^input_hint_block\.", "a ControlNet; LoRAs are trained on the model itself"),
    (r"^image_proj(_model)?\.|^ip_adapter\.", "an IP-Adapter and no model"),
    (r"scaled_fp8$|\.scale_weight$|\.weight_scale$", "a model in scaled fp8; use the file with bf16 or fp16 weights"),
    (r"\.(absmax|quant_state|quant_map)\b", "a model in 4 or 8 bits; use the file with bf16 or fp16 weights"),
)  # fmt: skip
"""Pattern in the names of weights -> what the file is, when it can never be used."""

_ODD_SIZES: Mapping[tuple[str, int, int], str] = {
    ("input_blocks.0.0.weight", 1, 9): "an inpainting model; its UNet takes 9 channels and not 4",
    ("input_blocks.0.0.weight", 1, 8): "a model for editing pictures; its UNet takes 8 channels and not 4",
    ("input_blocks.0.0.weight", 1, 5): "a depth model; its UNet takes 5 channels and not 4",
    ("img_in.weight", 1, 384): "FLUX.1 Fill, which fills in parts of pictures; use FLUX.1 dev",
    ("img_in.weight", 1, 128): "FLUX.1 for depth or edges; use FLUX.1 dev",
    ("label_emb.0.0.weight", 1, 2560): "the refiner of Stable Diffusion XL; LoRAs are trained on the base model",
}
"""Name of a weight, an axis and its length -> what the file is, when it cannot be trained."""


@dataclass(frozen=True)
class Piece:
    """A VAE or text encoder in a file."""

    kind: str  # vae, clip, t5, or what else stands in _PIECES
    width: int  # latent channels, or width of the text


_PIECES: Mapping[str, tuple[str, str, int]] = {
    "vae": (r"(?:^|\.)decoder\.(?:conv_in|conv1)\.weight$", "VAE with {} latent channels", 1),
    "clip": (r"(?:^|\.)(?:token_embedding\.weight)$", "CLIP text encoder of width {}", 1),
    "t5": (r"(?:^|\.)encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight$", "T5 text encoder of width {}", 1),
    "qwen": (r"(?:^|\.)embed_tokens\.weight$", "language model of width {}", 1),
}
"""Kind -> pattern of the name of one of its weights, what it is called, and the axis that is its width."""


def refuse_others(header: Header) -> None:
    """Raise what the file is, when it is nothing that can be trained or used as a part."""
    for pattern, words in _OTHERS:
        if any(re.search(pattern, name) for name in header.shapes):
            raise Problem(f"is {words}")


def pieces_in(header: Header) -> list[Piece]:
    """The VAE and text encoders in a file."""
    found = {}
    for kind, (pattern, _, axis) in _PIECES.items():
        for name, shape in header.shapes.items():
            if re.search(pattern, name) and len(shape) > axis:
                found[kind, shape[axis]] = Piece(kind, shape[axis])
    return list(found.values())


def said(piece: Piece) -> str:
    return _PIECES[piece.kind][1].format(piece.width)


def is_denoiser_of(header: Header, facts: Facts) -> bool:
    """Whether the denoiser of a family is in the file."""
    return all(_shape(header, key, facts) is not None for key in facts.keys)


def config_for(header: Header, family: str, facts: Facts) -> str | None:
    """The shipped configuration of the family whose sizes are those of the file."""
    return next((name for name in names_of(family) if _fits(header, facts, read_config(name))), None)


def parts_in(header: Header, facts: Facts) -> tuple[str, ...]:
    """The parts of the family whose weights are in the file; a denoiser may be there without a prefix."""
    found = [part for part, prefixes in facts.prefixes.items()
             if any(name.startswith(prefix) for prefix in prefixes for name in header.shapes)]  # fmt: skip
    bare = is_denoiser_of(header, facts) and facts.denoiser not in found
    return (facts.denoiser, *found) if bare else tuple(found)


def refuse_odd_sizes(header: Header) -> None:
    """Raise what the model is, when it is of a kind that cannot be trained."""
    for (key, axis, length), words in _ODD_SIZES.items():
        shape = _shape(header, key)
        if shape is not None and len(shape) > axis and shape[axis] == length:
            raise Problem(f"is {words}")


def _fits(header: Header, facts: Facts, config: Config) -> bool:
    return all(theirs == ours for theirs, ours in _sizes(header, facts, config))


def _sizes(header: Header, facts: Facts, config: Config) -> Iterator[tuple[object, object]]:
    """Each size that is compared: in the file, and in the configuration."""
    for (key, axis), (part, *steps) in facts.sizes.items():
        value: object = config.get(f"{part}/config.json")
        for step in steps:
            if isinstance(value, dict) or (isinstance(value, list) and isinstance(step, int) and step < len(value)):
                value = value.get(step) if isinstance(value, dict) else value[int(step)]
        shape = _shape(header, key, facts)
        if axis is None:
            yield shape is not None, bool(value)
            continue
        yield (shape[axis] if shape is not None and axis < len(shape) else None), value


def _shape(header: Header, key: str, facts: Facts | None = None) -> tuple[int, ...] | None:
    """The shape of a weight by its original name, under which, or under diffusers' own, it is in the file."""
    own = facts.own_names.get(key, key) if facts else key
    places = (DENOISER_PREFIX + key, key, own)
    return next((header.shapes[place] for place in places if place in header.shapes), None)
