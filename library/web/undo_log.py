"""The undo log of a dataset file: every edit of captions is a file beside it, written before the captions are.

So a page that was started again, or that died while it wrote, can undo what it has written.
"""

import gzip
import json
import os
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..atomic_files import write_atomic
from ..dataset.image_ref import ImageRef
from ..errors import UserError
from ..problems import report_file
from .folders import OpenedFolders, OutsideFolders
from .jobs import FOLDER

MAX_UNDO, MAX_LOG_BYTES = 50, 2**26
"""Limits of the log: edits beyond them are forgotten, oldest first."""

END = ".json.gz"


@dataclass(frozen=True)
class CaptionChange:
    """The change that an edit makes to one caption file."""

    image: ImageRef
    file: Path
    before: bytes | None  # the content before; None if there was no file
    old_caption: str
    new_caption: str

    def export_json(self) -> list[str | None]:
        before = None if self.before is None else self.before.decode("utf-8", "surrogateescape")
        return [str(self.image.folder), self.image.file, str(self.file), before, self.old_caption, self.new_caption]

    @classmethod
    def parse(cls, row: Sequence[str]) -> "CaptionChange":
        folder, name, file, before, old, new = row
        content = None if before is None else before.encode("utf-8", "surrogateescape")
        return cls(ImageRef(Path(folder), name), Path(file), content, old, new)


@dataclass
class LoggedEdit:
    """One edit: in its file, or in memory where none can be written."""

    path: Path
    changes: Sequence[CaptionChange] | None = None

    def read(self) -> Sequence[CaptionChange]:
        if self.changes is not None:
            return self.changes
        rows = json.loads(gzip.decompress(self.path.read_bytes()))
        return [CaptionChange.parse(row) for row in rows]

    def write(self, changes: Sequence[CaptionChange]) -> None:
        rows = json.dumps([change.export_json() for change in changes]).encode()
        try:
            write_atomic(self.path, gzip.compress(rows, 1))
            self.changes = None
        except OSError:  # a read-only folder: undone while the page runs
            self.changes = changes


@dataclass
class UndoLog:
    """The last edits of a dataset file, the oldest first."""

    dataset: Path
    folders: OpenedFolders
    edits: list[LoggedEdit] = field(default_factory=list)

    def __post_init__(self) -> None:
        with suppress(OSError, OutsideFolders):
            names = [name for name in os.listdir(self.folders.resolve(self.folder)) if name.endswith(END)]
            self.edits = [LoggedEdit(self.folder / name) for name in sorted(names)]

    @property
    def folder(self) -> Path:
        return self.dataset.parent / FOLDER / "undo" / self.dataset.name

    def add(self, changes: Sequence[CaptionChange]) -> LoggedEdit:
        """Log an edit that is about to be written."""
        self.folders.resolve(self.folder)
        edit = LoggedEdit(self.folder / f"{time.time_ns():020}{END}")
        edit.write(changes)
        self.edits.append(edit)
        self._forget_oldest()
        return edit

    def shorten(self, edit: LoggedEdit, written: Sequence[CaptionChange]) -> None:
        """Keep what was written of an edit that did not come to its end."""
        if written:
            edit.write(written)
        else:
            self._remove(edit)

    def read_last(self) -> Sequence[CaptionChange]:
        """Read the last edit; one that cannot be read is forgotten."""
        edit = self.edits[-1]
        try:
            return edit.read()
        except (OSError, ValueError, TypeError, EOFError, zlib.error):
            self._remove(edit)
            raise UserError(report_file(edit.path, "cannot be read", "this edit cannot be undone")) from None

    def remove_last(self) -> None:
        self._remove(self.edits[-1])

    def _forget_oldest(self) -> None:
        sizes = [edit.path.stat().st_size if edit.path.is_file() else 0 for edit in self.edits]
        while len(self.edits) > MAX_UNDO or (len(self.edits) > 1 and sum(sizes[-len(self.edits) :]) > MAX_LOG_BYTES):
            self._remove(self.edits[0])

    def _remove(self, edit: LoggedEdit) -> None:
        self.edits.remove(edit)
        with suppress(OSError):
            edit.path.unlink(missing_ok=True)
