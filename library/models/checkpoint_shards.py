"""A safetensors checkpoint that is split into files named ``...-00001-of-00005.safetensors``, of which one is given.

torch and safetensors are imported where a file is opened, as checks of settings list files only.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_SHARD_PATTERN = re.compile(r"(.*?)(\d+)-of-(\d+)\.safetensors")


def list_shard_paths(path: Path) -> list[Path]:
    """List all files of the checkpoint of which ``path`` is one, in order, whether they exist or not."""
    match = _SHARD_PATTERN.fullmatch(path.name)
    if match is None:
        return [path]
    start, count = match[1], int(match[3])
    return [path.with_name(f"{start}{number:05d}-of-{count:05d}.safetensors") for number in range(1, count + 1)]


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
    from safetensors import safe_open

    opened: dict[str, Any] = {}
    for shard in list_shard_paths(path):
        file = safe_open(str(shard), framework="pt")
        opened.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]
    yield CheckpointTensors(opened)
