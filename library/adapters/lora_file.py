"""Write LoRA files atomically, and verify them: their tensors, their keys, and their effect in each layer."""

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
from .state_dict import ALPHA, COMFY_SUFFIXES, DOWN, KOHYA_SUFFIXES, PEFT_SUFFIXES, UP, ModuleAdapter, parse_tensor_key

UPDATE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Tolerated relative error of a layer's update in a file of this dtype."""


@torch.no_grad()
def compare_file_with_model(
    model: nn.Module, contents: AdapterFileContents, alphas: Mapping[str, float]
) -> Iterator[str]:
    """Run each layer on a random input with the weights in memory and with those of the file; yield differences.

    ``model`` has the pipeline's components as children and is in eval mode; its weights are restored afterwards.
    """
    parameters = dict(lora.iter_adapter_parameters(model))
    ups = {module: parameters.get(f"{module}.{PEFT_SUFFIXES[UP]}") for module in alphas}
    for module in sorted(alphas.keys() ^ contents.alphas.keys()):
        # In files with fused modules, a part whose update is zero is the same as a missing one.
        if module not in alphas or (up := ups[module]) is None or bool(up.any()):
            yield f"{module} is {'missing' if module in alphas else 'not trained'}"
    common = [module for module in alphas if module in contents.alphas]
    yield from (
        f"{module} has alpha {contents.alphas[module]:g} and not {alphas[module]:g}"
        for module in common
        if abs(contents.alphas[module] - alphas[module]) > 1e-6 * alphas[module]
    )
    if unexpected := sorted(contents.state_dict.keys() - parameters.keys()):
        yield f"{unexpected[0]} is not trained"
        return
    before = {module: _run_layer(model.get_submodule(module)) for module in common}
    backup = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for name, tensor in contents.state_dict.items():
            parameters[name].copy_(tensor)
        after = {module: _run_layer(model.get_submodule(module))[0] for module in common}
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(backup[name])
    tolerance = max(UPDATE_TOLERANCE.get(tensor.dtype, 1e-4) for tensor in contents.state_dict.values())
    for module, (output, base_output) in before.items():
        update, error = (output - base_output).abs().max(), (after[module] - output).abs().max()
        rounding = 16 * torch.finfo(output.dtype).eps * output.abs().max()
        if not bool(error <= tolerance * update + rounding):
            yield f"{module}: the output differs by {float(error):.2g} (the update is {float(update):.2g})"


def _run_layer(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The outputs of the layer and of its base layer for one random input."""
    base: Any = layer.base_layer
    base_weights = _get_base_weights(layer)
    weight = base_weights.get("base_layer.weight", base.weight)  # offloaded weights are not parameters
    generator = torch.Generator().manual_seed(weight.numel())
    shape = (1, weight.shape[1], *weight.shape[2:]) if weight.dim() == 4 else (1, weight.shape[1])
    inputs = torch.randn(shape, generator=generator).to(weight)
    unprefixed = {name.removeprefix("base_layer."): tensor for name, tensor in base_weights.items()}
    with _disable_hooks(layer):
        return functional_call(layer, base_weights, (inputs,)), functional_call(base, unprefixed, (inputs,))


def _get_base_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The base layer's weights, or random ones where they are sharded over ranks.

    Any weights will do to compare two adapters; all-gathering the real ones would need all ranks.
    """
    own = {name: item for name, item in layer.named_parameters() if name.startswith("base_layer.")}
    shapes = {name: _get_full_shape(layer.base_layer, item) for name, item in own.items()}
    if all(
        not item.is_meta and not hasattr(item, "full_tensor") and item.shape == shapes[name]
        for name, item in own.items()
    ):
        return dict(own)
    device = next(item.device for name, item in layer.named_parameters() if name not in own)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).div(shape[1:].numel() ** 0.5).to(device, own[name].dtype)
        for name, shape in shapes.items()
    }


def _get_full_shape(base: Any, weight: Any) -> torch.Size:
    """The unsharded shape of a weight (tensor parallelism, FSDP, DeepSpeed)."""
    if isinstance(base, nn.Linear):
        return torch.Size((base.out_features, base.in_features)[: 1 if weight is base.bias else 2])
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


@contextmanager
def _disable_hooks(layer: nn.Module) -> Iterator[None]:
    """Disable hooks, which may all-gather weights while the other ranks do not take part."""
    hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in layer.modules()]
    for module, _, _ in hooks:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, pre_hooks, forward_hooks in hooks:
            module._forward_pre_hooks, module._forward_hooks = pre_hooks, forward_hooks


SAVE_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast_tensors(tensors: Mapping[str, Tensor], precision: str | None) -> dict[str, Tensor]:
    """Cast weights to ``save_precision`` (None: unchanged); alphas stay float32."""
    if precision is None:
        return dict(tensors)
    dtype = SAVE_DTYPES[precision]
    cast = {key: tensor if key.endswith(".alpha") else tensor.to(dtype) for key, tensor in tensors.items()}
    for key, tensor in cast.items():
        if not bool(tensor.isfinite().all()) and bool(tensors[key].isfinite().all()):
            largest = tensors[key].abs().max().item()
            raise UserError(f"{key}: {largest:g} is too large for {precision}; use save_precision bf16 or float")
    return cast


