"""Runs that were deleted in the page: their files lie in a hidden folder beside them, and can be put back.

Moving them within their folder is one rename each, whatever their size; nothing is lost until the user removes them
for good.
"""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..atomic_files import write_atomic
from ..errors import UserError
from ..problems import report_file
from .folders import OpenedFolders
from .jobs import FOLDER
from .runs import METRICS_END, SUMMARY_END, Run
from .validate_requests import HEADER

DELETED_FOLDER, MANIFEST = "deleted", "deleted.json"
SAMPLE_FOLDER = "sample"
_PARTS = r"(-\d{6,}|-step\d{8,})?(-ema)?(_(high|low)_noise)?"
_WEIGHT_ENDS = r"(-state|(_emb)?\.safetensors)"
_OTHER_ENDS = (
    r"\.(report\.html|before_after\.png|metrics\.jsonl|evaluation\.jsonl|run\.json|notes\.json|log|trace\.json\.gz"
    r"|error-rank\d+\.txt|nan-step\d+(-rank\d+)?\.json)"
)
"""What the names of a run's files have after its own: weights have an epoch or a step, too."""


@dataclass(frozen=True)
class DeletedRun:
    """A deleted run, and the folder in which its files lie."""

    entry: Path
    name: str
    deleted_at: float

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.entry.parents[2]

    @property
    def num_bytes(self) -> int:
        total = 0
        for path in self.entry.rglob("*"):
            with suppress(OSError):  # it is put back or removed just now
                total += path.lstat().st_size if path.name != MANIFEST else 0
        return total

    def restore(self) -> None:
        """Put all files back; none if a file of that name is there again."""
        names = [path.relative_to(self.entry) for path in _iter_moved(self.entry)]
        if taken := [name for name in names if os.path.lexists(self.folder / name)]:
            paths = (self.folder / name for name in taken)
            raise UserError(
                *(report_file(path, "is there again", "rename it, then put the run back") for path in paths)
            )
        _move_all([(self.entry / name, self.folder / name) for name in names])
        self._close()

    def remove(self) -> None:
        """Remove what is left of it for good."""
        shutil.rmtree(self.entry)
        self._remove_empty_folders()

    def _close(self) -> None:
        """Remove the entry if none of its files is left in it; those that could not be moved stay listed."""
        if next(_iter_moved(self.entry), None) is None:
            (self.entry / MANIFEST).unlink(missing_ok=True)
            for folder in (self.entry / SAMPLE_FOLDER, self.entry):
                with suppress(OSError):
                    folder.rmdir()
            self._remove_empty_folders()

    def _remove_empty_folders(self) -> None:
        for folder in (self.entry.parent, self.entry.parents[1]):
            with suppress(OSError):
                folder.rmdir()


def delete_run(run: Run) -> DeletedRun:
    """Move the files of a run away; raise ``UserError`` if one cannot be moved, and then all stay."""
    files = list_run_files(run)
    entry = run.folder / FOLDER / DELETED_FOLDER / f"{time.time_ns():020}"
    entry.mkdir(parents=True)
    deleted = DeletedRun(entry, run.name, time.time())
    try:
        manifest = json.dumps({"name": run.name, "deleted_at": deleted.deleted_at})
        write_atomic(entry / MANIFEST, manifest.encode())
        _move_all([(path, entry / path.relative_to(run.folder)) for path in files])
    except BaseException:
        deleted._close()
        raise
    return deleted


def list_run_files(run: Run) -> list[Path]:
    """List the files and checkpoint folders that belong to a run, and to no other whose name begins like it."""
    ends = (SUMMARY_END, METRICS_END)  # runs of version 0.1 have only the latter
    others = {path.name.removesuffix(end) for end in ends for path in run.folder.glob(f"*{end}")}
    longer = [name for name in others if name.startswith(run.name) and name != run.name]
    found = []
    for path in sorted(run.folder.iterdir()):
        if _belongs_to(path, run.name) and not any(_belongs_to(path, name) for name in longer):
            found.append(path)
    preview = re.compile(re.escape(run.name) + r"_(e?\d{6,})_(\d{2,})_\d{14}_\d+\.(png|webp|mp4)")
    samples = run.folder / SAMPLE_FOLDER
    if samples.is_dir() and not samples.is_symlink():
        found += [path for path in sorted(samples.iterdir()) if preview.fullmatch(path.name)]
    return found


def _belongs_to(path: Path, run_name: str) -> bool:
    name = re.escape(run_name)
    if re.fullmatch(f"{name}({_PARTS}{_WEIGHT_ENDS}|{_OTHER_ENDS})", path.name) or path.name == f".{run_name}.lock":
        return True
    if path.name == f"{run_name}.toml":
        return _is_written_here(path)
    return re.fullmatch(name + _PARTS, path.name) is not None and _holds_model(path)


def find_deleted_runs(folders: Iterable[Path]) -> list[DeletedRun]:
    """Find the deleted runs of these folders, the last first."""
    found = [run for folder in folders for run in _read_entries(folder / FOLDER / DELETED_FOLDER)]
    return sorted(found, key=lambda run: -run.deleted_at)


def open_deleted_run(folders: OpenedFolders, key: str) -> DeletedRun:
    """Return the deleted run of an address."""
    entry = folders.resolve_key(key)
    for run in _read_entries(entry.parent):
        if run.entry == entry and entry.parent.name == DELETED_FOLDER and entry.parents[1].name == FOLDER:
            return run
    raise UserError("this run is no longer among the deleted ones; reload the page")


def _read_entries(folder: Path) -> Iterator[DeletedRun]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((entry / MANIFEST).read_text("utf-8"))
            deleted_at = float(values["deleted_at"])
            yield DeletedRun(entry, str(values["name"]), deleted_at if math.isfinite(deleted_at) else 0.0)


def _iter_moved(entry: Path) -> Iterator[Path]:
    for path in sorted(entry.iterdir()):
        if path.name == SAMPLE_FOLDER and path.is_dir():
            yield from sorted(path.iterdir())
        elif path.name != MANIFEST:
            yield path


def _move_all(moves: Sequence[tuple[Path, Path]]) -> None:
    """Rename all or none."""
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            target.parent.mkdir(exist_ok=True)
            os.rename(source, target)
            done.append((source, target))
    except OSError as error:
        for source, target in reversed(done):
            with suppress(OSError):
                os.rename(target, source)
        text = f"cannot be moved: {error.strerror}"
        raise UserError(report_file(error.filename, text, "close the programs that have it open")) from None


def _is_written_here(path: Path) -> bool:
    """Whether a settings file was written by the page; one that the user wrote stays."""
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            return file.read(len(HEADER)) == HEADER
    except OSError:
        return False


def _holds_model(path: Path) -> bool:
    """Whether a folder is a model that full training has saved."""
    return path.is_dir() and not path.is_symlink() and (path / "model_index.json").is_file()
