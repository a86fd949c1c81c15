"""Weights that a checkpoint stores quantized: read as they are, cut into rows, dequantized.

A conversion of keys only renames weights, splits them and joins them by rows.  So it is run on numbers of rows in their
place, and what becomes of the rows says what becomes of the stored values: a weight that was one of three parts of a
fused module is still stored as it was in the file, and only one weight at a time is dequantized.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoint_header import CheckpointHeader, read_files_header
from .checkpoint_shards import CheckpointTensors, list_shard_paths, open_files
from .gguf_blocks import BLOCK_SIZES, dequantize_rows
from .gguf_names import find_interleaved_heads, find_norm_shift
from .quantized_keys import StoredFormat

BLOCK_SIDE = 128
"""Rows and columns of a block in files with ``weight_scale_inv``."""


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight as it is stored: tensors whose rows, or rows of blocks, are those of the weight."""

    format: str
    shape: torch.Size
    tensors: tuple[Tensor, ...]
    """Values; and, but for GGUF, what they are multiplied with; for nf4 and fp4 also their levels."""

    @property
    def saves_memory(self) -> bool:
        """Whether it takes less than its weight in half precision."""
        return sum(tensor.nbytes for tensor in self.tensors[:2]) < 2 * self.shape.numel()

    def to(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize in float32 and cast once, as ``Tensor.to`` casts a weight."""
        return self.dequantize().to(device=device, dtype=dtype)

    def dequantize(self) -> Tensor:
        """Compute the weight in float32."""
        if self.format in BLOCK_SIZES:
            return dequantize_rows(self.tensors[0], self.format).view(self.shape)
        values, scale = self.tensors[:2]
        if self.format in ("nf4", "fp4"):
            indices = torch.stack([values >> 4, values & 15], dim=2).flatten(1)
            weight = self.tensors[2][indices.long()] * scale
            return weight.flatten()[: self.shape.numel()].view(self.shape)
        blocks = values.float().view(len(values), scale.shape[1], -1)
        return (blocks * scale.unsqueeze(2)).view(self.shape)

    def take_rows(self, start: int, count: int) -> "StoredWeight":
        """Return some of the rows; raises ``ValueError`` where blocks do not end with rows."""
        is_packed = self.format in ("nf4", "fp4")  # whose blocks need not end with rows
        if is_packed and self.shape[1:].numel() % (2 * self.tensors[0].shape[1]):
            raise ValueError("blocks of the stored weight do not end with its rows")
        sizes = [len(tensor) // self.shape[0] for tensor in self.tensors[:2]]
        cut = [tensor[start * size : (start + count) * size] for tensor, size in zip(self.tensors, sizes, strict=False)]
        shape = torch.Size((count, *self.shape[1:]))
        return replace(self, shape=shape, tensors=(*cut, *self.tensors[2:]))


def join_rows(parts: Sequence[StoredWeight]) -> StoredWeight | Tensor:
    """Join weights by rows: as they are stored if all are in one format, else dequantized."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({(part.format, *(tensor.shape[1:] for tensor in part.tensors[:2])) for part in parts}) > 1:
        return torch.cat([part.dequantize() for part in parts])
    tensors = tuple(torch.cat(each) for each in zip(*(part.tensors[:2] for part in parts), strict=True))
    shape = torch.Size((sum(part.shape[0] for part in parts), *first.shape[1:]))
    return replace(first, shape=shape, tensors=(*tensors, *first.tensors[2:]))


def read_weights(
    path: Path, choose: Callable[[Iterable[str]], Iterable[str]], device: torch.device | None = None
) -> dict[str, Tensor | StoredWeight]:
    """Read the weights of a checkpoint whose keys ``choose`` returns, quantized ones as they are stored."""
    return read_file_weights(list_shard_paths(path), choose, device)


def read_file_weights(
    paths: list[Path], choose: Callable[[Iterable[str]], Iterable[str]] = list, device: torch.device | None = None
) -> dict[str, Tensor | StoredWeight]:
    """Read weights of a checkpoint in these files; those for the meta device have no values."""
    header, file = read_files_header(paths), open_files(paths)
    if device is not None and device.type == "meta":
        file = MetaTensors(file.files)
    return {key: _read_weight(header, file, key) for key in choose(header.shapes)}


class MetaTensors(CheckpointTensors):
    """The tensors of a checkpoint without values, but for the descriptions of others."""

    def get_tensor(self, key: str) -> Tensor:
        """Return the tensor, whose values are not read from disk, on the meta device."""
        tensor = super().get_tensor(key)
        return tensor if ".quant_state." in key else tensor.to("meta")


def _read_weight(header: CheckpointHeader, file: CheckpointTensors, key: str) -> Tensor | StoredWeight:
    name, stored = header.names.get(key, key), header.formats.get(key)
    tensor = file.get_tensor(name)
    if stored is None:
        weight: Tensor | StoredWeight = tensor
    elif stored.name in BLOCK_SIZES:
        weight = StoredWeight(stored.name, torch.Size(stored.shape), (tensor,))
        if weight.shape[0] != len(tensor):  # a shape that differs from that in the file
            weight = weight.dequantize()
    else:
        weight = _read_scaled(file, tensor, stored)
    return _undo_llama_cpp(header, key, weight)


def _undo_llama_cpp(header: CheckpointHeader, key: str, weight: Tensor | StoredWeight) -> Tensor | StoredWeight:
    """Undo what llama.cpp changes in some weights of text encoders besides their names."""
    if shift := find_norm_shift(key, header.architecture):
        return weight.to(dtype=torch.float32) - shift
    if heads := find_interleaved_heads(key, header.architecture, header.heads):
        rows = weight.to(dtype=torch.float32)
        pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)
    return weight


