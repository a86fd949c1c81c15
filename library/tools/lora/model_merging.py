"""Merge LoRAs into the weights of a model, tensor by tensor, so that the model is never in memory."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...adapters.file_writer import SAVE_DTYPES
from ...adapters.merge import compute_delta_weight, compute_merged_weight, merge_bias_adapter
from ...adapters.module_adapter import BIAS, INPUT_MAGNITUDE, ModuleAdapter
from ...atomic_files import fsync_dir, replace_path
from ...errors import FileError, UserError
from ...log import ProgressBar
from ...models.component_files import TensorEntry, write_tensor_stream
from ...problems import Problem, report_file
from .combining import WeightedFile
from .lora_files import SOURCES_KEY, format_sources
from .model_weights import (
    DTYPES,
    LayerWeight,
    ModelFiles,
    StoredTensor,
    find_missing_weights,
    list_stored_tensors,
    list_weight_files,
)

UNMERGEABLE_TYPES = ("oft", "boft")
_COPY_BYTES = 2**24
_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True)
class Change:
    """An update of one layer, or of all parts of a fused layer, and its weight."""

    adapter: ModuleAdapter
    weight: float
    first_row: int = 0
    """The first row of the layer in a fused update."""

    @torch.no_grad()
    def apply(self, base: Tensor) -> Tensor:
        """The merged weight, in the type of ``base``."""
        if self.adapter.adapter_type == "full" and "diff" not in self.adapter.tensors:
            return base
        if self.first_row or self._covers_more_than(base):
            delta = compute_delta_weight(self.adapter, base.dtype)[self.first_row : self.first_row + len(base)]
            return base + self.weight * self.adapter.scale * delta.reshape(base.shape)
        return base + self.weight * (compute_merged_weight(base, self.adapter) - base)

    @torch.no_grad()
    def apply_to_bias(self, bias: Tensor) -> None:
        """Add to the bias of the layer, which may be a part of a fused one."""
        tensors = dict(self.adapter.tensors)
        if BIAS in tensors:
            tensors[BIAS] = tensors[BIAS][self.first_row : self.first_row + len(bias)]
        merge_bias_adapter(bias, ModuleAdapter(tensors, self.adapter.alpha), self.weight)

    def _covers_more_than(self, base: Tensor) -> bool:
        return self.adapter.shape[0] > len(base)


@dataclass(frozen=True)
class MergedModel:
    """A model file that was written, and what was merged into it."""

    path: Path
    num_changed: int
    num_tensors: int
    num_bytes: int


def iter_model_obstacles(model: ModelFiles, files: Sequence[WeightedFile]) -> Iterator[Problem]:
    """Yield the reasons why LoRAs cannot be merged into a model."""
    for weighted in files:
        file = weighted.file
        yield from (report_file(file.path, each) for each in find_missing_weights(model, file.list_modules()))
        for name, update in file.updates.items():
            if update.adapter_type in UNMERGEABLE_TYPES:
                text = f"{name}: {update.title} of peft cannot be merged; it rotates the inputs of a layer"
                yield report_file(file.path, text)
                break
        for name, fused in file.lora.contents.fused.items():
            if INPUT_MAGNITUDE in fused.update.tensors:
                yield report_file(file.path, f"{name}: {fused.reason}", fused.way_out)
                break
        with_bias = {name: update for name, update in file.updates.items() if {"b_norm", BIAS} & update.tensors.keys()}
        for fused in file.lora.contents.fused.values():
            parts = (f"{fused.component}.{module}" for module in fused.group.modules if module is not None)
            with_bias |= dict.fromkeys(parts if BIAS in fused.update.tensors else (), fused.update)
        for name in with_bias:
            if name not in model.biases:
                yield report_file(file.path, f"{name} has a bias in the file, but none in the model")
                break


def collect_changes(files: Sequence[WeightedFile], model: ModelFiles) -> dict[str, list[Change]]:
    """The changes of each layer, in the order of the files; those of weight 0 are left out."""
    changes: dict[str, list[Change]] = {}
    for weighted in files:
        for module, update in weighted.file.updates.items():
            if weight := weighted.get_weight(module):
                changes.setdefault(module, []).append(Change(update, weight))
        for fused in weighted.file.lora.contents.fused.values():
            row = 0
            for part in fused.group.modules:
                module = f"{fused.component}.{part}"
                if weight := weighted.get_weight(module):
                    changes.setdefault(module, []).append(Change(fused.update, weight, row))
                row += model.shapes[module][0]
    return changes


def merge_into_model(
    model: ModelFiles, files: Sequence[WeightedFile], output: Path, dtype: torch.dtype, precision: str | None
) -> MergedModel:
    """Write the merged model beside ``output``, verify it, and give it its name."""
    if problems := list(iter_model_obstacles(model, files)):
        raise FileError(problems)
    changes = collect_changes(files, model)
    by_key: dict[tuple[Path, str], list[tuple[LayerWeight, list[Change], bool]]] = {}
    for module, own in changes.items():
        by_key.setdefault(_get_key(model.weights[module]), []).append((model.weights[module], own, False))
        if module in model.biases:
            by_key.setdefault(_get_key(model.biases[module]), []).append((model.biases[module], own, True))

    def compute(tensor: StoredTensor) -> Tensor | None:
        places = by_key.get((tensor.path, tensor.key))
        return None if places is None else _compute_merged_tensor(tensor, places, dtype)

    note = format_sources([each.file for each in files], "merged into a model", [each.describe() for each in files])
    sources = [model.path]
    if model.is_folder:
        sources = [path for part in model.components for path in list_weight_files(model.path / part.name)]
    temporary = output.with_name(f".{output.name}.{os.getpid()}.part")
    num_megabytes = sum(_count_megabytes(path) for path in sources)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with ProgressBar(num_megabytes, 0, "merging", enabled=True, unit="MB", log_first_and_last=False) as progress:
            writer = _Writer(compute, note, precision, progress)
            if model.is_folder:
                _write_folder(model, temporary, writer)
            else:
                writer.write(model.path, temporary)
        _replace(temporary, output)
    except OSError as error:
        raise UserError(report_file(output, f"cannot be written: {error}")) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True) if temporary.is_dir() else temporary.unlink(missing_ok=True)
    return MergedModel(output, len(changes), writer.num_tensors, writer.num_bytes)


def _get_key(weight: LayerWeight) -> tuple[Path, str]:
    return weight.tensor.path, weight.tensor.key


def _compute_merged_tensor(
    tensor: StoredTensor, places: Sequence[tuple[LayerWeight, list[Change], bool]], dtype: torch.dtype
) -> Tensor:
    """The tensor of a layer, or of a fused layer with its parts changed."""
    whole = tensor.read().to(dtype)
    for place, changes, is_bias in places:
        if place.is_transposed:
            part = whole.T.reshape(place.shape)
        else:
            rows = whole[place.first_row : place.first_row + place.num_rows]
            part = place.restore_order(rows).reshape(place.shape).clone()
        for change in changes:
            if is_bias:
                change.apply_to_bias(part)
            else:
                part = change.apply(part)
        if place.is_transposed:
            whole = part.T.reshape(whole.shape)
        else:
            whole[place.first_row : place.first_row + place.num_rows] = place.restore_order(part).reshape(rows.shape)
    return whole


class _Writer:
    """Copies safetensors files with some tensors replaced, and verifies the copies."""

    def __init__(
        self,
        compute: Callable[[StoredTensor], Tensor | None],
        note: str,
        precision: str | None,
        progress: ProgressBar,
    ):
        self.compute, self.note, self.progress = compute, note, progress
        self.dtype = None if precision is None else SAVE_DTYPES[precision]
        self.num_tensors = self.num_bytes = self.read_megabytes = 0

    def write(self, source: Path, target: Path) -> None:
        """Copy ``source`` tensor by tensor, then read the copy back and compare its hash."""
        tensors = list_stored_tensors(source)
        stored, entries = {tensor.key: tensor for tensor in tensors}, []
        for tensor in tensors:
            dtype = self._choose_dtype(tensor)
            size = tensor.num_bytes if dtype == tensor.dtype else _count_bytes(tensor.shape, DTYPES[dtype])
            entries.append(TensorEntry(tensor.key, dtype, tensor.shape, size))
        metadata = {key: value for key, value in _read_metadata(source).items() if key != "modelspec.hash_sha256"} | {
            SOURCES_KEY: self.note
        }
        source_bytes = source.stat().st_size

        def iter_bytes(entry: TensorEntry) -> Iterator[bytes | memoryview]:
            tensor = stored[entry.name]
            self._advance(source, tensor.start / source_bytes)
            return self._iter_bytes(tensor, entry.dtype)

        digest = hashlib.sha256()
        write_tensor_stream(target, entries, metadata, iter_bytes, digest.update)
        if _hash_content(target) != digest.digest():
            raise UserError(report_file(target, "reads back other bytes than were written", "the disk may be faulty"))
        self._advance(source, 1.0)
        self.read_megabytes += _count_megabytes(source)
        self.num_tensors += len(tensors)
        self.num_bytes += target.stat().st_size

    def _advance(self, source: Path, share: float) -> None:
        """Show that this share of a file is done."""
        done = self.read_megabytes + int(share * _count_megabytes(source))
        self.progress.update({}, done - self.progress.completed)

    def _choose_dtype(self, tensor: StoredTensor) -> str:
        if self.dtype is None or tensor.dtype not in DTYPES:
            return tensor.dtype
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def _iter_bytes(self, tensor: StoredTensor, dtype: str) -> Iterator[bytes | memoryview]:
        merged = self.compute(tensor)
        if merged is None and dtype == tensor.dtype:
            yield from _iter_file_bytes(tensor.path, tensor.start, tensor.num_bytes)
            return
        values = (tensor.read() if merged is None else merged).to(DTYPES[dtype])
        if not bool(values.float().isfinite().all()):
            raise UserError(
                report_file(tensor.path, f"{tensor.key}: the merged weight overflows {dtype}, or is not finite")
            )
        yield values.contiguous().flatten().view(torch.uint8).numpy().data


def _count_megabytes(path: Path) -> int:
    return max(1, path.stat().st_size // 10**6)


def _count_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()


def _read_metadata(path: Path) -> Mapping[str, str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header.get("__metadata__") or {"format": "pt"}


def _iter_file_bytes(path: Path, start: int, count: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while count > 0 and (part := file.read(min(count, _COPY_BYTES))):
            yield part
            count -= len(part)


def _hash_content(path: Path) -> bytes:
    """The hash of a file without the length of its header."""
    digest = hashlib.sha256()
    for part in _iter_file_bytes(path, 8, path.stat().st_size):
        digest.update(part)
    return digest.digest()


def _write_folder(model: ModelFiles, target: Path, writer: _Writer) -> None:
    """Copy the folder; components that a LoRA can change have the weights of one variant in the end."""
    changed = {part.name for part in model.components}
    for path in sorted(model.path.rglob("*")):
        name = path.relative_to(model.path)
        if path.is_dir() or any(part.startswith(".") for part in name.parts):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        in_changed = name.parts[0] in changed and len(name.parts) == 2
        if not in_changed or path.suffix not in (".safetensors", *_PICKLES):
            shutil.copyfile(path, target / name)
        elif path in list_weight_files(path.parent):
            writer.write(path, target / name)


def _replace(temporary: Path, output: Path) -> None:
    """Give the result its name; an old folder is removed only after the new one is complete."""
    if output.is_dir():
        old = output.with_name(f".{output.name}.{os.getpid()}.old")
        replace_path(output, old)
        replace_path(temporary, output)
        shutil.rmtree(old)
    else:
        replace_path(temporary, output)
    fsync_dir(output.parent)
