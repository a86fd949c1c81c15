"""Tell from the names and types of a checkpoint's tensors which weights are stored quantized, and how; no torch.

Each format keeps the numbers that its values are multiplied with in tensors beside the weight:

- scaled fp8 of ComfyUI, musubi-tuner and others: ``X.weight`` in float8 with ``X.scale_weight`` or ``X.weight_scale``
  (of the whole weight, of each row, or of blocks of a row), a marker ``scaled_fp8`` or ``X.comfy_quant``, and
  ``X.scale_input`` or ``X.input_scale``, which only inference in fp8 uses;
- fp8 without scales;
- int8 with ``X.weight_scale``, or with bitsandbytes' ``X.SCB``;
- bitsandbytes' nf4 and fp4: ``X.weight.absmax``, ``.quant_map``, ``.quant_state.bitsandbytes__nf4``, and for absmax
  that is quantized itself ``.nested_absmax`` and ``.nested_quant_map``;
- torchao's int8 and fp8: ``X._weight_qdata`` and ``X._weight_scale``, and the class of ``X.weight`` in the metadata.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .model_configs import ModelError

FP8_TYPES = ("F8_E4M3", "F8_E5M2")
FLOAT_TYPES = ("F32", "F16", "BF16")
SCALE_ENDS = ("scale_weight", "weight_scale", "weight_scale_inv", "SCB")
"""The ends of the names of a scale, in place of ``weight``."""
OTHER_ENDS = ("scale_input", "input_scale", "comfy_quant", "weight_format", "weight_scale_2")
STATE_PATTERN = re.compile(r"(?P<weight>.*)\.quant_state\.bitsandbytes__(?P<name>nf4|fp4)")
STATE_ENDS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
MARKER = "scaled_fp8"
"""The name of a tensor that only says that a file is scaled fp8, with or without prefix."""
READ_QUANTS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
"""The formats of ``comfy_quant`` that are read."""

TORCHAO_CLASSES = "Int8Tensor", "Float8Tensor"
"""The classes of torchao's weights that are read."""
TORCHAO_VALUES, TORCHAO_SCALE = "_qdata", "_scale"
TORCHAO_ACTIVATIONS = "_act_quant_scale", "_act_quant_zero_point"
"""The ends of the names of tensors that only inference with quantized inputs uses."""
TORCHAO_ZERO, TORCHAO_FACTORS = "_zero_point", "_act_pre_scale"
"""The ends of the names of tensors that change what the values stand for: only zero points that are 0 are read."""

OTHER_FILES = "use a file of this model in bf16, fp16, fp8 or GGUF"


@dataclass(frozen=True)
class StoredFormat:
    """How one quantized weight is stored."""

    name: str
    """``fp8``, ``int8``, ``nf4``, ``fp4``, ``scaled`` (of ordinary floats), or a type of GGUF: ``Q4_K``."""
    shape: tuple[int, ...]
    """The shape of the weight, which that of its tensor may not be."""
    scale: str | None = None
    """The key of its scale."""
    state: str | None = None
    """The key of bitsandbytes' description of it."""


def find_stored_formats(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    read_bytes: Callable[[str], bytes],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, StoredFormat]:
    """Find the quantized weights of a safetensors file; ``read_bytes`` reads a small tensor of it.

    Formats that are not read raise ``ModelError``.
    """
    _reject_unread_formats(shapes, read_bytes)
    _reject_unread_metadata((metadata or {}).get("_quantization_metadata"))
    formats, unread = {}, _find_unread_scales(shapes)
    for state in shapes:
        if match := STATE_PATTERN.fullmatch(state):
            shape = tuple(_read_state(state, read_bytes)["shape"])
            formats[match["weight"]] = StoredFormat(match["name"], shape, state=state)
    for key, shape in shapes.items():
        if key in formats or not key.endswith("weight") or len(shape) < 2:
            continue
        base = key.removesuffix("weight")
        scale = next((base + end for end in SCALE_ENDS if base + end in shapes), None)
        if dtypes[key] in FP8_TYPES:
            if base in unread:
                raise ModelError(f"has fp8 weights with {unread[base]}, which is not read; {OTHER_FILES}")
            formats[key] = StoredFormat("fp8", shape, scale)
        elif dtypes[key] == "I8" and scale is not None:
            formats[key] = StoredFormat("int8", shape, scale)
        elif dtypes[key] in FLOAT_TYPES and scale is not None and not scale.endswith("SCB"):
            formats[key] = StoredFormat("scaled", shape, scale)  # a layer that was left out when others became fp8
    return formats


