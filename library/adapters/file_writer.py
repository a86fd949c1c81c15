"""Write LoRA files atomically, and verify them: their tensors, their keys and their metadata.

Key names are converted in kohya_diffusers_comfyui_keys.py; when a run saves is in training/save_adapter.py.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..atomic_files import fsync_dir, fsync_file, replace_path
from ..errors import UserError
from .component_key_names import ComponentKeys, find_wrapper_names
from .file_reader import InvalidAdapterFileError, iter_tensors, read_adapter_file, read_header
from .kohya_diffusers_comfyui_keys import EMBEDDING_PREFIX, TYPES_WITHOUT_ALPHA, convert_from_file_format
from .module_adapter import ALPHA, UP, ModuleAdapter, parse_tensor, parse_tensor_key
from .validate_tensors import find_tensor_problems

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

    def verify(part: Path) -> None:
        verify_adapter_file(part, tensors, metadata, is_trained, path)
        if check is not None:
            check(part)

    _write_atomically(path, tensors, metadata, verify)


def write_embedding_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write and verify a file of the vectors of a word, as ``write_adapter_file`` does a LoRA file."""

    def verify(part: Path) -> None:
        problems = [f"{key} differs" for key, each in tensors.items() if not _is_equal_in_file(part, key, each)]
        if read_header(part, path).metadata != metadata:
            problems.append("metadata differs")
        if problems:
            raise InvalidAdapterFileError(f"{path} failed its verification: {'; '.join(problems)}")

    _write_atomically(path, tensors, metadata, verify)


def _is_equal_in_file(path: Path, key: str, tensor: Tensor) -> bool:
    found = {name: value for name, value in iter_tensors(path) if name == key}
    return key in found and found[key].dtype == tensor.dtype and torch.equal(found[key], tensor)


def _write_atomically(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], verify: Callable[[Path], None]
) -> None:
    """Write a file beside ``path`` and verify it; ``verify`` may raise to reject it. Then give it its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # according to the umask; safetensors creates files with mode 600
        save_file(dict(tensors), part, dict(metadata))
        part.chmod(mode)
        fsync_file(part)
        verify(part)
        replace_path(part, path)
        fsync_dir(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    finally:
        if part.exists():
            part.unlink()


ZERO_INIT_TENSORS = (UP, "hada_w2_b", "lokr_w1", "lokr_w1_a", "oft_R", "boft_R")
"""Tensors that are zero at the start of training."""

LYCORIS_ZERO_INIT_TENSORS = ("hada_w1_a", "lokr_w2", "lokr_w2_b")
"""Tensors that are zero in untrained layers of LyCORIS, which ``network_weights`` may contain."""


def verify_adapter_file(
    path: Path,
    expected: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    is_trained: bool = True,
    name: Path | None = None,
) -> None:
    """Raise unless the file contains exactly ``expected``, loaders know its keys, and its update is not zero.

    Pass ``is_trained`` False for files that may have zero updates: before the first step, or of other programs.
    Messages call the file ``name``, by default its path.
    """
    header = read_header(path, name)
    problems = [f"{key} is missing" for key in sorted(expected.keys() - header.ends.keys())]
    facts, differences = _compare_tensors(path, expected, name)
    problems += [*differences, *_find_invalid_tensors(facts, is_trained)]
    if not problems and is_trained and not _has_nonzero_update(facts):
        problems.append("every lora_up or lora_B is zero: the LoRA does nothing")
    if header.metadata != metadata:
        keys = sorted(key for key in {*header.metadata, *metadata} if header.metadata.get(key) != metadata.get(key))
        problems.append(f"metadata differs: {', '.join(keys[:3])}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise InvalidAdapterFileError(f"{name or path} failed its verification: {'; '.join(problems[:5])}{more}")


def _compare_tensors(
    path: Path, expected: Mapping[str, Tensor], name: Path | None
) -> tuple[dict[str, "TensorFacts"], list[str]]:
    """Compare the tensors of a file; afterwards it is no longer mapped, so that Windows can remove it."""
    facts, problems = dict[str, TensorFacts](), list[str]()
    for key, tensor in iter_tensors(path, name):
        facts[key] = TensorFacts(tensor.to("meta"), bool(tensor.isfinite().all()), not bool(tensor.any()))
        problems += _compare_tensor(key, tensor, expected.get(key))
    return facts, problems


def list_changing_layers(adapters: Mapping[str, ModuleAdapter]) -> frozenset[str]:
    """The layers that an adapter changes; files with fused layers have no tensors for a part whose lora_B is zero."""
    return frozenset(
        module for module, adapter in adapters.items() if UP not in adapter.tensors or bool(adapter.tensors[UP].any())
    )


def verify_layers(
    path: Path,
    layers: Collection[str],
    components: Sequence[ComponentKeys],
    shapes: Mapping[str, Sequence[int]] | None,
) -> None:
    """Read a converted file as a loader does, and raise unless it has all these layers of the model."""
    tensors, metadata = read_adapter_file(path)
    contents = convert_from_file_format(tensors, metadata, components, shapes)
    fused = {
        f"{each.component}.{module}"
        for each in contents.fused.values()
        for module in each.group.modules
        if module is not None
    }
    if lost := sorted(set(layers) - contents.alphas.keys() - fused):
        raise InvalidAdapterFileError(
            f"{len(lost)} of {len(layers)} layers would be lost in the new file, for example {lost[0]}; nothing is"
            " written: please report it"
        )


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of a file, as far as the checks of the file need it."""

    shape: Tensor
    """A tensor without data (on the meta device) of this shape and dtype."""
    is_finite: bool
    is_zero: bool


