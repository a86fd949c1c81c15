"""Read the header of a checkpoint, in one file or several, safetensors or GGUF: the names and shapes of its weights.

No torch, and no weights are read, so that a wrong file is reported at once.  Weights that are stored quantized have
the shape that they have in the model, and what is stored beside them is no weight.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoint_shards import list_shard_paths
from .gguf_file import PLAIN_BYTES, GgufError, is_gguf, read_gguf_header
from .gguf_names import rename_tensor
from .model_configs import ModelError
from .quantized_keys import (
    TORCHAO_ACTIVATIONS,
    TORCHAO_SCALE,
    TORCHAO_VALUES,
    TORCHAO_ZERO,
    StoredFormat,
    find_stored_formats,
    find_torchao_weights,
    list_side_tensors,
)

_MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""


@dataclass(frozen=True)
class CheckpointHeader:
    """What is known of a checkpoint without its weights."""

    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]
    formats: Mapping[str, StoredFormat] = field(default_factory=dict)
    """The format of each weight that is stored quantized."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names in the file of weights that have another one here, as text encoders in GGUF files do."""
    architecture: str = ""
    """What a GGUF file calls its model."""
    heads: tuple[int, int] = (0, 0)
    """The heads of queries and of keys that a GGUF file names."""


@dataclass(frozen=True)
class RawHeader:
    """The header of one safetensors file as it is."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    places: Mapping[str, tuple[int, int]]
    """The first byte of each tensor in the file, and the one after its last."""
    metadata: Mapping[str, str]


def read_checkpoint_header(path: Path) -> CheckpointHeader:
    """Read the headers of all files of the checkpoint of which ``path`` is one, as one header."""
    paths = list_shard_paths(path)
    if missing := [shard.name for shard in paths if not shard.is_file()]:
        names = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        text = f"{len(missing)} of the {len(paths)} files of the model are missing: {names}"
        raise ModelError(f"{text}; put them into the same folder")
    return read_files_header(paths)


def read_files_header(paths: list[Path]) -> CheckpointHeader:
    """Read the headers of all of these files as one."""
    if is_gguf(paths[0]):
        return _merge_gguf_headers(paths)
    headers = {path: read_safetensors_header(path) for path in paths}
    files = {key: path for path, header in headers.items() for key in header.shapes}

    def read_bytes(key: str) -> bytes:
        start, end = headers[files[key]].places[key]
        with files[key].open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    shapes = {key: shape for header in headers.values() for key, shape in header.shapes.items()}
    dtypes = {key: dtype for header in headers.values() for key, dtype in header.dtypes.items()}
    metadata = {key: text for header in headers.values() for key, text in header.metadata.items()}
    formats, side = find_stored_formats(shapes, dtypes, read_bytes, metadata), list_side_tensors(shapes)
    weights = {key: formats[key].shape if key in formats else shapes[key] for key in shapes if key not in side}
    names = dict[str, str]()
    torchao = find_torchao_weights(shapes, dtypes, metadata, read_bytes)
    if torchao:
        starts = {key.removesuffix(TORCHAO_VALUES) for key, _ in torchao.values()}
        ends = (TORCHAO_VALUES, TORCHAO_SCALE, TORCHAO_ZERO, *TORCHAO_ACTIVATIONS)
        parts = {start + end for start in starts for end in ends}
        weights = {key: shape for key, shape in weights.items() if key not in parts}
    for name, (key, stored) in torchao.items():
        names[name], formats[name], weights[name] = key, stored, stored.shape
    return CheckpointHeader(weights, metadata, formats, names)


def _merge_gguf_headers(paths: list[Path]) -> CheckpointHeader:
    shapes, formats, names, architecture, heads = {}, dict[str, StoredFormat](), dict[str, str](), "", (0, 0)
    for path in paths:
        try:
            header = read_gguf_header(path)
        except GgufError as error:
            raise ModelError(str(error)) from None
        if not architecture:
            architecture, heads = header.architecture, header.heads
        for name, tensor in header.tensors.items():
            key = rename_tensor(name, architecture)
            shapes[key] = tensor.shape
            if key != name:
                names[key] = name
            if tensor.type_name not in PLAIN_BYTES:
                formats[key] = StoredFormat(tensor.type_name, tensor.shape)
    return CheckpointHeader(shapes, {}, formats, names, architecture=architecture, heads=heads)


def read_safetensors_header(path: Path) -> RawHeader:
    """Read the header of a .safetensors file; other files raise ``ModelError`` with their type."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            raw = file.read(length) if 2 <= length <= _MAX_HEADER_BYTES else b""
            first_bytes = start + raw[:64] if raw else start + file.read(64)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}") from None
    if not raw.startswith(b"{"):
        raise ModelError(_describe_file_type(first_bytes))
    if len(raw) < length:
        raise ModelError("is truncated; download or copy it again")
    try:
        data = json.loads(raw)
        metadata = dict(data.pop("__metadata__", None) or {})
        shapes = {name: tuple(entry["shape"]) for name, entry in data.items()}
        dtypes = {name: str(entry["dtype"]) for name, entry in data.items()}
        begin = 8 + length
        places = {
            name: (begin + entry["data_offsets"][0], begin + entry["data_offsets"][1]) for name, entry in data.items()
        }
        end = max((place[1] for place in places.values()), default=begin)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError("is a damaged safetensors file; download or copy it again") from None
    if (size := path.stat().st_size) < end:
        raise ModelError(f"is truncated: {size:,} of {end:,} bytes are there; download or copy it again")
    return RawHeader(shapes, dtypes, places, metadata)


def _describe_file_type(first_bytes: bytes) -> str:
    if first_bytes.startswith((b"PK", b"\x80")):
        return (
            "is a pickle (.ckpt, .pt, .bin), which can run code when it is loaded and is never read; use the "
            ".safetensors file of this model, or save it as one in ComfyUI (Save Checkpoint) or A1111 (Checkpoint "
            "Merger)"
        )
    if first_bytes.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer; run `git lfs pull` in its repository"
    if first_bytes.lstrip().lower().startswith((b"<!doctype", b"<html", b'{"error', b"<?xml")):
        return "is a web page, not a model; the download failed"
    return "is empty" if not first_bytes else "is not a safetensors file"