def find_torchao_weights(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    metadata: Mapping[str, str],
    read_bytes: Callable[[str], bytes],
) -> dict[str, tuple[str, StoredFormat]]:
    """Find the weights of torchao in a safetensors file: the keys of their values, and their formats."""
    found = {}
    for key, shape in shapes.items():
        base, _, leaf = key.rpartition("._")
        if not base or not leaf.endswith(TORCHAO_VALUES):
            continue
        start = key.removesuffix(TORCHAO_VALUES)
        name = f"{base}.{leaf.removesuffix(TORCHAO_VALUES)}"
        try:
            kind = str(json.loads(metadata[name])["_type"])
        except (ValueError, KeyError, TypeError):
            kind = "an unknown class"
        is_other = start + TORCHAO_FACTORS in shapes or start + TORCHAO_SCALE not in shapes
        is_other |= start + TORCHAO_ZERO in shapes and any(read_bytes(start + TORCHAO_ZERO))
        if kind not in TORCHAO_CLASSES or is_other or dtypes[key] not in (*FP8_TYPES, "I8"):
            raise ModelError(f"has weights of torchao in {kind} with values that are not read; {OTHER_FILES}")
        quant_type = "int8" if dtypes[key] == "I8" else "fp8"
        found[name] = key, StoredFormat(quant_type, shape, start + TORCHAO_SCALE)
    return found


def _find_unread_scales(keys: Iterable[str]) -> dict[str, str]:
    """Find scales of other names than those that are read, by the start of the keys of their layer."""
    found = {}
    for key in keys:
        base, _, end = key.rpartition(".")
        if "scale" in end and end not in (*SCALE_ENDS, *OTHER_ENDS):
            found[base.removesuffix(".weight") + "."] = key
    return found


def list_side_tensors(keys: Iterable[str]) -> set[str]:
    """List the tensors that belong to a quantized weight, and are none of the model."""
    keys = set(keys)
    found = {key for key in keys if key.rpartition(".")[2] == MARKER}
    for key in keys:
        base, _, end = key.rpartition(".")
        if end in (*SCALE_ENDS, *OTHER_ENDS) and f"{base}.weight" in keys:
            found.add(key)
        elif (end in STATE_ENDS and base in keys) or (
            (match := STATE_PATTERN.fullmatch(key)) and match["weight"] in keys
        ):
            found.add(key)
    return found


def _read_state(key: str, read_bytes: Callable[[str], bytes]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(read_bytes(key))
        state["shape"], state["blocksize"] = [int(each) for each in state["shape"]], int(state["blocksize"])
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"is damaged: {key} does not describe its weight; download or copy the file again") from None
    return state


def _reject_unread_formats(shapes: Mapping[str, tuple[int, ...]], read_bytes: Callable[[str], bytes]) -> None:
    """A quantized file may have thousands of marks, of which all but a few are equal: those of one length."""
    read = set[int]()
    for key, shape in shapes.items():
        if key.endswith(".comfy_quant") and shape and shape[0] not in read:
            read.add(shape[0])
            try:
                mark = json.loads(read_bytes(key))
            except ValueError:
                mark = None
            _reject_unread_mark(mark, "comfy_quant")
        if key.endswith(".weight_scale_2"):
            raise ModelError(f"has weights in NVFP4 (weight_scale_2), which is not read; {OTHER_FILES}")


def _reject_unread_metadata(text: str | None) -> None:
    """Reject what ComfyUI's description of a file's layers in its metadata names and is not read."""
    if text is None:
        return
    try:
        layers = list(json.loads(text)["layers"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        layers = [None]
    for layer in layers:
        _reject_unread_mark(layer, "_quantization_metadata")


def _reject_unread_mark(mark: Any, source: str) -> None:
    """Reject the format of one layer; weights that were rotated before they were rounded (ConvRot) are not read."""
    mark = {"format": mark} if isinstance(mark, str) else mark
    name = str(mark.get("format")) if isinstance(mark, dict) else "an unknown format"
    if isinstance(mark, dict) and (mark.get("convrot") or (mark.get("params") or {}).get("convrot")):
        name = f"{name} with ConvRot"
    if name not in READ_QUANTS:
        raise ModelError(f"has weights in {name} ({source}), which is not read; {OTHER_FILES}")
