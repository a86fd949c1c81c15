"""What in a LoRA file does not fit a model: layers of other models, unsupported kinds, wrong sizes.

Checks that need no model are in ``file_reader``.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from .component_key_names import ComponentKeys
from .module_adapter import INPUT_MAGNITUDE, ModuleAdapter, parse_tensor_key
from .original_module_names import ModuleGroup
from .validate_tensors import find_tensor_problems

MAX_PROBLEMS_SHOWN = 3

_WHOLE_MODEL = "a whole model"
UNREAD_KINDS: Mapping[str, str] = {
    r"\.on_input$": "(IA)3",
    r"\.lora_embedding_[AB]$|\.lora_embedding_[AB]\.": "LoRA of embeddings",
    r"\.lora_(B|up)\.bias$": "LoRA with a bias (peft's lora_bias)",
    r"\.oft_blocks\.\d+$": "OFT of sd-scripts for FLUX.1 (networks.oft_flux)",
    r"\.lora_E$|\.ranknum$": "AdaLoRA",
    r"\.vera_lambda_[bd]$": "VeRA",
    r"\.set_weight$": "weights that replace those of the model (ComfyUI's set_weight)",
    r"\.reshape_weight$": "layers that change the shape of the model's (ComfyUI's reshape_weight)",
    r"^lora_controlnet$": "ControlLoRA",
    r"(^|\.)(ip_adapter|image_proj)\.": "IP-Adapter",
    r"^(string_to_param|emb_params|clip_[lg]|t5xxl)$": "a textual inversion embedding",
    r"^(model\.diffusion_model|first_stage_model|cond_stage_model|conditioner)\.": _WHOLE_MODEL,
}
"""What the keys are that match a pattern, where it is not read."""


def group_unread_keys(keys: Iterable[str]) -> dict[str, list[str]]:
    """The keys of what is not read, by what it is."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        kind = next((kind for pattern, kind in UNREAD_KINDS.items() if re.search(pattern, key)), None)
        if kind is not None:
            groups.setdefault(kind, []).append(key)
    return groups


def describe_unknown_keys(keys: Sequence[str], total: int, model: str = "this model") -> str:
    """Describe the unknown keys of a file."""
    if unread := _find_unread_kind(keys):
        return _describe_unread_kind(*unread)
    return f"{len(keys)} of {total} keys do not belong to {model}, for example {keys[0]}"


def _find_unread_kind(keys: Sequence[str]) -> tuple[str, list[str]] | None:
    """Find the first kind of weights that is not read, and its keys."""
    for pattern, kind in UNREAD_KINDS.items():
        if found := [key for key in keys if re.search(pattern, key)]:
            return kind, found
    return None


def _describe_unread_kind(kind: str, keys: Sequence[str]) -> str:
    return f"contains {kind}, which is not supported: {keys[0]}{_format_more(keys)}"


def describe_foreign_keys(keys: Sequence[str]) -> str | None:
    """Return why a file with these keys is no LoRA file, which its header tells before its tensors are read."""
    if not keys:
        return "it has no tensors"
    unread = _find_unread_kind(keys)
    is_whole_model = unread is not None and unread[0] == _WHOLE_MODEL
    if not is_whole_model and any(parse_tensor_key(key) for key in keys):
        return None
    if unread is None:
        return f"not a LoRA file: none of its {len(keys)} tensors has the name of a LoRA weight; the first is {keys[0]}"
    return f"not a LoRA file: it {_describe_unread_kind(*unread)}"


def _format_more(found: Sequence[str]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""


def describe_origin(metadata: Mapping[str, str]) -> str:
    """Name the model that a file says it is for, at the end of a message; the text may be empty."""
    stated = metadata.get("ss_base_model_version") or metadata.get("modelspec.architecture", "").partition("/")[0]
    return f"; its metadata says it is for {stated[:60]}" if stated else ""


def find_size_problems(
    modules: Mapping[str, Mapping[str, Tensor]],
    lookup: Mapping[str, tuple[ComponentKeys, ModuleGroup]],
    shapes: Mapping[str, Sequence[int]],
) -> Iterator[str]:
    """Layers whose sizes are others in the file than in the model; ``shapes`` are the weights' by layer.

    ``modules`` are the layers under their names in the file.  Layers that are damaged fit no model and are left out.
    """
    for name, tensors in modules.items():
        if any(find_tensor_problems(tensors)):
            continue
        component, group = lookup[name]
        parts = [shapes.get(f"{component.name}.{module}") for module in group.modules if module is not None]
        known = [part for part in parts if part is not None]
        if len(known) < len(group.modules):
            whole = "no weights" if not known else "only some of its parts"
            yield f"{name} has {whole} in this model"
        else:
            shape = (sum(part[0] for part in known), *known[0][1:])
            if problem := _describe_misfit(ModuleAdapter(tensors, 0), shape):
                yield f"{name} {problem}"


def _describe_misfit(update: ModuleAdapter, shape: Sequence[int]) -> str | None:
    outputs, inputs = shape[0], math.prod(shape[1:])
    own_outputs, own_inputs = update.shape
    match update.adapter_type:
        case "diag-oft":
            blocks = update.tensors["oft_blocks"].shape
            own_outputs, own_inputs = blocks[-3] * blocks[-1], inputs
        case "oft":
            blocks = update.tensors["oft_R"].shape
            own_outputs, own_inputs = outputs, blocks[0] * (1 + math.isqrt(1 + 8 * blocks[1])) // 2
        case "boft":
            blocks = update.tensors["boft_R"].shape
            own_outputs, own_inputs = update.tensors["boft_s"].numel(), blocks[1] * blocks[2]
        case "full" if "diff" not in update.tensors:
            own_outputs, own_inputs = len(update.tensors["diff_b"]), inputs
        case "norm" if len(shape) != 1:
            return "is a norm layer in the file, but none in the model"
    if own_inputs != inputs:
        return f"has {own_inputs} inputs in the file and {inputs} in the model"
    if own_outputs != outputs:
        return f"has {own_outputs} outputs in the file and {outputs} in the model"
    scales = update.tensors.get(INPUT_MAGNITUDE)
    if scales is not None and scales.numel() != shape[1]:
        return f"has a dora_scale for {scales.numel()} inputs in the file and {shape[1]} in the model"
    kernel = update.kernel
    if kernel and kernel != tuple(shape[2:]) and (len(shape) == 4 or math.prod(kernel) > 1):
        return f"has a kernel of {kernel[0]}x{kernel[1]} in the file, and another or none in the model"
    return None


def describe_size_problems(problems: Sequence[str], total: int, metadata: Mapping[str, str]) -> str:
    """One line for all layers of wrong size."""
    origin = describe_origin(metadata) or "; it may be a LoRA of another model"
    if len(problems) < total / 2:
        origin = "; the file is damaged, or was put together from several"
    return f"{len(problems)} of {total} layers have other sizes than this model: {problems[0]}{origin}"


def list_layer_shapes(named_weights: Iterable[tuple[str, object]]) -> dict[str, tuple[int, ...]]:
    """List the shape of each layer's weight, from the layers of a model."""
    found = ((name, getattr(layer, "weight", None)) for name, layer in named_weights)
    return {name: tuple(weight.shape) for name, weight in found if weight is not None}


def join_messages(problems: Iterable[str]) -> str:
    """The first problems in one line, and how many there are more."""
    found = list(problems)
    more = f" (and {len(found) - MAX_PROBLEMS_SHOWN} more)" if len(found) > MAX_PROBLEMS_SHOWN else ""
    return "; ".join(found[:MAX_PROBLEMS_SHOWN]) + more
