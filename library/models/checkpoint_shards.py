"""A checkpoint in one file, or split into files named ``...-00001-of-00005.safetensors``, of which one is given.

Its tensors are read as the file has them: those of GGUF files that are quantized as rows of bytes.

torch and safetensors are imported where a file is opened, as checks of settings list files only.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .gguf_file import PLAIN_BYTES, is_gguf, read_gguf_header

if TYPE_CHECKING:
    from torch import Tensor

_SHARD_PATTERN = re.compile(r"(.*?)(\d+)-of-(\d+)\.(safetensors|gguf)")


def list_shard_paths(path: Path) -> list[Path]:
    """List all files of the checkpoint of which ``path`` is one, in order, whether they exist or not."""
    match = _SHARD_PATTERN.fullmatch(path.name)
    if match is None:
        return [path]
    start, count = match[1], int(match[3])
    return [path.with_name(f"{start}{number:05d}-of-{count:05d}.{match[4]}") for number in range(1, count + 1)]


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of a checkpoint in one file or several, by their keys; each is read when it is asked for."""

    files: dict[str, Any]

    def keys(self) -> list[str]:
        """List the keys of all files."""
        return list(self.files)

    def get_tensor(self, key: str) -> "Tensor":
        """Read one tensor."""
        tensor: Tensor = self.files[key].get_tensor(key)
        return tensor


@contextmanager
def open_checkpoint(path: Path) -> Iterator[CheckpointTensors]:
    """Open all files of the checkpoint of which ``path`` is one."""
    yield open_files(list_shard_paths(path))


def open_files(paths: list[Path]) -> CheckpointTensors:
    """Open all of these files as one checkpoint."""
    from safetensors import safe_open

    opened: dict[str, Any] = {}
    for path in paths:
        file: Any = GgufFile(path) if is_gguf(path) else safe_open(str(path), framework="pt")
        opened.update(dict.fromkeys(file.keys(), file))
    return CheckpointTensors(opened)


class GgufFile:
    """The tensors of one GGUF file, which is mapped into memory: a tensor shares its pages."""

    def __init__(self, path: Path):
        import numpy
        import torch

        self._tensors = read_gguf_header(path).tensors
        self._data = torch.from_numpy(numpy.memmap(path, dtype=numpy.uint8, mode="c"))

    def keys(self) -> list[str]:
        """List the names of all tensors."""
        return list(self._tensors)

    def get_tensor(self, key: str) -> "Tensor":
        """Return one tensor: rows of bytes if it is quantized."""
        import torch

        tensor = self._tensors[key]
        data = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.type_name not in PLAIN_BYTES:
            return data.view(-1, tensor.row_bytes)
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
        dtype = getattr(torch, names.get(tensor.type_name, tensor.type_name.lower().replace("i", "int")))
        if tensor.offset % PLAIN_BYTES[tensor.type_name]:
            data = data.clone()
        return data.view(dtype).view(tensor.shape)
