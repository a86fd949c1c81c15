"""Whether a file does in each layer what the adapter in memory does there."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from ..atomic_files import fsync_dir, fsync_file
from ..errors import UserError
from . import lora
from .formats import AdapterFileContents
from .key_names import find_wrapper_names
from .state_dict import ALPHA, COMFY_SUFFIXES, DOWN, KOHYA_SUFFIXES, PEFT_SUFFIXES, UP, ModuleUpdate, parse_tensor_key

UPDATE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""How far the update of a layer may be off, as a share of itself, in a file of this precision."""


@torch.no_grad()
def compare_file_with_model(
    model: nn.Module, contents: AdapterFileContents, alphas: Mapping[str, float]
) -> Iterator[str]:
    """Run each layer on one input, with the weights in memory and with those of the file; say where they differ.

    ``trained`` holds the parts of the pipeline as its children, not in training; it is afterwards as it was.
    """
    parameters = {name: parameter for name, parameter in lora.iter_adapter_parameters(model)}
    ups = {module: parameters.get(f"{module}.{PEFT_SUFFIXES[UP]}") for module in alphas}
    for module in sorted(alphas.keys() ^ contents.alphas.keys()):
        # What does nothing cannot be told from what is not there, in a file that has one LoRA for several modules.
        if module not in alphas or (up := ups[module]) is None or bool(up.any()):
            yield f"{module} is {'missing' if module in alphas else 'not trained'}"
    common = [module for module in alphas if module in contents.alphas]
    yield from (
        f"{module} has alpha {contents.alphas[module]:g} and not {alphas[module]:g}"
        for module in common
        if abs(contents.alphas[module] - alphas[module]) > 1e-6 * alphas[module]
    )
    if strangers := sorted(contents.state_dict.keys() - parameters.keys()):
        yield f"{strangers[0]} is not trained"
        return
    before = {module: _run_layer(model.get_submodule(module)) for module in common}
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for name, tensor in contents.state_dict.items():
            parameters[name].copy_(tensor)
        after = {module: _run_layer(model.get_submodule(module))[0] for module in common}
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    precision = {tensor.dtype for tensor in contents.state_dict.values()}
    tolerance = max(UPDATE_TOLERANCE.get(dtype, 1e-4) for dtype in precision)
    for module, (adapted, plain) in before.items():
        update, error = (adapted - plain).abs().max(), (after[module] - adapted).abs().max()
        noise = 16 * torch.finfo(adapted.dtype).eps * adapted.abs().max()
        if not bool(error <= tolerance * update + noise):
            yield f"{module} does something else in the file: off by {float(error):.2g}, of {float(update):.2g}"


def _run_layer(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """What the layer makes of one input with its adapter, and without."""
    base: Any = layer.base_layer
    frozen = _get_base_weights(layer)
    weight = frozen.get("base_layer.weight", base.weight)  # one that rests elsewhere is no parameter
    draw = torch.Generator().manual_seed(weight.numel())
    shape = (1, weight.shape[1], *weight.shape[2:]) if weight.dim() == 4 else (1, weight.shape[1])
    given = torch.randn(shape, generator=draw).to(weight)
    plain = {name.removeprefix("base_layer."): tensor for name, tensor in frozen.items()}
    with _disable_hooks(layer):
        return functional_call(layer, frozen, (given,)), functional_call(base, plain, (given,))


def _get_base_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The weights of the layer itself; where other processes have them, random ones stand in for them.

    Any will do to see whether two adapters do the same, and to fetch the true ones all processes would be needed.
    """
    own = {name: item for name, item in layer.named_parameters() if name.startswith("base_layer.")}
    whole = {name: _get_full_shape(layer.base_layer, item) for name, item in own.items()}
    if all(
        not item.is_meta and not hasattr(item, "full_tensor") and item.shape == whole[name]
        for name, item in own.items()
    ):
        return dict(own)
    here = next(item.device for name, item in layer.named_parameters() if name not in own)
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=draw).div(shape[1:].numel() ** 0.5).to(here, own[name].dtype)
        for name, shape in whole.items()
    }


def _get_full_shape(base: Any, weight: Any) -> torch.Size:
    """That of a weight of which perhaps only some rows or columns are here, or, with DeepSpeed, nothing."""
    if isinstance(base, nn.Linear):
        return torch.Size((base.out_features, base.in_features)[: 1 if weight is base.bias else 2])
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


@contextmanager
def _disable_hooks(layer: nn.Module) -> Iterator[None]:
    """Without hooks, which may fetch weights from processes that do nothing of this kind now."""
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in layer.modules()]
    for module, _, _ in kept:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after


SAVE_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast_tensors(tensors: Mapping[str, Tensor], precision: str | None) -> dict[str, Tensor]:
    """Weights in the precision of the file; None leaves them.  Alphas stay float32: they are exact, and tiny."""
    if precision is None:
        return dict(tensors)
    done = {key: each if key.endswith(".alpha") else each.to(SAVE_DTYPES[precision]) for key, each in tensors.items()}
    for key, tensor in done.items():
        if not bool(tensor.isfinite().all()) and bool(tensors[key].isfinite().all()):
            largest = tensors[key].abs().max().item()
            raise UserError(f"{key}: {largest:g} is too large for {precision}; use save_precision bf16 or float")
    return done


def write_adapter_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    is_trained: bool = True,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write ``tensors`` so that ``path`` is at every moment either the old file or the new one, whole and checked.

    ``check`` raises when it does not like what was written; it gets the file before it has its name.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # as the user wants new files to be; safetensors makes private ones
        save_file(dict(tensors), part, dict(metadata))
        part.chmod(mode)
        fsync_file(part)
        verify_adapter_file(part, tensors, metadata, is_trained)
        if check is not None:
            check(part)
        os.replace(part, path)
        fsync_dir(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    finally:
        if part.exists():
            part.unlink()


REQUIRED_TENSORS: Mapping[str, tuple[str, ...]] = {
    "lora": (DOWN, UP),
    "dora": (DOWN, UP),
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "oft": ("oft_R",),
    "boft": ("boft_R", "boft_s"),
}
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


def verify_adapter_file(
    path: Path, expected: Mapping[str, Tensor], metadata: Mapping[str, str], is_trained: bool = True
) -> None:
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
