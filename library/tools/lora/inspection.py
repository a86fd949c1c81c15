"""The contents of a LoRA file: layers, ranks, alphas, update norms, training facts, and the programs that read it."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...adapters.client_compatibility import list_client_losses
from ...adapters.kohya_diffusers_comfyui_keys import FileFormat
from ...adapters.merge import compute_delta_weight
from ...adapters.module_adapter import ModuleAdapter
from .block_names import get_block, is_text_encoder
from .lora_files import LoraFile, describe_other_family
from .low_rank import compute_norm, factor_update

_SPECIAL_TYPES = ("oft", "boft", "diag-oft", "glora")
"""Types without an update norm of their own: their effect depends on the base weights."""

MODEL_TITLES: Mapping[str, str] = {"unet": "U-Net", "transformer": "transformer"}


@dataclass(frozen=True)
class LayerFacts:
    """One layer of a LoRA file with its rank, alpha and update norm."""

    module: str
    block: str
    adapter_type: str
    rank: int
    alpha: float
    norm: float | None
    """Frobenius norm of the update at strength 1; None where it depends on the base weights."""


@dataclass(frozen=True)
class LoraFacts:
    """All that ``lora inspect`` tells of a file."""

    file: LoraFile
    layers: tuple[LayerFacts, ...]

    @property
    def losses(self) -> dict[str, dict[str, str]]:
        """The parts that programs do not read right of this file and of its conversions, by format and program."""
        contents = self.file.lora.contents
        formats: Sequence[FileFormat] = ("kohya", "diffusers", "comfy")
        return {each: list_client_losses(contents.updates, self.file.lora.components, each) for each in formats}

    @property
    def notices(self) -> list[str]:
        """What speaks against the family, or for others as well."""
        others, stated = self.file.lora.similar_families, describe_other_family(self.file)
        lines = [stated] if stated else []
        if others:
            lines.append(f"its layers fit {' and '.join(others)} as well, and its metadata name none of them")
        lines += [f"{len(keys)} tensors are {kind}, which is not read" for kind, keys in self.file.lora.unread.items()]
        return lines

    def sum_by_block(self) -> dict[str, float]:
        """The norm of all updates of each block together, in the model's order."""
        squares: dict[str, float] = {}
        for layer in self.layers:
            if layer.norm is not None:
                squares[layer.block] = squares.get(layer.block, 0.0) + layer.norm**2
        return {block: square**0.5 for block, square in squares.items()}


def inspect_lora(file: LoraFile) -> LoraFacts:
    """Look at every layer."""
    layers = [_inspect_layer(module, update) for module, update in file.updates.items()]
    for name, fused in file.lora.contents.fused.items():
        module = f"{fused.component}.{next(each for each in fused.group.modules if each is not None)}"
        layers.append(_inspect_layer(module, fused.update, name))
    return LoraFacts(file, tuple(sorted(layers, key=_sort_by_place)))


def _inspect_layer(module: str, update: ModuleAdapter, name: str | None = None) -> LayerFacts:
    return LayerFacts(
        module=name or module,
        block=get_block(module),
        adapter_type=update.title,
        rank=update.rank,
        alpha=update.alpha,
        norm=compute_update_norm(update),
    )


_BLOCK_ORDER = ("IN", "MID", "OUT", "noise_refiner", "context_refiner", "transformer_blocks")
"""Blocks that are before others, in the order in which they are computed."""


