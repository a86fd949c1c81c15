"""Named tensors as bytes, in the form of a safetensors file, and back without copying what is not asked for."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from .keys import KEY_BYTES

ByteArray = NDArray[np.uint8]


_HEADER_LENGTH = struct.Struct("<Q")


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorSpan:
    """Where one tensor stands among the bytes, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def serialize_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors as one piece."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def read_tensor_spans(blob: ByteArray) -> dict[str, TensorSpan]:
    """What is in the blob, in the order of names."""
    return _parse_header(_read_header(blob))


def _read_header(blob: ByteArray) -> bytes:
    """The part that describes the rest; equal for tensors of equal names, kinds and shapes."""
    (length,) = _HEADER_LENGTH.unpack(blob[: _HEADER_LENGTH.size].tobytes())
    return blob[: _HEADER_LENGTH.size + length].tobytes()


def _parse_header(header: bytes) -> dict[str, TensorSpan]:
    return {
        name: TensorSpan(
            _SAFETENSORS_DTYPES[item["dtype"]],
            tuple(item["shape"]),
            len(header) + item["data_offsets"][0],
            len(header) + item["data_offsets"][1],
        )
        for name, item in sorted(json.loads(header[_HEADER_LENGTH.size :]).items())
        if name != "__metadata__"
    }


def deserialize_tensors(blob: ByteArray) -> dict[str, Tensor]:
    """All tensors, copied."""
    return {
        name: _copy_tensor(blob[place.start : place.end][None], place)[0]
        for name, place in read_tensor_spans(blob).items()
    }


def stack_tensors(blobs: Sequence[ByteArray], name: str) -> Tensor | list[Tensor]:
    """The tensor of this name from each blob: in one, copied once; or as a list where they differ in shape."""
    heads = [_read_header(blob) for blob in blobs]
    layouts = {head: _parse_header(head)[name] for head in set(heads)}
    places = [layouts[head] for head in heads]
    if len({(place.dtype, place.shape) for place in layouts.values()}) > 1:
        return [deserialize_tensors(blob)[name] for blob in blobs]
    room = torch.empty((len(blobs), places[0].end - places[0].start), dtype=torch.uint8)
    rows = room.numpy()
    for row, blob, place in zip(rows, blobs, places, strict=True):
        row[:] = blob[place.start : place.end]
    return _view_as_tensor(room, places[0])


def _copy_tensor(rows: ByteArray, span: TensorSpan) -> Tensor:
    return _view_as_tensor(torch.from_numpy(rows.copy()), span)


def _view_as_tensor(buffer: Tensor, span: TensorSpan) -> Tensor:
    if not buffer.shape[1]:
        return torch.empty((len(buffer), *span.shape), dtype=span.dtype)
    return buffer.view(span.dtype).view(len(buffer), *span.shape)


FORMAT_VERSION = 1
"""Raised when old files cannot be read any more; files of another format are left alone."""


HEADER_RECORD, ENTRY_RECORD, TOMBSTONE_RECORD = 1, 2, 3
"""Kinds of records: the first of a file; where an entry lies; that the entry at a place is not to be used any more."""


RECORD_DTYPE: np.dtype[Any] = np.dtype(
    [
        ("key", f"S{KEY_BYTES}"),
        ("kind", "<u4"),
        ("part", "<u4"),  # which of the writer's shards
        ("offset", "<u8"),  # of the entry in it
        ("length", "<u8"),  # of the tensors; the name of the picture or caption lies behind them
        ("name_length", "<u4"),
        ("checksum", "<u4"),  # of tensors and name
        ("writer", "<u8"),  # whose entry it is: the file's own, except in DROPPED
        ("check", "<u8"),  # of all that stands before it
    ]
)


RecordArray = NDArray[np.void]


_NUM_CHECKED_WORDS = RECORD_DTYPE.itemsize // 8 - 1


_CHECKSUM_FACTORS = np.array(
    [(0x9E3779B97F4A7C15 * (2 * index + 1)) % 2**64 | 1 for index in range(_NUM_CHECKED_WORDS)], np.uint64
)


def add_checksums(records: RecordArray) -> RecordArray:
    """The same records with their checks."""
    whole = records.copy()
    whole["check"] = _compute_checksums(whole)
    return whole


def verify_checksums(records: RecordArray) -> NDArray[np.bool_]:
    """Which of the records are as they were written."""
    sums: NDArray[np.bool_] = records["check"] == _compute_checksums(records)
    return sums


def build_header(writer_id: int) -> RecordArray:
    """The first record of an index file."""
    record = np.zeros(1, RECORD_DTYPE)
    record["kind"], record["part"], record["writer"] = HEADER_RECORD, FORMAT_VERSION, writer_id
    return add_checksums(record)


def is_valid_header(record: RecordArray) -> bool:
    """Whether a file that begins so can be read."""
    return bool(
        len(record)
        and verify_checksums(record[:1])[0]
        and record["kind"][0] == HEADER_RECORD
        and record["part"][0] == FORMAT_VERSION
    )


def _compute_checksums(records: RecordArray) -> NDArray[np.uint64]:
    """An odd multiple of each word, summed: no change of a single word leaves the sum as it was."""
    words = (
        np.ascontiguousarray(records)
        .view(np.uint64)
        .reshape(len(records), _NUM_CHECKED_WORDS + 1)[:, :_NUM_CHECKED_WORDS]
    )
    sums: NDArray[np.uint64] = (words * _CHECKSUM_FACTORS).sum(axis=1, dtype=np.uint64)
    return sums ^ (sums >> np.uint64(29)) ^ np.uint64(0x4C6F72696B656574)  # nothing but zeros is no record
