"""Whether the tensors of one layer in a LoRA file belong together: complete, of one type, and of fitting sizes.

Whether the layer fits a model is checked in ``validate_file``.
"""

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from .module_adapter import (
    BIAS,
    DORA_SCALE,
    DOWN,
    INPUT_MAGNITUDE,
    MAGNITUDE,
    MID,
    TENSOR_NAMES,
    UP,
    ModuleAdapter,
)

_LORA_NAMES = (DOWN, UP, MID)
_TYPES_WITH_MAGNITUDE = {"lora", "loha", "lokr"}
_FACTORS = (("hada_w1", "hada_t1"), ("hada_w2", "hada_t2"), ("lokr_w1", ""), ("lokr_w2", "lokr_t2"))
"""Factors that are full, decomposed into ``_a`` and ``_b``, or with a Tucker core."""

_DIMENSIONS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys((DOWN, UP, "a1", "a2", "b1", "b2", "lokr_w2", "lokr_w2_b"), (2, 4)),
    **dict.fromkeys(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), (2,)),
    **dict.fromkeys(("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "oft_R", "boft_s"), (2,)),
    **dict.fromkeys((MID, "bm", "hada_t1", "hada_t2", "lokr_t2", "boft_R"), (4,)),
    **dict.fromkeys(("w_norm", "b_norm", "diff_b"), (1,)),
    "diff": (1, 2, 3, 4, 5),
    "oft_blocks": (3, 4),
}
"""The numbers of dimensions that a tensor of each name may have."""

_EQUAL_SIZES: tuple[tuple[str, int, str, int], ...] = (
    (DOWN, 0, UP, 1),
    (MID, 0, UP, 1),
    (MID, 1, DOWN, 0),
    ("hada_w1_b", 0, "hada_w2_b", 0),
    ("hada_w1_b", 1, "hada_w2_b", 1),
    ("hada_t1", 2, "hada_t2", 2),
    ("hada_t1", 3, "hada_t2", 3),
    ("a1", 1, "a2", 0),
    ("a1", 0, "a2", 1),
    ("a2", 1, "b2", 1),
    ("b1", 1, "b2", 0),
    ("bm", 0, "b1", 1),
    ("bm", 1, "b2", 0),
    ("w_norm", 0, "b_norm", 0),
    ("diff", 0, "diff_b", 0),
)
"""Tensor and dimension, and the tensor and dimension of the same size, where the file has both."""


def find_tensor_problems(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the first reason why a layer's update cannot be computed; tensors are named without their layer."""
    for find in (_find_mixed_types, _find_missing_tensors, _find_odd_dimensions, _find_unequal_sizes, _find_odd_blocks):
        if problems := list(find(tensors)):
            yield from problems
            return
    yield from _find_odd_vectors(tensors)


def _find_odd_vectors(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Magnitudes and biases of another length than the layer's."""
    outputs, _ = ModuleAdapter(tensors, 0).shape
    if BIAS in tensors and outputs and len(tensors[BIAS]) != outputs:
        yield f"{BIAS} has {len(tensors[BIAS])} values, and the layer {outputs} outputs"
    magnitude = tensors.get(MAGNITUDE)
    if magnitude is not None:
        if magnitude.numel() != outputs or (magnitude.dim() == 2 and magnitude.shape[0] != outputs):
            yield f"{DORA_SCALE} is {list(magnitude.shape)}, and the layer has {outputs} outputs"
    magnitude = tensors.get(INPUT_MAGNITUDE)
    if magnitude is not None:
        # The tensors of a LoHa or LoKr do not tell inputs and kernel apart.
        inputs = tensors[DOWN].shape[1] if DOWN in tensors else ModuleAdapter(tensors, 0).shape[1]
        if inputs % magnitude.numel() or (DOWN in tensors and magnitude.numel() != inputs):
            yield f"{DORA_SCALE} is {list(magnitude.shape)}, and the layer has {inputs} inputs"


def _find_mixed_types(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Say where a layer has tensors of several adapter types, of which one would be used and the others ignored."""
    names = {"lora": _LORA_NAMES, **TENSOR_NAMES}
    types = {kind: [name for name in each if name in tensors] for kind, each in names.items()}
    found = {kind: each for kind, each in types.items() if each}
    if len(found) > 1 and found.get("full") == [BIAS]:
        del found["full"]
    if len(found) > 1:
        listed = " and ".join(f"{kind} ({', '.join(map(_format_name, each))})" for kind, each in found.items())
        yield f"has tensors of {listed}; a layer with several types is not supported"
    elif {MAGNITUDE, INPUT_MAGNITUDE} & tensors.keys() and found and not found.keys() & _TYPES_WITH_MAGNITUDE:
        yield f"has a {DORA_SCALE} and is of type {next(iter(found))}, which has none"
    for name, _ in _FACTORS:
        if name in tensors and (more := [f"{name}{end}" for end in ("_a", "_b") if f"{name}{end}" in tensors]):
            yield f"has {name} and {more[0]}, of which only one can be used"


def _find_missing_tensors(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    adapter_type = ModuleAdapter(tensors, 0).adapter_type
    required: tuple[str, ...] = ()
    match adapter_type:
        case "lora" | "dora" | "input-dora":
            required = (DOWN, UP)
        case "loha" | "lokr":
            factors = _FACTORS[:2] if adapter_type == "loha" else _FACTORS[2:]
            required = tuple(f"{name}{end}" for name, _ in factors if name not in tensors for end in ("_a", "_b"))
            if "hada_t1" in tensors or "hada_t2" in tensors:
                required += ("hada_t1", "hada_t2")
        case "glora":
            required = ("a1", "a2", "b1", "b2")
        case "diag-oft":
            required = ("oft_blocks",)
        case "norm":
            required = ("w_norm",)
        case "oft" | "boft":
            required = TENSOR_NAMES[adapter_type]
    yield from (f"{_format_name(name)} is missing" for name in required if name not in tensors)


def _find_odd_dimensions(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        expected = _DIMENSIONS.get(name)
        if expected is not None and tensor.dim() not in expected:
            counts = f"{expected[0]} to {expected[-1]}" if len(expected) > 2 else " or ".join(map(str, expected))
            yield f"{_format_name(name)} is {list(tensor.shape)}; it needs {counts} dimension{'s' * (expected != (1,))}"
        elif tensor.dim() == 4 and (name == UP or (name == DOWN and MID in tensors)) and tensor[0, 0].numel() > 1:
            yield f"{_format_name(name)} is {list(tensor.shape)}; its kernel has to be 1x1"


def _find_unequal_sizes(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    pairs = [*_EQUAL_SIZES]
    for name, core in _FACTORS:
        pairs += [(core, 0, f"{name}_a", 0), (core, 1, f"{name}_b", 0)]
        pairs += [(f"{name}_a", 0 if core in tensors else 1, f"{name}_b", 0)]
    axis = 1 if "hada_t1" in tensors else 0
    for first, one, second, other in (*pairs, ("hada_w1_a", axis, "hada_w2_a", axis)):
        if first in tensors and second in tensors:
            sizes = tensors[first].shape[one], tensors[second].shape[other]
            if sizes[0] != sizes[1]:
                yield f"{_format_name(first)} has size {sizes[0]} and {_format_name(second)} {sizes[1]}"
                return


def _find_odd_blocks(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Blocks of OFT and BOFT that are no rotations, or do not cover the outputs."""
    if (triangles := tensors.get("oft_R")) is not None and math.isqrt(n := 1 + 8 * triangles.shape[1]) ** 2 != n:
        yield f"oft_R is {list(triangles.shape)}, whose rows are not the upper triangles of square matrices"
    for name in ("oft_blocks", "boft_R"):
        if name in tensors and tensors[name].shape[-1] != tensors[name].shape[-2]:
            yield f"{name} is {list(tensors[name].shape)} and not square matrices"
            return
    if (blocks := tensors.get("oft_blocks")) is None:
        return
    if blocks.dim() == 4 and (blocks.shape[-1] % 2 or blocks.shape[1] % 2 ** (len(blocks) - 1)):
        count = blocks.shape[1]
        yield f"oft_blocks is {list(blocks.shape)}, which is no butterfly: {count} blocks, {len(blocks)} stages"
    rescale, outputs = tensors.get("rescale"), blocks.shape[-3] * blocks.shape[-1]
    if rescale is not None and rescale.numel() != outputs:
        yield f"rescale has {rescale.numel()} values, and oft_blocks {outputs} outputs"


def _format_name(name: str) -> str:
    if name in _LORA_NAMES:
        return f"lora_{name}"
    return DORA_SCALE if name in (MAGNITUDE, INPUT_MAGNITUDE) else name
