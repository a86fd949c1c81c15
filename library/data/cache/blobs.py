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

Bytes = NDArray[np.uint8]

_LENGTH = struct.Struct("<Q")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where one tensor stands among the bytes, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors as one piece."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def layout(blob: Bytes) -> dict[str, Place]:
    """What is in the blob, in the order of names."""
    return _described(_head(blob))


def _head(blob: Bytes) -> bytes:
    """The part that describes the rest; equal for tensors of equal names, kinds and shapes."""
    (length,) = _LENGTH.unpack(blob[: _LENGTH.size].tobytes())
    return blob[: _LENGTH.size + length].tobytes()


def _described(head: bytes) -> dict[str, Place]:
    return {
        name: Place(_DTYPES[item["dtype"]], tuple(item["shape"]), len(head) + item["data_offsets"][0],
                    len(head) + item["data_offsets"][1])
        for name, item in sorted(json.loads(head[_LENGTH.size :]).items()) if name != "__metadata__"
    }  # fmt: skip


def unpacked(blob: Bytes) -> dict[str, Tensor]:
    """All tensors, copied."""
    return {name: _tensor(blob[place.first : place.last][None], place)[0] for name, place in layout(blob).items()}


def stacked(blobs: Sequence[Bytes], name: str) -> Tensor | list[Tensor]:
    """The tensor of this name from each blob: in one, copied once; or as a list where they differ in shape."""
    heads = [_head(blob) for blob in blobs]
    layouts = {head: _described(head)[name] for head in set(heads)}
    places = [layouts[head] for head in heads]
    if len({(place.dtype, place.shape) for place in layouts.values()}) > 1:
        return [unpacked(blob)[name] for blob in blobs]
    room = torch.empty((len(blobs), places[0].last - places[0].first), dtype=torch.uint8)
    rows = room.numpy()
    for row, blob, place in zip(rows, blobs, places, strict=True):
        row[:] = blob[place.first : place.last]
    return _shaped(room, places[0])


def _tensor(rows: Bytes, place: Place) -> Tensor:
    return _shaped(torch.from_numpy(rows.copy()), place)


def _shaped(room: Tensor, place: Place) -> Tensor:
    if not room.shape[1]:
        return torch.empty((len(room), *place.shape), dtype=place.dtype)
    return room.view(place.dtype).view(len(room), *place.shape)
