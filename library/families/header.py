"""The names and shapes of the weights in a safetensors file, from its first bytes; no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .reading import ModelError

_MAX_HEADER_BYTES = 100_000_000
"""Bytes of the longest header that safetensors itself reads."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file says of itself."""

    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Look into a file; what is no safetensors file is named."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            raw = file.read(length) if 2 <= length <= _MAX_HEADER_BYTES else b""
            more = start + raw[:64] if raw else start + file.read(64)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}") from None
    if not raw.startswith(b"{"):
        raise ModelError(_describe_file_type(more))
    if len(raw) < length:
        raise ModelError("is cut off; download or copy it again")
    try:
        data = json.loads(raw)
        metadata = data.pop("__metadata__", {})
        header = SafetensorsHeader({name: tuple(entry["shape"]) for name, entry in data.items()}, metadata)
        end = 8 + length + max((entry["data_offsets"][1] for entry in data.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError("is a damaged safetensors file; download or copy it again") from None
    if (size := path.stat().st_size) < end:
        raise ModelError(f"is cut off: {size:,} of {end:,} bytes are there; download or copy it again")
    return header


def _describe_file_type(first_bytes: bytes) -> str:
    """What a file is that is no safetensors file."""
    if first_bytes.startswith((b"PK", b"\x80")):
        return ("is a pickle (.ckpt, .pt, .bin), which can run code when it is opened and is never read; use the "
                ".safetensors file of this model")  # fmt: skip
    if first_bytes.startswith(b"GGUF"):
        return "is a GGUF file, made for drawing; use the .safetensors file of this model"
    if first_bytes.startswith(b"version https://git-lfs"):
        return "is only a pointer of git-lfs; run `git lfs pull` where it lies"
    if first_bytes.lstrip().lower().startswith((b"<!doctype", b"<html", b'{"error', b"<?xml")):
        return "is a web page and no model; the download went wrong"
    return "is empty" if not first_bytes else "is no safetensors file"
