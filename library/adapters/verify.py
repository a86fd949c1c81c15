"""Reopens a LoRA file, with the names of sd-scripts or of diffusers, and says everything that is wrong with it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from .keys import stray

_KOHYA = ("lora_down.weight", "lora_up.weight", "alpha")
_DIFFUSERS = ("lora_A.weight", "lora_B.weight")  # what alpha does is in lora_B
_UP = ("lora_up", "lora_B")


class BrokenFileError(UserError):
    """A LoRA file that was just written is not what it should be; it was not put in place of an older one."""


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise BrokenFileError(f"{path}: cannot be read as safetensors: {error}") from None


def verify(path: Path, expected: Mapping[str, Tensor], metadata: Mapping[str, str], trained: bool = True) -> None:
    """Raise unless the file holds exactly ``expected``, loaders will understand it, and it changes the model.

    ``trained`` false allows an update of zero: a file from before the first step.
    """
    tensors, written = read(path)
    problems = [*_differences(tensors, expected), *_faults(tensors)]
    if not problems and trained and not any(bool(each.any()) for key, each in tensors.items() if _is_up(key)):
        problems.append("every lora_up or lora_B is zero: the LoRA does nothing")
    if written != metadata:
        keys = sorted(key for key in {*written, *metadata} if written.get(key) != metadata.get(key))
        problems.append(f"metadata differs: {', '.join(keys[:3])}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise BrokenFileError(f"{path.name} is not right: {'; '.join(problems[:5])}{more}")


def _differences(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    """Against what was to be written."""
    for key in sorted(expected.keys() - tensors.keys()):
        yield f"{key} is missing"
    for key in sorted(tensors.keys() - expected.keys()):
        yield f"{key} should not be there"
    for key in sorted(tensors.keys() & expected.keys()):
        found, wanted = tensors[key], expected[key]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            yield f"{key} is {_shape(found)} and should be {_shape(wanted)}"
        elif not torch.equal(found, wanted) and bool(wanted.isfinite().all()):
            yield f"{key} has other values than the model in memory"


def _faults(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Against what any loader needs."""
    if not tensors:
        yield "there is nothing in it"
    for key in stray(tensors):
        yield f"{key}: no loader knows this name"
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            yield f"{key} has values that are not finite"
        elif not _is_up(key) and not bool(tensor.any()):
            yield f"{key} is zero"
    ends = _DIFFUSERS if any(key.endswith(_DIFFUSERS) for key in tensors) else _KOHYA
    for module in sorted({_module(key, ends) for key in tensors}):
        yield from _module_faults(module, tensors, ends)


def _module(key: str, ends: Sequence[str]) -> str:
    """What stands before one of the ends; a key that ends otherwise is taken whole, and then lacks them all."""
    return next((key.removesuffix(f".{end}") for end in ends if key.endswith(f".{end}")), key)


def _is_up(key: str) -> bool:
    return any(f".{part}." in key for part in _UP)


def _module_faults(module: str, tensors: Mapping[str, Tensor], ends: Sequence[str]) -> Iterator[str]:
    found = {end: tensors.get(f"{module}.{end}") for end in ends}
    yield from (f"{module} has no {end}" for end, tensor in found.items() if tensor is None)
    down, up = (found[end] for end in ends[:2])
    if down is not None and up is not None and down.shape[:1] != up.shape[1:2]:
        first, second = (end.partition(".")[0] for end in ends[:2])
        yield f"{module}: rank {down.shape[0]} in {first}, {up.shape[1]} in {second}"


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
