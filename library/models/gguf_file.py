"""Read GGUF files: the names, types and places of their tensors, and their metadata; no torch.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  Files of image models have the names of the
original model (as ComfyUI-GGUF and stable-diffusion.cpp write them), those of text encoders the names of llama.cpp.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

GGUF_MAGIC = b"GGUF"
VERSIONS = (2, 3)
SHAPE_KEY = "comfy.gguf.orig_shape."
"""Metadata of a tensor that was reshaped before it was quantized: its shape in the model."""

PLAIN_TYPES: Mapping[int, str] = {0: "F32", 1: "F16", 30: "BF16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
"""The names of types that are not quantized, as safetensors has them."""
PLAIN_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F64": 8}

BLOCK_TYPES: Mapping[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}
"""The quantized types that are read: name, values of a block, and bytes of a block."""

UNREAD_TYPES: Mapping[int, str] = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}

_SCALARS: Mapping[int, str] = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
"""The struct format of each type of a value in the metadata."""
_STRING, _ARRAY = 8, 9


class GgufError(Exception):
    """A file that is damaged or has a type that is not read; its text says which."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor in a file."""

    type_name: str
    """``F32``, ``F16`` ..., or that of its blocks: ``Q4_K``."""
    shape: tuple[int, ...]
    """The shape in the model, rows first."""
    offset: int
    """The place of its first byte in the file."""
    nbytes: int
    row_bytes: int
    """The bytes of each row, that is of the values along the last axis in the file."""


@dataclass(frozen=True)
class GgufHeader:
    """The tensors of a file and its metadata, of which long lists are left out."""

    tensors: Mapping[str, GgufTensor]
    metadata: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """What the file calls its model: ``flux``, ``t5encoder``, ``qwen2vl`` ..."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of queries and of keys of a language model; 0 if they are not named."""
        queries, keys = (self._get_count(f"attention.head_count{end}") for end in ("", "_kv"))
        return queries, keys or queries

    def _get_count(self, name: str) -> int:
        value = self.metadata.get(f"{self.architecture}.{name}", 0)
        return value if isinstance(value, int) else 0


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a file; raises ``GgufError``."""
    with path.open("rb") as file:
        try:
            return _read_header(file, path.stat().st_size)
        except (struct.error, MemoryError, OverflowError):
            raise GgufError("is truncated or damaged; download or copy it again") from None


def _read_header(file: BinaryIO, size: int) -> GgufHeader:
    if file.read(4) != GGUF_MAGIC:
        raise GgufError("is not a GGUF file")
    version, num_tensors, num_values = _unpack(file, "<IQQ")
    if version not in VERSIONS:
        raise GgufError(f"is a GGUF file of version {version}; versions 2 and 3 are read")
    metadata = {}
    for _ in range(num_values):
        key = _read_string(file)
        metadata[key] = _read_value(file, *_unpack(file, "<I"))
    entries = [(_read_string(file), *_read_tensor_info(file)) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise GgufError(f"is damaged: general.alignment is {alignment!r}; download or copy it again")
    start = -(-file.tell() // alignment) * alignment
    tensors = {name: _build_tensor(name, dims, kind, start + at, metadata) for name, dims, kind, at in entries}
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if size < end:
        raise GgufError(f"is truncated: {size:,} of {end:,} bytes are there; download or copy it again")
    return GgufHeader(tensors, metadata)


def _build_tensor(name: str, dims: tuple[int, ...], kind: int, offset: int, metadata: Mapping[str, Any]) -> GgufTensor:
    columns, rows = dims[0] if dims else 1, 1
    for length in dims[1:]:
        rows *= length
    if kind in PLAIN_TYPES:
        type_name = PLAIN_TYPES[kind]
        row_bytes = columns * PLAIN_BYTES[type_name]
    elif kind in BLOCK_TYPES:
        type_name, block, block_bytes = BLOCK_TYPES[kind]
        if columns % block:
            raise GgufError(f"is damaged: {name} has rows of {columns} values in {type_name}; download it again")
        row_bytes = columns // block * block_bytes
    else:
        raise GgufError(
            f"has weights of type {UNREAD_TYPES.get(kind, kind)}, which is not read; use a file of Q2_K to Q8_0, "
            "IQ4_NL or IQ4_XS"
        )
    shape = tuple(metadata.get(SHAPE_KEY + name, ())) or dims[::-1]
    return GgufTensor(type_name, shape, offset, rows * row_bytes, row_bytes)


def _read_tensor_info(file: BinaryIO) -> tuple[tuple[int, ...], int, int]:
    (count,) = _unpack(file, "<I")
    dims = _unpack(file, f"<{count}Q")
    kind, offset = _unpack(file, "<IQ")
    return dims, kind, offset


def _read_value(file: BinaryIO, kind: int) -> Any:
    """Read a value; of a list of texts or a long one only the fact that it is there."""
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _unpack(file, "<" + _get_scalar(kind))[0]
    item_kind, count = _unpack(file, "<IQ")
    if item_kind in (_STRING, _ARRAY):
        for _ in range(count):
            _read_value(file, item_kind)
        return ()
    return _unpack(file, f"<{count}{_get_scalar(item_kind)}")


def _get_scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise GgufError("is a damaged GGUF file; download or copy it again")
    return _SCALARS[kind]


def _read_string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > 2**28:
        raise GgufError("is a damaged GGUF file; download or copy it again")
    return file.read(length).decode("utf-8", errors="replace")


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))
