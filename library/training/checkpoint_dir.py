"""The checkpoint directory: state.json, tensors.safetensors, and files.json with the size and SHA-256 of each.

A checkpoint is written to a temporary directory, synced to disk and renamed, so that it is complete or absent.  Where
the ranks hold parts of the weights, ``parallel.shard_files`` adds a folder with the parts.
Old ones are deleted by ``training.checkpoint``, old LoRA files by ``training.save_adapter``.
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

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..atomic_files import FileEntry, compute_sha256, describe_file, fsync_dir, fsync_file, replace_path

CHECKPOINT_FORMAT_VERSION = 1
TENSORS_FILE, METADATA_FILE, FILE_LIST = "tensors.safetensors", "state.json", "files.json"

SHARDS_KEY = "shards"
"""The key of state.json that lists the dtype and the shape of each sharded tensor."""

LEGACY_KEYS = {
    "owed": "pending",
    "has_learnt": "has_trained",
    "bad_steps": "skipped_steps",
    "bad_pictures": "bad_samples",
}
"""The current names of keys of state.json that version 0.1 wrote."""

LEGACY_TREE_KEYS = {"average": "ema"}
"""The current names of the parts of the training state, in the ``tree`` of state.json, that version 0.1 wrote."""

LEGACY_CALLBACKS = {
    "Export": "save_adapter",
    "KeepState": "save_checkpoint",
    "Learnt": "update_norms",
    "Report": "save_report",
    "SameWeights": "weight_sync_check",
    "Preview": "preview",
    "Validation": "validation",
}
"""The callback ids of the class names that version 0.1 wrote for pending callbacks."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint: its directory and what state.json holds."""

    path: Path
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.metadata["step"])

    @property
    def sort_key(self) -> tuple[int, int, float]:
        """Grows from checkpoint to checkpoint; the clock, which may run backwards, only breaks ties."""
        return int(self.metadata.get("run", 0)), self.step, float(self.metadata["saved_at"])


def create_partial_dir(path: Path) -> Path:
    """Create the directory in which a checkpoint is written before it gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _get_partial_path(path)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    return new


def write_checkpoint(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Replace ``path`` atomically; raises ``OSError`` or ``SafetensorError``."""
    complete_checkpoint(path, create_partial_dir(path), metadata, tensors)


def complete_checkpoint(
    path: Path,
    new: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    other_files: Mapping[str, FileEntry] | None = None,
) -> None:
    """Write the files of a checkpoint to ``new``, beside ``other_files`` that are there, and give it its name."""
    old = path.with_name(f".{path.name}.old")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new / TENSORS_FILE)
    (new / METADATA_FILE).write_text(
        json.dumps({"format": CHECKPOINT_FORMAT_VERSION, **metadata}, ensure_ascii=False, indent=1), "utf-8"
    )
    own = {name: describe_file(new / name) for name in (TENSORS_FILE, METADATA_FILE)}
    for name in own:
        fsync_file(new / name)
    listed = {**own, **(other_files or {})}
    (new / FILE_LIST).write_text(json.dumps(listed, indent=1), "utf-8")
    fsync_file(new / FILE_LIST)
    fsync_dir(new)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        replace_path(path, old)
    replace_path(new, path)
    fsync_dir(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_checkpoint_info(path: Path) -> CheckpointInfo | str:
    """Verify the files of a checkpoint and read state.json; return what is wrong with it if it is not complete."""
    try:
        listed = json.loads((path / FILE_LIST).read_text("utf-8"))
        for name, entry in listed.items():
            if (path / name).stat().st_size != entry["size"] or compute_sha256(path / name) != entry["sha256"]:
                return f"{name} is damaged"
        metadata = json.loads((path / METADATA_FILE).read_text("utf-8"))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read: {error}"
    if metadata["format"] != CHECKPOINT_FORMAT_VERSION:
        return f"has format {metadata['format']}; this version reads format {CHECKPOINT_FORMAT_VERSION}"
    return CheckpointInfo(path, _upgrade_metadata(metadata))


def _upgrade_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Give the keys, parts and callbacks of a checkpoint of version 0.1 their current names."""
    upgraded = {LEGACY_KEYS.get(key, key): value for key, value in metadata.items()}
    if "tree" in upgraded:
        upgraded["tree"] = {LEGACY_TREE_KEYS.get(key, key): part for key, part in upgraded["tree"].items()}
    if "pending" in upgraded:
        upgraded["pending"] = [LEGACY_CALLBACKS.get(name, name) for name in upgraded["pending"]]
    return upgraded


def load_checkpoint_tensors(checkpoint: CheckpointInfo) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint: weights, EMA and optimizer state, by their names in ``state.json``."""
    try:
        with safe_open(checkpoint.path / TENSORS_FILE, framework="pt") as file:
            # Copies: others keep the file mapped, and Windows then refuses to replace the checkpoint by the next one.
            return {name: file.get_tensor(name).clone() for name in file.keys()}
    except SafetensorError as error:
        raise OSError(f"{checkpoint.path / TENSORS_FILE}: {error}") from error


def find_checkpoints(output_dir: Path, name: str) -> Iterator[Path]:
    """List directories that may be checkpoints of ``output_name``, with one that was being replaced when killed."""
    pattern = re.compile(rf"\.?{_build_name_pattern(name)}-state(\.old)?")
    try:
        yield from sorted(path for path in output_dir.iterdir() if pattern.fullmatch(path.name) and path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return


def compute_next_run_number(output_dir: Path, name: str) -> int:
    """Number a new run: one more than any run that left a checkpoint here, complete or not."""
    numbers = [0]
    for path in find_checkpoints(output_dir, name):
        with suppress(OSError, ValueError, AttributeError, TypeError):
            numbers.append(int(json.loads((path / METADATA_FILE).read_text("utf-8")).get("run", 0)))
    return 1 + max(numbers)


def _build_name_pattern(name: str) -> str:
    """Match the files of ``output_name``, but not those of a longer name that begins alike."""
    return rf"{re.escape(name)}(-\d{{6}}|-step\d{{8}})?"


def remove_partial_checkpoint(path: Path) -> None:
    """Remove what this process had written so far for ``path``."""
    shutil.rmtree(_get_partial_path(path), ignore_errors=True)


def _get_partial_path(path: Path) -> Path:
    # When a run fails, any of its ranks may be the one that writes.
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def remove_leftover_files(output_dir: Path, name: str) -> None:
    """Remove files that a killed run had not finished writing."""
    partial = _build_name_pattern(name)
    pattern = re.compile(
        rf"\.{partial}(-state(\.\d+)?\.new|(-ema)?(_(high|low)_noise)?(\.safetensors)?\.\d+\.(part|old))"
    )
    for path in [path for path in output_dir.iterdir() if pattern.fullmatch(path.name)]:
        if path.suffix == ".old" and not (target := path.with_name(path.name[1:].rsplit(".", 2)[0])).exists():
            replace_path(path, target)  # killed when the folder had not yet been replaced by its successor
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