def write_adapter_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    is_trained: bool = True,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write and verify a file, then move it to ``path``, so that ``path`` is always the old or the new complete file.

    ``check`` may raise to reject the new file; it is called with its temporary path.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # according to the umask; safetensors creates files with mode 600
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
"""Required tensors of each adapter type; both factors of a LoKr may be full or decomposed."""

ZERO_INIT_TENSORS = (UP, "hada_w2_b", "lokr_w1", "lokr_w1_a", "oft_R", "boft_R")
"""Tensors that are zero at the start of training."""


class InvalidAdapterFileError(UserError):
    """A LoRA file failed its verification; an older file of the same name was not replaced."""


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InvalidAdapterFileError(f"{path}: cannot be read as safetensors: {error}") from None


def verify_adapter_file(
    path: Path, expected: Mapping[str, Tensor], metadata: Mapping[str, str], is_trained: bool = True
) -> None:
    """Raise unless the file contains exactly ``expected``, loaders know its keys, and its update is not zero.

    Pass ``is_trained`` False for files that may have zero updates: before the first step, or of other programs.
    """
    tensors, file_metadata = read_safetensors(path)
    problems = [*_compare_tensors(tensors, expected), *_find_invalid_tensors(tensors, is_trained)]
    if not problems and is_trained and not _has_nonzero_update(tensors):
        problems.append("every lora_up or lora_B is zero: the LoRA does nothing")
    if file_metadata != metadata:
        keys = sorted(key for key in {*file_metadata, *metadata} if file_metadata.get(key) != metadata.get(key))
        problems.append(f"metadata differs: {', '.join(keys[:3])}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise InvalidAdapterFileError(f"{path.name} failed its verification: {'; '.join(problems[:5])}{more}")


def _compare_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    for key in sorted(expected.keys() - tensors.keys()):
        yield f"{key} is missing"
    for key in sorted(tensors.keys() - expected.keys()):
        yield f"{key} is unexpected"
    for key in sorted(tensors.keys() & expected.keys()):
        actual, wanted = tensors[key], expected[key]
        if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
            yield f"{key} is {_format_shape(actual)} instead of {_format_shape(wanted)}"
        elif not torch.equal(actual, wanted) and bool(wanted.isfinite().all()):
            yield f"{key} has other values than the model in memory"


def _find_invalid_tensors(tensors: Mapping[str, Tensor], is_trained: bool) -> Iterator[str]:
    """What a loader would reject or ignore."""
    if not tensors:
        yield "it has no tensors"
    for key in find_wrapper_names(tensors):
        yield f"{key}: no loader knows this key"
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        parsed = parse_tensor_key(key)
        if parsed is None:
            yield f"{key}: no loader knows this key"
            continue
        module, name = parsed
        modules.setdefault(module, {})[name] = tensor
        if not bool(tensor.isfinite().all()):
            yield f"{key} has non-finite values"
        elif not bool(tensor.any()) and (name == ALPHA or (is_trained and name not in ZERO_INIT_TENSORS)):
            yield f"{key} is zero"
    # ComfyUI's files have alphas for some components only.
    has_kohya = any(key.endswith(".lora_down.weight") for key in tensors)
    suffixes = KOHYA_SUFFIXES if has_kohya else COMFY_SUFFIXES
    heads_with_alpha = {_get_component_part(module) for module, names in modules.items() if ALPHA in names}
    for module, module_tensors in sorted(modules.items()):
        has_alpha = has_kohya or _get_component_part(module) in heads_with_alpha
        yield from _find_missing_tensors(module, module_tensors, suffixes, has_alpha)


def _get_component_part(module: str) -> str:
    """The part of a key that tells its component: ``transformer`` or ``lora_te1``."""
    return module.partition(".")[0] if "." in module else "_".join(module.split("_")[:2])


def _find_missing_tensors(
    module: str, tensors: Mapping[str, Tensor], suffixes: Mapping[str, str], has_alphas: bool
) -> Iterator[str]:
    adapter_type = ModuleAdapter(tensors, 0).adapter_type
    required: list[str] = []
    if adapter_type == "lokr":
        for factor in ("lokr_w1", "lokr_w2"):
            required += [factor] if factor in tensors else [f"{factor}_a", f"{factor}_b"]
    else:
        required += REQUIRED_TENSORS[adapter_type]
    for name in (*required, *([ALPHA] if has_alphas else [])):
        if name not in tensors:
            yield f"{module} has no {suffixes.get(name, name)}"
    down, up = tensors.get(DOWN), tensors.get(UP)
    if down is not None and up is not None and down.shape[:1] != up.shape[1:2]:
        first, second = (suffixes[name].partition(".")[0] for name in (DOWN, UP))
        yield f"{module}: rank {down.shape[0]} in {first}, {up.shape[1]} in {second}"


def _has_nonzero_update(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any tensor with zero initialization has changed."""
    parsed = ((parse_tensor_key(key), tensor) for key, tensor in tensors.items())
    return any(name is not None and name[1] in ZERO_INIT_TENSORS and bool(tensor.any()) for name, tensor in parsed)


def _format_shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
