"""Reopens a LoRA file, in any of the formats, and says everything that is wrong with it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from .keys import find_wrapper_names
from .updates import ALPHA, COMFY_SUFFIXES, DOWN, KOHYA_SUFFIXES, UP, ModuleUpdate, parse_tensor_key

REQUIRED_TENSORS: Mapping[str, tuple[str, ...]] = {
    "lora": (DOWN, UP), "dora": (DOWN, UP), "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "oft": ("oft_R",), "boft": ("boft_R", "boft_s"),
}  # fmt: skip
"""What must be there of each kind; halves of a LoKr may be whole or in two."""
ZERO_INIT_TENSORS = (UP, "hada_w2_b", "lokr_w1", "lokr_w1_a", "oft_R", "boft_R")
"""What is zero at the start of training."""


class InvalidAdapterFileError(UserError):
    """A LoRA file that was just written is not what it should be; it was not put in place of an older one."""


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InvalidAdapterFileError(f"{path}: cannot be read as safetensors: {error}") from None


def verify_adapter_file(path: Path, expected: Mapping[str, Tensor], metadata: Mapping[str, str], is_trained: bool = True) -> None:
    """Raise unless the file holds exactly ``expected``, loaders will understand it, and it changes the model.

    ``trained`` false allows what is zero: a file from before the first step, or of another program, which may have
    begun with zeros elsewhere.
    """
    tensors, written = read_safetensors(path)
    problems = [*_compare_tensors(tensors, expected), *_validate_tensors(tensors, is_trained)]
    if not problems and is_trained and not _has_nonzero_update(tensors):
        problems.append("every lora_up or lora_B is zero: the LoRA does nothing")
    if written != metadata:
        keys = sorted(key for key in {*written, *metadata} if written.get(key) != metadata.get(key))
        problems.append(f"metadata differs: {', '.join(keys[:3])}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise InvalidAdapterFileError(f"{path.name} is not right: {'; '.join(problems[:5])}{more}")


def _compare_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    """Against what was to be written."""
    for key in sorted(expected.keys() - tensors.keys()):
        yield f"{key} is missing"
    for key in sorted(tensors.keys() - expected.keys()):
        yield f"{key} should not be there"
    for key in sorted(tensors.keys() & expected.keys()):
        found, wanted = tensors[key], expected[key]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            yield f"{key} is {_format_shape(found)} and should be {_format_shape(wanted)}"
        elif not torch.equal(found, wanted) and bool(wanted.isfinite().all()):
            yield f"{key} has other values than the model in memory"


def _validate_tensors(tensors: Mapping[str, Tensor], is_trained: bool) -> Iterator[str]:
    """Against what any loader needs."""
    if not tensors:
        yield "there is nothing in it"
    for key in find_wrapper_names(tensors):
        yield f"{key}: no loader knows this name"
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        place = parse_tensor_key(key)
        if place is None:
            yield f"{key}: no loader knows this name"
            continue
        modules.setdefault(place[0], {})[place[1]] = tensor
        if not bool(tensor.isfinite().all()):
            yield f"{key} has values that are not finite"
        elif not bool(tensor.any()) and (place[1] == ALPHA or (is_trained and place[1] not in ZERO_INIT_TENSORS)):
            yield f"{key} is zero"
    # A file for diffusers may hold a few modules once more, for ComfyUI; these have sd-scripts' names and no alpha.
    is_kohya = any(key.endswith(".lora_down.weight") for key in tensors) and not any(
        key.endswith(".lora_A.weight") for key in tensors
    )
    ends = KOHYA_SUFFIXES if is_kohya else COMFY_SUFFIXES
    has_alphas = ends is KOHYA_SUFFIXES or any(ALPHA in found for found in modules.values())
    for module, found in sorted(modules.items()):
        yield from _validate_module(module, found, ends, has_alphas)


def _validate_module(
    module: str, tensors: Mapping[str, Tensor], suffixes: Mapping[str, str], has_alphas: bool
) -> Iterator[str]:
    kind = ModuleUpdate(tensors, 0).adapter_type
    wanted = (
        [REQUIRED_TENSORS[kind]]
        if kind != "lokr"
        else [
            (f"lokr_{half}",) if f"lokr_{half}" in tensors else (f"lokr_{half}_a", f"lokr_{half}_b")
            for half in ("w1", "w2")
        ]
    )
    for name in (*(name for names in wanted for name in names), *([ALPHA] if has_alphas else [])):
        if name not in tensors:
            yield f"{module} has no {suffixes.get(name, name)}"
    down, up = tensors.get(DOWN), tensors.get(UP)
    if down is not None and up is not None and down.shape[:1] != up.shape[1:2]:
        first, second = (suffixes[name].partition(".")[0] for name in (DOWN, UP))
        yield f"{module}: rank {down.shape[0]} in {first}, {up.shape[1]} in {second}"


def _has_nonzero_update(tensors: Mapping[str, Tensor]) -> bool:
    """Whether anything in it has left the zero at which training begins."""
    places = ((parse_tensor_key(key), tensor) for key, tensor in tensors.items())
    return any(place is not None and place[1] in ZERO_INIT_TENSORS and bool(tensor.any()) for place, tensor in places)


def _format_shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
