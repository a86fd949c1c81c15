"""Named tensors as bytes, in the form of a safetensors file, and back without copying what is not asked for."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

ByteArray = NDArray[np.uint8]

_HEADER_LENGTH = struct.Struct("<Q")
_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


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
        name: TensorSpan(_SAFETENSORS_DTYPES[item["dtype"]], tuple(item["shape"]), len(header) + item["data_offsets"][0],
                    len(header) + item["data_offsets"][1])
        for name, item in sorted(json.loads(header[_HEADER_LENGTH.size :]).items()) if name != "__metadata__"
    }  # fmt: skip


def deserialize_tensors(blob: ByteArray) -> dict[str, Tensor]:
    """All tensors, copied."""
    return {name: _copy_tensor(blob[place.start : place.end][None], place)[0] for name, place in read_tensor_spans(blob).items()}


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
