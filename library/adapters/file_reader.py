"""Read LoRA files of any program; what is damaged, or no LoRA file at all, is named with its file and key.

Checks that need the model, such as sizes, are in ``validate_file``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from .module_adapter import ALPHA
from .peft_metadata import PEFT_METADATA_KEY, read_peft_config
from .validate_file import describe_foreign_keys, group_unread_keys, join_messages

MAX_HEADER_BYTES = 100_000_000
"""The limit that safetensors itself has."""

MAX_MAPPED_BYTES = 2**26
"""Bytes of a file that ``iter_tensors`` maps into memory at once."""

PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_FOREIGN_STARTS: Mapping[bytes, str] = {
    b"version https://git-lfs": "is a Git LFS pointer and not the file itself; run git lfs pull",
    b"<": "is a web page and not a LoRA; download the file again",
    b"GGUF": "is a GGUF file; only .safetensors files are read",
    b"PK\x03\x04": "is a pickle; only .safetensors files are read, since unpickling can run code",
    b"\x80": "is a pickle; only .safetensors files are read, since unpickling can run code",
}
"""What a file is that begins with these bytes, and so is no safetensors file."""

_READ_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class InvalidAdapterFileError(UserError):
    """A LoRA file is damaged or failed its verification; an older file of the same name was not replaced."""


def read_safetensors(path: Path, name: object = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file; messages call it ``name``, by default its path.

    The tensors are copies: those of safetensors keep the file mapped, and Windows replaces no file that is.
    """
    read_header(path, name)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InvalidAdapterFileError(f"{name or path}: cannot be read as safetensors: {error}") from None


@dataclass(frozen=True)
class FileHeader:
    """The header of a safetensors file that is complete."""

    ends: Mapping[str, int]
    """The position in the file at which the bytes of each tensor end."""
    metadata: Mapping[str, str]


def read_header(path: Path, name: object = None) -> FileHeader:
    """Read the header of a safetensors file, or raise with why it is none."""
    header = _inspect_container(path)
    if isinstance(header, str):
        raise InvalidAdapterFileError(f"{name or path}: {header}")
    return header


def iter_tensors(path: Path, name: object = None) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors one by one; at most ``MAX_MAPPED_BYTES`` of the file are in memory.

    The file stays mapped for as long as a tensor is kept.
    """
    groups: dict[int, list[str]] = {}
    for key, end in read_header(path, name).ends.items():
        groups.setdefault(end // MAX_MAPPED_BYTES, []).append(key)
    try:
        for keys in groups.values():
            with safe_open(path, framework="pt") as file:  # the mapping of the group before ends
                yield from ((key, file.get_tensor(key)) for key in keys)
    except (SafetensorError, OSError) as error:
        raise InvalidAdapterFileError(f"{name or path}: cannot be read as safetensors: {error}") from None


def _inspect_container(path: Path) -> FileHeader | str:
    """The header, or why it is no complete safetensors file, from its first bytes and its header."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        return "is a pickle; only .safetensors files are read, since unpickling can run code"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(32)
            length = int.from_bytes(start[:8], "little")
            if size == 0:
                return "is empty"
            for first, problem in _FOREIGN_STARTS.items():
                if start.lstrip().startswith(first) and (size < 8 or length > size):
                    return problem
            if size < 8 or length > MAX_HEADER_BYTES:
                return "cannot be read as safetensors: it does not begin with a safetensors header"
            if size < 8 + length:
                return _describe_truncation(size, 8 + length)
            file.seek(8)
            header = json.loads(file.read(length))
            ends = {key: int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__"}
            metadata = dict(header.get("__metadata__") or {})
            end = 8 + length + max(ends.values(), default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError):
        return "cannot be read as safetensors: its header is damaged; download or save it again"
    return _describe_truncation(size, end) if size < end else FileHeader(ends, metadata)


def _describe_truncation(size: int, expected: int) -> str:
    return f"is truncated: {size:,} of {expected:,} bytes; download or copy it again"


def read_adapter_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a LoRA file of any program; raise with all that is wrong in the file itself.

    Tensors in float8 are cast to bfloat16, which holds each of their values.
    """
    if problem := describe_foreign_keys(list(read_header(path).ends)):  # a whole model has gigabytes
        raise InvalidAdapterFileError(f"{path}: {problem}")
    tensors, metadata = read_safetensors(path)
    tensors = {key: each.bfloat16() if each.dtype in _FLOAT8_DTYPES else each for key, each in tensors.items()}
    if problems := list(find_damaged_tensors(tensors)):
        raise InvalidAdapterFileError(f"{path}: {join_messages(problems)}")
    if PEFT_METADATA_KEY not in metadata and (config := read_peft_config(path, tensors)) is not None:
        metadata = {**metadata, PEFT_METADATA_KEY: config}
    return tensors, metadata


def find_damaged_tensors(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield what is wrong with the tensors of a file, whatever model it is for."""
    unread = {key for keys in group_unread_keys(tensors).values() for key in keys}
    for key, tensor in tensors.items():
        if key in unread:  # which is said where the file is identified
            continue
        is_alpha = key.endswith(f".{ALPHA}")
        if tensor.dtype not in (*_READ_DTYPES, *(_INTEGER_DTYPES if is_alpha else ())):
            yield f"{key} is of type {str(tensor.dtype).removeprefix('torch.')}; float tensors are read"
        elif tensor.numel() == 0:
            yield f"{key} is empty: {list(tensor.shape)}"
        elif not bool(tensor.isfinite().all()):
            count, kind = int((~tensor.isfinite()).sum()), "NaN" if bool(tensor.isnan().any()) else "infinite"
            yield f"{key}: {count:,} of {tensor.numel():,} values are {kind}; the file is damaged"
        elif is_alpha and tensor.numel() != 1:
            yield f"{key} has {tensor.numel()} values; alpha is one number"
        elif is_alpha and not bool(tensor.any()) and not _is_rotation(key.removesuffix(f".{ALPHA}"), tensors):
            yield (
                f"{key} is 0: sd-scripts reads this as the rank, other programs as no effect; write the alpha that is"
                " meant into the file"
            )


def _is_rotation(module: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether alpha is the constraint of an OFT, which may be 0."""
    return any(f"{module}.{name}" in tensors for name in ("oft_blocks", "oft_blocks.0"))
