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

from ..data.cache.file_hashes import hash_of
from ..durable import flush, flush_folder

FORMAT = 1
TENSORS, FACTS, LIST = "tensors.safetensors", "state.json", "files.json"


@dataclass(frozen=True)
class Found:
    """A state as its list of files describes it."""

    path: Path
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    @property
    def age(self) -> tuple[int, int, float]:
        """Grows from state to state; no clock is asked, unless all else is the same."""
        return int(self.facts.get("run", 0)), self.step, float(self.facts["saved_at"])


def write(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """``path`` is at every moment the old state or the new one; ``OSError`` and ``SafetensorError`` come through."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = _begun(path), path.with_name(f".{path.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new / TENSORS)
    (new / FACTS).write_text(json.dumps({"format": FORMAT, **facts}, ensure_ascii=False, indent=1), "utf-8")
    listed = {name: {"size": (new / name).stat().st_size, "sha256": hash_of(new / name)} for name in (TENSORS, FACTS)}
    for name in listed:
        flush(new / name)
    (new / LIST).write_text(json.dumps(listed, indent=1), "utf-8")
    flush(new / LIST)
    flush_folder(new)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    new.rename(path)
    flush_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def facts_of(path: Path) -> Found | str:
    """A state whose files all are what its list says, or what is wrong with it."""
    try:
        listed = json.loads((path / LIST).read_text("utf-8"))
        for name, told in listed.items():
            if (path / name).stat().st_size != told["size"] or hash_of(path / name) != told["sha256"]:
                return f"{name} is damaged"
        facts = json.loads((path / FACTS).read_text("utf-8"))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error}"
    if facts["format"] != FORMAT:
        return f"it is in format {facts['format']}, and this version reads format {FORMAT}"
    return Found(path, facts)


def tensors_of(found: Found) -> dict[str, Tensor]:
    """Everything that was kept as tensors."""
    try:
        return load_file(found.path / TENSORS)
    except SafetensorError as error:
        raise OSError(f"{found.path / TENSORS}: {error}") from error


def states(folder: Path, name: str) -> Iterator[Path]:
    """Folders that may be states of the runs called ``name``; one that was being replaced counts, too."""
    pattern = re.compile(rf"\.?{_names_of(name)}-state(\.old)?")
    try:
        yield from sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return


def next_run(folder: Path, name: str) -> int:
    """The number of a run that begins now: one more than that of any whose state is there, whole or not."""
    numbers = [0]
    for path in states(folder, name):
        with suppress(OSError, ValueError, AttributeError, TypeError):
            numbers.append(int(json.loads((path / FACTS).read_text("utf-8")).get("run", 0)))
    return 1 + max(numbers)


def _names_of(name: str) -> str:
    """A pattern for what runs called ``name`` write, and not for what those of a longer name do."""
    return rf"{re.escape(name)}(-\d{{6}}|-step\d{{8}})?"


def remove_begun(path: Path) -> None:
    """What this process had begun to write at ``path``."""
    shutil.rmtree(_begun(path), ignore_errors=True)


def _begun(path: Path) -> Path:
    """When a run fails, any of its processes may be the one that writes."""
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def remove_leftovers(folder: Path, name: str) -> None:
    """What a run that was killed had begun to write."""
    begun = _names_of(name)
    pattern = re.compile(rf"\.{begun}(-state(\.\d+)?\.new|(-ema)?\.safetensors\.\d+\.part)")
    for path in [path for path in folder.iterdir() if pattern.fullmatch(path.name)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