def _compare_tensor(key: str, actual: Tensor, wanted: Tensor | None) -> Iterator[str]:
    if wanted is None:
        yield f"{key} is unexpected"
    elif actual.shape != wanted.shape or actual.dtype != wanted.dtype:
        yield f"{key} is {_format_shape(actual)} instead of {_format_shape(wanted)}"
    elif not torch.equal(actual, wanted) and bool(wanted.isfinite().all()):
        yield f"{key} has other values than the model in memory"


def _find_invalid_tensors(facts: Mapping[str, TensorFacts], is_trained: bool) -> Iterator[str]:
    """Yield what is wrong with tensors that a loader would reject or ignore."""
    if not facts:
        yield "it has no tensors"
    for key in find_wrapper_names(facts):
        yield f"{key}: no loader knows this key"
    modules: dict[str, dict[str, Tensor]] = {}
    for key, fact in facts.items():
        if key.startswith(EMBEDDING_PREFIX):
            continue
        parsed = parse_tensor(key, fact.shape)
        if parsed is None:
            yield f"{key}: no loader knows this key"
            continue
        module, name = parsed
        modules.setdefault(module, {})[name] = fact.shape
        if not fact.is_finite:
            yield f"{key} has non-finite values"
        elif fact.is_zero and (
            (name == ALPHA and f"{module}.oft_blocks" not in facts)
            or (is_trained and name not in (ALPHA, *ZERO_INIT_TENSORS, *LYCORIS_ZERO_INIT_TENSORS))
        ):
            yield f"{key} is zero"
    # ComfyUI's files have alphas for some components only.
    has_kohya = any(key.endswith(".lora_down.weight") for key in facts)
    heads_with_alpha = {_get_component_part(module) for module, names in modules.items() if ALPHA in names}
    for module, tensors in sorted(modules.items()):
        yield from (f"{module}: {problem}" for problem in find_tensor_problems(tensors))
        has_alpha = has_kohya or _get_component_part(module) in heads_with_alpha
        if has_alpha and ALPHA not in tensors and ModuleAdapter(tensors, 0).adapter_type not in TYPES_WITHOUT_ALPHA:
            yield f"{module} has no {ALPHA}"


def _get_component_part(module: str) -> str:
    """The part of a key that tells its component: ``transformer`` or ``lora_te1``."""
    return module.partition(".")[0] if "." in module else "_".join(module.split("_")[:2])


def _has_nonzero_update(facts: Mapping[str, TensorFacts]) -> bool:
    """Whether any tensor with zero initialization has changed."""
    parsed = ((parse_tensor_key(key), fact) for key, fact in facts.items())
    return any(name is not None and name[1] in ZERO_INIT_TENSORS and not fact.is_zero for name, fact in parsed)


def _format_shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