def _read_scaled(file: CheckpointTensors, values: Tensor, stored: StoredFormat) -> StoredWeight:
    shape = torch.Size(stored.shape)
    if stored.state is not None:
        return _read_bitsandbytes(file, values, stored, stored.state)
    values = values.flatten(1)
    scale = torch.ones(1) if stored.scale is None else file.get_tensor(stored.scale).float()
    if stored.scale is not None and stored.scale.endswith(".SCB"):
        scale = scale / 127
    return StoredWeight(stored.name, shape, (values, _expand_scale(scale, values, stored.scale or "")))


def _expand_scale(scale: Tensor, values: Tensor, key: str) -> Tensor:
    """Bring a scale of the weight, of its rows or of blocks into the form (rows, blocks of a row)."""
    rows, columns = values.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1)
    if scale.numel() % rows == 0 and scale.shape[0] == rows:
        scale = scale.reshape(rows, -1)
    elif scale.shape == (-(-rows // BLOCK_SIDE), -(-columns // BLOCK_SIDE)):  # square blocks
        scale = scale.repeat_interleave(BLOCK_SIDE, 0)[:rows]
        if columns % BLOCK_SIDE:
            scale = scale.repeat_interleave(BLOCK_SIDE, 1)[:, :columns]
    if scale.shape[0] != rows or columns % scale.shape[1]:
        raise ValueError(
            f"{key} has shape {list(scale.shape)}, which fits no weight of {rows} rows and {columns} columns"
        )
    return scale


def _read_bitsandbytes(file: CheckpointTensors, values: Tensor, stored: StoredFormat, state_key: str) -> StoredWeight:
    """Blocks of 4-bit values, whose scales may be quantized to 8 bits and have an offset."""
    state = json.loads(bytes(file.get_tensor(state_key).tolist()))
    key, block = state_key.rpartition(".quant_state.")[0], int(state["blocksize"])
    scale, levels = file.get_tensor(f"{key}.absmax"), file.get_tensor(f"{key}.quant_map").float()
    if "nested_blocksize" in state:
        nested, outer = file.get_tensor(f"{key}.nested_quant_map"), file.get_tensor(f"{key}.nested_absmax")
        outer = outer.repeat_interleave(int(state["nested_blocksize"]))[: len(scale)]
        scale = nested[scale.long()] * outer + float(state["nested_offset"])
    shape = torch.Size(stored.shape)
    packed = values.flatten().view(torch.uint8)
    packed = nn.functional.pad(packed, (0, len(scale) * block // 2 - len(packed)))  # of the last block
    return StoredWeight(stored.name, shape, (packed.view(len(scale), -1), scale.float().view(-1, 1), levels))


FIRST_ROW = 2**40
"""The number of the first row: far from any value that models have in tensors of integers."""


class RowNumbers:
    """Numbers of rows in the place of stored weights, for a conversion that splits and joins them by rows."""

    def __init__(self, weights: Mapping[str, Tensor | StoredWeight]):
        self._stored = [each for each in weights.values() if isinstance(each, StoredWeight)]
        self._starts, total = list[int](), FIRST_ROW
        for each in self._stored:
            self._starts.append(total)
            total += each.shape[0]
        starts = iter(self._starts)
        self.stand_ins = {
            key: number_rows(each.shape, next(starts)) if isinstance(each, StoredWeight) else each
            for key, each in weights.items()
        }

    @property
    def is_empty(self) -> bool:
        """Whether no weight is stored quantized."""
        return not self._stored

    def restore(self, converted: Mapping[str, Tensor]) -> dict[str, Tensor | StoredWeight]:
        """Replace the numbers that the conversion returned by the rows that they stand for.

        Raises ``ValueError`` where it did more than to split and join rows.
        """
        return {
            key: self._join(tensor)
            if tensor.dtype is torch.int64 and not tensor.is_meta and tensor.numel() and tensor.max() >= FIRST_ROW
            else tensor
            for key, tensor in converted.items()
        }

    def _join(self, tensor: Tensor) -> StoredWeight | Tensor:
        numbers = tensor.flatten()
        if len(numbers) != tensor.shape[0] or tensor.ndim < 2:
            raise ValueError("the conversion is not one of rows")
        ends = (torch.where(numbers.diff() != 1)[0] + 1).tolist()
        parts: list[StoredWeight] = []
        for start, end in zip([0, *ends], [*ends, len(numbers)], strict=True):
            parts += self._take(int(numbers[start]), end - start)
        if any(len(part.shape) != tensor.ndim for part in parts):
            raise ValueError("the conversion adds or removes axes")
        return join_rows(parts)

    def _take(self, first: int, count: int) -> Iterable[StoredWeight]:
        """Take consecutive rows, which may end one weight and begin the next."""
        while count:
            index = max(place for place, start in enumerate(self._starts) if start <= first)
            weight, start = self._stored[index], first - self._starts[index]
            taken = min(count, weight.shape[0] - start)
            yield weight if taken == weight.shape[0] else weight.take_rows(start, taken)
            first, count = first + taken, count - taken


def number_rows(shape: Sequence[int], first: int) -> Tensor:
    """Return the numbers of the rows of a weight, as a tensor that has a size of 1 in its other dimensions."""
    rows = torch.arange(first, first + (shape[0] if shape else 1))
    return rows.view(-1, *[1] * (len(shape) - 1)) if shape else rows[0]


def dequantize_all(weights: Mapping[str, Tensor | StoredWeight]) -> dict[str, Tensor]:
    """Dequantize all stored weights in float32."""
    return {key: each if isinstance(each, Tensor) else each.dequantize() for key, each in weights.items()}
