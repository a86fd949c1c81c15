"""Equivalents of other programs' settings: families and their buckets, choices of layers, quantization, optimizers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...models.detect import get_size_multiple
from ...models.families import FAMILY_FACTS
from ...models.trainer_names import TrainerId, format_trained_titles
from .imported import ImportedConfig

UNET_FAMILIES = tuple(name for name, facts in FAMILY_FACTS.items() if facts.options.network.is_unet)
FLOW_FAMILIES = tuple(name for name in FAMILY_FACTS if name not in UNET_FAMILIES)
EDIT_FAMILIES = tuple(name for name, facts in FAMILY_FACTS.items() if facts.control.num_images[1])
"""Families that take control images."""
GUIDED_FAMILIES = tuple(name for name, facts in FAMILY_FACTS.items() if "guidance_scale" in facts.options.extra)
"""Families whose guidance scale is an input of the model; their previews have no negative prompt."""
VIDEO_FAMILIES = tuple(name for name, facts in FAMILY_FACTS.items() if facts.pipeline.frames is not None)
"""Families that are trained on clips."""
BLOCKS: Mapping[str, tuple[str, ...]] = {"krea2": ("blocks",), "lumina2": ("layers.", "refiner.")}
"""Parts of the names of layers in blocks, for families whose layers outside of blocks are trained here by default."""
FULL_LOKR_DIM = 10_000
"""The rank from which every layer of a LoKr is a full matrix, which has no scale: alpha counts as the rank."""

_DENOISER = r"(unet|transformer)\..*"


def describe_unknown_model(trainer: TrainerId, setting: str) -> str:
    """Say that a model is not trained here, and which of that trainer's models are."""
    return f"{setting}: not supported; of this program's models these are: {format_trained_titles(trainer)}"


def keep_only_layers(result: ImportedConfig, patterns: Sequence[str]) -> None:
    """Train only layers of the denoiser whose full name matches; text encoders are not affected."""
    result.add_network_arg("exclude_patterns", [_DENOISER])
    result.add_network_arg("include_patterns", list(patterns))


def drop_layers(result: ImportedConfig, patterns: Sequence[str]) -> None:
    """Train all layers but those whose full name matches."""
    result.add_network_arg("exclude_patterns", list(patterns))


def match_containing(text: str) -> str:
    """The pattern of full names of the denoiser's layers that contain a text."""
    return rf"(unet|transformer)\..*{re.escape(text)}.*"


def match_last_parts(names: Iterable[str]) -> str:
    """The pattern of full names of the denoiser's layers that end in one of these dotted names."""
    return rf"(unet|transformer)\.(.*\.)?({'|'.join(re.escape(name) for name in names)})"


def set_control_folders(result: ImportedConfig, subset: dict[str, Any], key: str, folders: Sequence[str]) -> None:
    """Set the folder of control images; several, and those that the model does not take, are listed."""
    if not folders:
        return
    if result.family not in EDIT_FAMILIES:
        result.list_change(
            key, list(folders), "the model takes no control images; train an editing model, or remove it"
        )
        return
    subset["control_directory"] = folders[0]
    if len(folders) > 1:
        reason = "one folder here, with NAME_0.png, NAME_1.png and so on; put the images of these into it"
        result.list_change(key, list(folders), reason)


def has_text_encoder_option(family: str) -> bool:
    """Whether the file of the text encoder is set by ``text_encoder``."""
    return "text_encoder" in FAMILY_FACTS[family].options.components


def find_bucket_steps(family: str, steps: int) -> int:
    """The smallest multiple of what the family needs that is not below ``steps``."""
    needed = get_size_multiple(family)
    return -(-steps // needed) * needed


def round_preview_side(side: float) -> int:
    """A side that every family can sample."""
    return max(64, int(side) - int(side) % 16)


def set_quantization(result: ImportedConfig, key: str, value: Any, kinds: Mapping[str, str]) -> None:
    """Choose the nearest storage of the frozen weights; another format is listed."""
    name = str(value).lower()
    kind = next((kind for start, kind in kinds.items() if name.startswith(start)), None)
    result.set_option("quantize_base", kind or "nf4")
    if name not in kinds:
        used = kind or "nf4"
        result.list_change(key, value, f"quantized as {used} here, which rounds differently; see docs/memory.md")


@dataclass(frozen=True)
class KnownOptimizer:
    """An optimizer of another program."""

    name: str
    """The value of ``optimizer_type``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the other program sets where the class used here has another default."""
    difference: str = ""
    """The difference from the other program, which is listed for the user."""


def set_optimizer(
    result: ImportedConfig, key: str, value: Any, known: Mapping[str, KnownOptimizer], given: Mapping[str, Any]
) -> None:
    """Set optimizer and arguments; arguments that were given override those that the other program sets."""
    optimizer = known.get(str(value).lower())
    if optimizer is None:
        reason = "no such optimizer here; AdamW is used, with the same arguments; set optimizer_type by hand"
        result.list_change(key, value, reason)
        optimizer = KnownOptimizer("AdamW")
    elif optimizer.difference:
        result.list_change(key, value, optimizer.difference)
    result.set_option("optimizer_type", optimizer.name)
    arguments = {**optimizer.arguments, **given}
    words = [f"{name}={format_argument(item)}" for name, item in arguments.items() if item is not None]
    if words:
        result.set_option("optimizer_args", words)


def format_argument(value: Any) -> str:
    """Format a value as a Python literal without spaces."""
    return repr(tuple(value) if isinstance(value, list) else value).replace(" ", "")