def _sort_by_place(layer: LayerFacts) -> tuple[str, int, list[tuple[int, str]]]:
    """Denoiser first, blocks in the order in which they are computed."""
    words = re.sub("^(IN|OUT)", r"\1.", layer.block).split(".")
    place = _BLOCK_ORDER.index(words[0]) if words[0] in _BLOCK_ORDER else len(_BLOCK_ORDER)
    component = layer.module.partition(".")[0] if is_text_encoder(layer.module) else ""
    return component, place, [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


def compute_update_norm(update: ModuleAdapter) -> float | None:
    """The norm of an update at strength 1; of DoRA, LoHa and LoKr with magnitudes without these."""
    if update.adapter_type in _SPECIAL_TYPES:
        return None
    if update.adapter_type == "norm":
        return float(torch.cat([each.double().flatten() for each in update.tensors.values()]).norm())
    if update.adapter_type == "full":
        biases = [each.double().flatten() for each in update.tensors.values()]
        return float(torch.cat(biases).norm())
    if update.is_tucker:
        return float(compute_delta_weight(update, torch.float64).norm()) * abs(update.scale)
    return compute_norm(factor_update(update))


def export_json(facts: LoraFacts, *, with_layers: bool) -> dict[str, Any]:
    """Export the facts as plain data for JSON output."""
    file = facts.file
    exported: dict[str, Any] = {
        "file": str(file.path),
        "family": file.family,
        "similar_families": list(file.lora.similar_families),
        "unread": {kind: len(keys) for kind, keys in file.lora.unread.items()},
        "known_size": file.lora.is_known_size,
        "format": file.lora.contents.file_format,
        "precision": str(file.precision).removeprefix("torch."),
        "types": dict(Counter(layer.adapter_type for layer in facts.layers)),
        "components": {
            component: {
                "layers": len(layers),
                "ranks": dict(Counter(layer.rank for layer in layers)),
                "alphas": dict(Counter(layer.alpha for layer in layers)),
                "norm": sum(layer.norm**2 for layer in layers if layer.norm is not None) ** 0.5,
            }
            for component, layers in group_by_component(facts.layers).items()
        },
        "blocks": facts.sum_by_block(),
        "not_read_right": facts.losses,
        "training": {key: _parse_value(value) for key, value in sorted(file.lora.metadata.items())},
    }
    if with_layers:
        exported["layers"] = [
            {
                "module": layer.module,
                "block": layer.block,
                "type": layer.adapter_type,
                "rank": layer.rank,
                "alpha": layer.alpha,
                "norm": layer.norm,
            }
            for layer in facts.layers
        ]
    return exported


def group_by_component(layers: Sequence[LayerFacts]) -> dict[str, list[LayerFacts]]:
    """Group layers by component."""
    groups: dict[str, list[LayerFacts]] = {}
    for layer in layers:
        component = layer.module.partition(".")[0]
        groups.setdefault(component, []).append(layer)
    return groups


def _parse_value(value: str) -> Any:
    """Objects and lists in JSON; everything else stays text."""
    if value[:1] in "{[":
        try:
            return json.loads(value)
        except ValueError:
            pass
    return value


def iter_training_facts(metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield what the metadata say of the training, in words."""

    def get(name: str) -> str:
        value = metadata.get(f"ss_{name}", "")
        return "" if value in ("None", "null", "{}", "[]") else value

    base = metadata.get("ss_sd_model_name") or ""
    stated = get("base_model_version") or metadata.get("modelspec.architecture", "").partition("/")[0]
    if base or stated:
        yield f"base model: {base}{f' ({stated})' if base and stated else stated}"
    if get("steps"):
        whole = f" of {get('max_train_steps')}" if get("max_train_steps") not in ("", get("steps")) else ""
        epochs = f", epoch {get('epoch')}" if get("epoch") else ""
        yield f"trained for {get('steps')}{whole} steps{epochs}"
    images = [
        f"{metadata[key]} {word}"
        for key, word in (
            ("ss_num_train_images", "images with repeats"),
            ("ss_num_reg_images", "regularization images"),
            ("ss_num_validation_images", "validation images"),
        )
        if metadata.get(key, "0") not in ("0", "None", "")
    ]
    if images:
        yield ", ".join(images)
    resolution = metadata.get("modelspec.resolution") or get("resolution")
    if resolution:
        yield f"resolution: {resolution}"
    rates = [
        f"{word} {get(key)}"
        for key, word in (("unet_lr", "denoiser"), ("text_encoder_lr", "text encoders"))
        if get(key)
    ]
    if get("learning_rate") or rates:
        schedule = f", {get('lr_scheduler')}" if get("lr_scheduler") else ""
        yield f"learning rate: {', '.join(rates) or get('learning_rate')}{schedule}"
    if get("optimizer"):
        yield f"optimizer: {get('optimizer')}"
    yield from _iter_network_facts(metadata)


def _iter_network_facts(metadata: Mapping[str, str]) -> Iterator[str]:
    module, arguments = metadata.get("ss_network_module", ""), metadata.get("ss_network_args", "")
    if module:
        text = "" if arguments in ("", "{}", "None") else f" {arguments}"
        yield f"network: {module}{text}"
    noise = [
        f"{key.removeprefix('ss_')} {metadata[key]}"
        for key in ("ss_noise_offset", "ss_min_snr_gamma", "ss_loss_type", "ss_timestep_sampling", "ss_clip_skip")
        if metadata.get(key, "None") not in ("None", "", "False", "0")
    ]
    if noise:
        yield f"objective: {', '.join(noise)}"
    for key, word in (("modelspec.trigger_phrase", "trigger"), ("ss_training_comment", "comment")):
        if metadata.get(key, "None") not in ("None", ""):
            yield f"{word}: {metadata[key]}"
    tags = _count_tags(metadata.get("ss_tag_frequency", ""))
    if tags:
        yield "most frequent tags: " + ", ".join(f"{tag} ({count})" for tag, count in tags)


def _count_tags(text: str) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    try:
        for folder in json.loads(text or "{}").values():
            counts.update({str(tag).strip(): int(count) for tag, count in folder.items()})
    except (ValueError, AttributeError, TypeError):
        return []
    return counts.most_common(8)
