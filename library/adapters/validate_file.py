"""What in a LoRA file does not fit a model: layers of other models, unsupported kinds, wrong sizes.

Checks that need no model are in ``file_reader``.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from .state_dict import DOWN, MAGNITUDE, MID, UP, ModuleAdapter

UNREAD_KINDS: Mapping[str, str] = {
    r"\.on_input$": "(IA)3",
    r"\.lora_embedding_[AB]$|\.lora_embedding_[AB]\.": "LoRA of embeddings",
    r"\.lora_(B|up)\.bias$": "LoRA with a bias (peft's lora_bias)",
    r"\.oft_blocks\.\d+$": "OFT of sd-scripts for FLUX.1 (networks.oft_flux)",
    r"\.lora_E$|\.ranknum$": "AdaLoRA",
    r"\.vera_lambda_[bd]$": "VeRA",
    r"\.(set|reshape)_weight$": "whole weights (ComfyUI's set_weight)",
    r"^lora_controlnet$": "ControlLoRA",
    r"(^|\.)(ip_adapter|image_proj)\.": "IP-Adapter",
    r"^(string_to_param|emb_params|clip_[lg]|t5xxl)$": "a textual inversion embedding",
    r"^(model\.diffusion_model|first_stage_model|cond_stage_model|conditioner)\.": "a whole checkpoint",
}
"""Pattern of keys -> what they are, where it is not read."""


def describe_unknown_keys(keys: Sequence[str], total: int, title: str = "") -> str:
    """What the unknown keys of a file are."""
    for pattern, kind in UNREAD_KINDS.items():
        if found := [key for key in keys if re.search(pattern, key)]:
            return f"contains {kind}, which is not supported: {found[0]}{_format_more(found)}"
    return f"{len(keys)} of {total} keys do not belong to this model{title}, for example {keys[0]}"


def _format_more(found: Sequence[str]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""


def describe_origin(metadata: Mapping[str, str]) -> str:
    """For which model a file says it is, for messages; may be empty."""
    stated = metadata.get("ss_base_model_version") or metadata.get("modelspec.architecture", "").partition("/")[0]
    return f"; its metadata says it is for {stated[:60]}" if stated else ""


_RANK_PAIRS: Sequence[tuple[str, int, str, int]] = (
    (DOWN, 0, UP, 1),
    ("hada_w1_b", 0, "hada_w2_b", 0),
    ("hada_w1_b", 1, "hada_w2_b", 1),
    ("a1", 1, "a2", 0),
    ("b1", 1, "b2", 0),
)
"""Dimensions that have to be equal."""

_FACTORS = (("hada_w1", "hada_t1"), ("hada_w2", "hada_t2"), ("lokr_w1", ""), ("lokr_w2", "lokr_t2"))
"""Factors that are full, decomposed into ``_a`` and ``_b``, or with a Tucker core."""

_MATRICES = (
    DOWN,
    UP,
    MID,
    "a1",
    "a2",
    "b1",
    "b2",
    *(f"{name}{end}" for name, _ in _FACTORS for end in ("", "_a", "_b")),
)


def find_missing_tensors(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Parts of an update without which it cannot be computed."""
    adapter_type = ModuleAdapter(tensors, 0).adapter_type
    if adapter_type in ("lora", "dora"):
        yield from (f"lora_{name}" for name in (DOWN, UP) if name not in tensors)
    elif adapter_type in ("loha", "lokr"):
        for name, _ in _FACTORS[:2] if adapter_type == "loha" else _FACTORS[2:]:
            if name not in tensors:
                yield from (f"{name}{end}" for end in ("_a", "_b") if f"{name}{end}" not in tensors)
    elif adapter_type == "glora":
        yield from (f"{name}.weight" for name in ("a1", "a2", "b1", "b2") if name not in tensors)
    elif adapter_type == "diag-oft" and "oft_blocks" not in tensors:
        yield "oft_blocks"


def find_rank_problems(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Tensors of one module that do not fit each other."""
    for name in _MATRICES:
        if name in tensors and tensors[name].dim() < 2:
            yield f"{name} is {list(tensors[name].shape)} and not a matrix"
            return
    for first, axis, second, other in _RANK_PAIRS:
        if first in tensors and second in tensors and tensors[first].shape[axis] != tensors[second].shape[other]:
            sizes = tensors[first].shape[axis], tensors[second].shape[other]
            yield f"{_format_name(first)} has size {sizes[0]} and {_format_name(second)} {sizes[1]}"
            return
    for name, core in _FACTORS:
        if f"{name}_a" not in tensors or f"{name}_b" not in tensors:
            continue
        first_rank = tensors[f"{name}_a"].shape[0 if core in tensors else 1]
        if first_rank != len(tensors[f"{name}_b"]):
            yield f"{name}_a has rank {first_rank} and {name}_b {len(tensors[f'{name}_b'])}"
            return
    if (blocks := tensors.get("oft_blocks")) is not None and (
        blocks.dim() not in (3, 4) or len({*blocks.shape[-2:]}) > 1
    ):
        yield f"oft_blocks is {list(blocks.shape)} and not square matrices"


def _format_name(name: str) -> str:
    return {DOWN: "lora_down", UP: "lora_up"}.get(name, name)


def find_size_problems(updates: Mapping[str, ModuleAdapter], shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Layers whose sizes are others in the file than in the model; ``shapes`` are the weights' by layer."""
    for name, update in updates.items():
        shape = shapes.get(name)
        if shape is None:
            yield f"{name} has no weights in this model"
        elif problem := _describe_misfit(update, shape):
            yield f"{name} {problem}"


def _describe_misfit(update: ModuleAdapter, shape: Sequence[int]) -> str | None:
    outputs, inputs = shape[0], math.prod(shape[1:])
    own_outputs, own_inputs = update.shape
    if update.adapter_type == "diag-oft":
        blocks = update.tensors["oft_blocks"].shape
        own_outputs, own_inputs = blocks[-3] * blocks[-1], inputs
    elif update.adapter_type == "oft":
        blocks = update.tensors["oft_R"].shape
        own_outputs, own_inputs = outputs, blocks[0] * (1 + math.isqrt(1 + 8 * blocks[1])) // 2
    elif update.adapter_type == "norm" and len(shape) != 1:
        return "is a norm layer in the file, but none in the model"
    if (own_outputs, own_inputs) == (0, 0):
        return None
    if MAGNITUDE in update.tensors and update.tensors[MAGNITUDE].numel() != outputs:
        return f"has {update.tensors[MAGNITUDE].numel()} magnitudes in the file and {outputs} outputs in the model"
    if own_inputs != inputs:
        return f"has {own_inputs} inputs in the file and {inputs} in the model"
    if own_outputs != outputs:
        return f"has {own_outputs} outputs in the file and {outputs} in the model"
    return None


def describe_size_problems(problems: Sequence[str], total: int, metadata: Mapping[str, str]) -> str:
    """One line for all layers of wrong size."""
    origin = describe_origin(metadata) or "; it may be a LoRA of another model"
    if len(problems) < total / 2:
        origin = "; the file is damaged, or was put together from several"
    return f"{len(problems)} of {total} layers have other sizes than this model: {problems[0]}{origin}"


def list_layer_shapes(named_weights: Iterable[tuple[str, object]]) -> dict[str, tuple[int, ...]]:
    """Layer -> shape of its weight, from the layers of a model."""
    found = ((name, getattr(layer, "weight", None)) for name, layer in named_weights)
    return {name: tuple(weight.shape) for name, weight in found if weight is not None}
