"""Write the weights of a component as safetensors files, tensor by tensor, and read them back.

Only one tensor at a time is copied to host memory and cast, so that a model of any size needs no second copy.
"""

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..atomic_files import fsync_file
from ..distributed.devices import HOST
from ..errors import UserError
from ..problems import report_file

ReadWeight = Callable[[Tensor], Tensor]
"""Returns a weight as a whole, of which each process may hold a part."""

MAX_SHARD_BYTES = 10 * 10**9
"""The size of a shard, as diffusers' ``save_pretrained`` has it by default."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def read_whole(weight: Tensor) -> Tensor:
    """Return a weight that this process holds as a whole."""
    return weight


def write_weights(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    metadata: Mapping[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    read_weight: ReadWeight = read_whole,
) -> list[Path]:
    """Write ``STEM.safetensors``, or shards with their index, cast to ``dtype``; read all back and compare them.

    ``read_weight`` returns a weight as a whole, of which each process may hold a part; it is called for one at a time.
    """
    shards = _split_into_shards(tensors, dtype, max_shard_bytes)
    paths, weight_map = list[Path](), dict[str, str]()
    for number, names in enumerate(shards):
        shard = f"{stem}-{number + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else stem
        path = folder / f"{shard}.safetensors"
        part = {name: tensors[name] for name in names}
        write_safetensors(path, part, dtype, metadata, read_weight=read_weight)
        verify_safetensors(path, part, dtype, read_weight)
        paths.append(path)
        weight_map |= dict.fromkeys(names, path.name)
    if len(shards) > 1:
        total = sum(_count_bytes(tensor, dtype) for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return paths


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    metadata: Mapping[str, str],
    *,
    read_weight: ReadWeight = read_whole,
    copied: Container[str] = (),
) -> None:
    """Write one file; a weight that is not finite after the cast is an error, unless it is ``copied`` as it is."""
    names = sorted(tensors, key=lambda name: -_get_dtype(tensors[name], dtype).itemsize)  # keeps every tensor aligned
    entries = [
        TensorEntry(
            name,
            DTYPE_NAMES[_get_dtype(tensors[name], dtype)],
            tensors[name].shape,
            _count_bytes(tensors[name], dtype),
        )
        for name in names
    ]

    def iter_bytes(entry: TensorEntry) -> Iterator[memoryview]:
        values = cast_weight(read_weight(tensors[entry.name]), dtype)
        is_checked = entry.name not in copied and values.is_floating_point()
        if is_checked and not bool(values.isfinite().all()):
            raise UserError(report_file(path, f"{entry.name} is not finite, or overflows {values.dtype}"))
        yield values.flatten().view(torch.uint8).numpy().data

    write_tensor_stream(path, entries, metadata, iter_bytes)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header of a safetensors file."""

    name: str
    dtype: str
    """The name that safetensors has for it: ``BF16``."""
    shape: Sequence[int]
    num_bytes: int


def write_tensor_stream(
    path: Path,
    entries: Sequence[TensorEntry],
    metadata: Mapping[str, str],
    iter_bytes: Callable[[TensorEntry], Iterable[bytes | memoryview]],
    update_hash: Callable[[bytes | memoryview], None] = lambda _: None,
) -> None:
    """Write a safetensors file whose tensors come one after the other.

    ``update_hash`` gets all that is written but the first 8 bytes.
    """
    header, end = dict[str, object](), 0
    for entry in entries:
        offsets = [end, end := end + entry.num_bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps({"__metadata__": dict(metadata), **header}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    update_hash(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            for part in iter_bytes(entry):
                update_hash(part)
                file.write(part)
    fsync_file(path)


def verify_safetensors(
    path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, read_weight: ReadWeight = read_whole
) -> None:
    """Read a file back with the library that others use, and compare every tensor with that in memory, to the bit."""
    with safe_open(path, "pt") as file:
        if set(file.keys()) != set(tensors):
            raise UserError(report_file(path, "has other tensors than were written"))
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name), cast_weight(read_weight(tensor), dtype)):
                raise UserError(report_file(path, f"{name} reads back other than written", "the disk may be faulty"))


def _split_into_shards(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, max_bytes: int
) -> Sequence[Sequence[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = _count_bytes(tensor, dtype)
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _get_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _count_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * _get_dtype(tensor, dtype).itemsize


def cast_weight(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Copy a weight to host memory, in the dtype of the file; integers keep theirs."""
    return tensor.detach().to(HOST, _get_dtype(tensor, dtype)).contiguous()
