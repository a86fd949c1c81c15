"""The names and shapes of the weights in a safetensors file, from its first bytes; no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .reading import Problem

_LONGEST = 100_000_000
"""Bytes of the longest header that safetensors itself reads."""


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Look into a file; what is no safetensors file is named."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            raw = file.read(length) if 2 <= length <= _LONGEST else b""
            more = start + raw[:64] if raw else start + file.read(64)
    except OSError as error:
        raise Problem(f"cannot be read: {error.strerror}") from None
    if not raw.startswith(b"{"):
        raise Problem(_named(more))
    if len(raw) < length:
        raise Problem("is cut off; download or copy it again")
    try:
        data = json.loads(raw)
        metadata = data.pop("__metadata__", {})
        header = Header({name: tuple(entry["shape"]) for name, entry in data.items()}, metadata)
        end = 8 + length + max((entry["data_offsets"][1] for entry in data.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise Problem("is a damaged safetensors file; download or copy it again") from None
    if (size := path.stat().st_size) < end:
        raise Problem(f"is cut off: {size:,} of {end:,} bytes are there; download or copy it again")
    return header


def _named(start: bytes) -> str:
    """What a file is that is no safetensors file."""
    if start.startswith((b"PK", b"\x80")):
        return ("is a pickle (.ckpt, .pt, .bin), which can run code when it is opened and is never read; use the "
                ".safetensors file of this model")  # fmt: skip
    if start.startswith(b"GGUF"):
        return "is a GGUF file, made for drawing; use the .safetensors file of this model"
    if start.startswith(b"version https://git-lfs"):
        return "is only a pointer of git-lfs; run `git lfs pull` where it lies"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b'{"error', b"<?xml")):
        return "is a web page and no model; the download went wrong"
    return "is empty" if not start else "is no safetensors file"
