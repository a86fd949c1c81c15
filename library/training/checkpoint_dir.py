"""The state of a run on disk: a folder that is either whole or does not count.

It is written under another name, every file to the disk, a list of the files with their hashes last, and renamed.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..atomic_files import compute_sha256, fsync_dir, fsync_file

CHECKPOINT_FORMAT_VERSION = 1


TENSORS_FILE, METADATA_FILE, FILE_LIST = "tensors.safetensors", "state.json", "files.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """A state as its list of files describes it."""

    path: Path
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.metadata["step"])

    @property
    def sort_key(self) -> tuple[int, int, float]:
        """Grows from state to state; no clock is asked, unless all else is the same."""
        return int(self.metadata.get("run", 0)), self.step, float(self.metadata["saved_at"])


def write_checkpoint(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """``path`` is at every moment the old state or the new one; ``OSError`` and ``SafetensorError`` come through."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = _get_partial_path(path), path.with_name(f".{path.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new / TENSORS_FILE)
    (new / METADATA_FILE).write_text(
        json.dumps({"format": CHECKPOINT_FORMAT_VERSION, **metadata}, ensure_ascii=False, indent=1), "utf-8"
    )
    listed = {
        name: {"size": (new / name).stat().st_size, "sha256": compute_sha256(new / name)}
        for name in (TENSORS_FILE, METADATA_FILE)
    }
    for name in listed:
        fsync_file(new / name)
    (new / FILE_LIST).write_text(json.dumps(listed, indent=1), "utf-8")
    fsync_file(new / FILE_LIST)
    fsync_dir(new)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    new.rename(path)
    fsync_dir(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_checkpoint_info(path: Path) -> CheckpointInfo | str:
    """A state whose files all are what its list says, or what is wrong with it."""
    try:
        listed = json.loads((path / FILE_LIST).read_text("utf-8"))
        for name, told in listed.items():
            if (path / name).stat().st_size != told["size"] or compute_sha256(path / name) != told["sha256"]:
                return f"{name} is damaged"
        facts = json.loads((path / METADATA_FILE).read_text("utf-8"))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error}"
    if facts["format"] != CHECKPOINT_FORMAT_VERSION:
        return f"it is in format {facts['format']}, and this version reads format {CHECKPOINT_FORMAT_VERSION}"
    return CheckpointInfo(path, facts)


def load_checkpoint_tensors(checkpoint: CheckpointInfo) -> dict[str, Tensor]:
    """Everything that was kept as tensors."""
    try:
        return load_file(checkpoint.path / TENSORS_FILE)
    except SafetensorError as error:
        raise OSError(f"{checkpoint.path / TENSORS_FILE}: {error}") from error


def find_checkpoints(output_dir: Path, name: str) -> Iterator[Path]:
    """Folders that may be states of the runs called ``name``; one that was being replaced counts, too."""
    pattern = re.compile(rf"\.?{_build_name_pattern(name)}-state(\.old)?")
    try:
        yield from sorted(path for path in output_dir.iterdir() if pattern.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return


def compute_next_run_number(output_dir: Path, name: str) -> int:
    """The number of a run that begins now: one more than that of any whose state is there, whole or not."""
    numbers = [0]
    for path in find_checkpoints(output_dir, name):
        with suppress(OSError, ValueError, AttributeError, TypeError):
            numbers.append(int(json.loads((path / METADATA_FILE).read_text("utf-8")).get("run", 0)))
    return 1 + max(numbers)


def _build_name_pattern(name: str) -> str:
    """A pattern for what runs called ``name`` write, and not for what those of a longer name do."""
    return rf"{re.escape(name)}(-\d{{6}}|-step\d{{8}})?"


def remove_partial_checkpoint(path: Path) -> None:
    """What this process had begun to write at ``path``."""
    shutil.rmtree(_get_partial_path(path), ignore_errors=True)


def _get_partial_path(path: Path) -> Path:
    """When a run fails, any of its processes may be the one that writes."""
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def remove_leftover_files(output_dir: Path, name: str) -> None:
    """What a run that was killed had begun to write."""
    begun = _build_name_pattern(name)
    pattern = re.compile(rf"\.{begun}(-state(\.\d+)?\.new|(-ema)?\.safetensors\.\d+\.part)")
    for path in [path for path in output_dir.iterdir() if pattern.fullmatch(path.name)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
