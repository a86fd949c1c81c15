"""The cache file format: entries are safetensors blobs in shards, found through fixed-size index records."""

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
    """Dtype, shape and byte range of one tensor of a blob."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def serialize_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize tensors in the safetensors format."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def read_tensor_spans(blob: ByteArray) -> dict[str, TensorSpan]:
    """Read dtype, shape and position of the tensors of a blob, sorted by name."""
    return _parse_header(_read_header(blob))


def _read_header(blob: ByteArray) -> bytes:
    """Read the length and the JSON header; equal for blobs with equal names, dtypes and shapes."""
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
    """Copy all tensors of a blob."""
    return {name: _copy_tensor(blob, span) for name, span in read_tensor_spans(blob).items()}


def stack_tensors(blobs: Sequence[ByteArray], name: str) -> Tensor | list[Tensor]:
    """Stack the tensors of this name, copying once; return a list if they differ in shape."""
    headers = [_read_header(blob) for blob in blobs]
    by_header = {header: _parse_header(header)[name] for header in set(headers)}
    spans = [by_header[header] for header in headers]
    if len({(span.dtype, span.shape) for span in by_header.values()}) > 1:
        return [_copy_tensor(blob, span) for blob, span in zip(blobs, spans, strict=True)]
    buffer = torch.empty((len(blobs), spans[0].end - spans[0].start), dtype=torch.uint8)
    for row, blob, span in zip(buffer.numpy(), blobs, spans, strict=True):
        row[:] = blob[span.start : span.end]
    return _view_as_tensor(buffer, spans[0])


def _copy_tensor(blob: ByteArray, span: TensorSpan) -> Tensor:
    return _view_as_tensor(torch.from_numpy(blob[span.start : span.end][None].copy()), span)[0]


def _view_as_tensor(buffer: Tensor, span: TensorSpan) -> Tensor:
    if not buffer.shape[1]:
        return torch.empty((len(buffer), *span.shape), dtype=span.dtype)
    return buffer.view(span.dtype).view(len(buffer), *span.shape)


FORMAT_VERSION = 1
"""The version of the format, incremented when old files can no longer be read; files of another one are ignored."""

HEADER_RECORD, ENTRY_RECORD, TOMBSTONE_RECORD = 1, 2, 3
"""Kinds of records: the first of a file; the location of an entry; an entry that must no longer be used."""

RECORD_DTYPE: np.dtype[Any] = np.dtype(
    [
        ("key", f"S{KEY_BYTES}"),
        ("kind", "<u4"),
        ("part", "<u4"),  # the number of the writer's shard
        ("offset", "<u8"),  # the first byte of the entry in the shard
        ("length", "<u8"),  # the bytes of the blob, which the name of the image or caption follows
        ("name_length", "<u4"),
        ("checksum", "<u4"),  # the checksum of blob and name
        ("writer", "<u8"),  # the writer of the entry: the file's own, except in a tombstone
        ("check", "<u8"),  # the checksum of all fields above
    ]
)

RecordArray = NDArray[np.void]
_NUM_CHECKED_WORDS = RECORD_DTYPE.itemsize // 8 - 1

_CHECKSUM_FACTORS = np.array(
    [(0x9E3779B97F4A7C15 * (2 * index + 1)) % 2**64 | 1 for index in range(_NUM_CHECKED_WORDS)], np.uint64
)


def add_checksums(records: RecordArray) -> RecordArray:
    """Return the records with their checksums."""
    checked = records.copy()
    checked["check"] = _compute_checksums(checked)
    return checked


def verify_checksums(records: RecordArray) -> NDArray[np.bool_]:
    """Return which records are intact."""
    sums: NDArray[np.bool_] = records["check"] == _compute_checksums(records)
    return sums


def build_header(writer_id: int) -> RecordArray:
    """Build the first record of an index file."""
    record = np.zeros(1, RECORD_DTYPE)
    record["kind"], record["part"], record["writer"] = HEADER_RECORD, FORMAT_VERSION, writer_id
    return add_checksums(record)


def is_valid_header(record: RecordArray) -> bool:
    """Whether a file that starts with this record can be read."""
    return bool(
        len(record)
        and verify_checksums(record[:1])[0]
        and record["kind"][0] == HEADER_RECORD
        and record["part"][0] == FORMAT_VERSION
    )


def _compute_checksums(records: RecordArray) -> NDArray[np.uint64]:
    """Sum an odd multiple of each word, so that a change of any single word changes the sum."""
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), -1)[:, :_NUM_CHECKED_WORDS]
    sums: NDArray[np.uint64] = (words * _CHECKSUM_FACTORS).sum(axis=1, dtype=np.uint64)
    return sums ^ (sums >> np.uint64(29)) ^ np.uint64(0x4C6F72696B656574)  # a record of zeros is invalid
