"""What is known of the files of one folder, brought up to date as they are looked at."""

import os
from pathlib import Path
from typing import Any

from .origin import Origin
from .scan_store import Kept, Row


class FolderScan:
    """What is known of one folder, brought up to date as its files are looked at."""

    def __init__(self, home: Path, kept: Kept):
        self.home, self.kept = Path(os.path.realpath(home)), kept
        self.rows = dict(kept.rows)
        self.wanted: set[str] = set()
        self.met: Path | None = None  # the folder of the last picture, which is mostly that of the next one
        self.is_here = False
        self.by_content: dict[str, list[Any]] | None = None
        self.is_changed = False
        self.path: Path | None = kept.places[0]
        self.note: str | None = None

    def key_of(self, picture: Origin) -> str:
        """Names a picture here; from now on it counts as asked for."""
        if picture.folder is not self.met:
            self.met, self.is_here = picture.folder, os.path.realpath(picture.folder) == str(self.home)
        key = picture.file if self.is_here else os.path.abspath(picture.path)
        if picture.part is not None:
            key = f"{key}\0{picture.part.mark}"
        self.wanted.add(key)
        return key

    def leave_out_what_is_gone(self) -> None:
        """Files that are not asked for this time may be, the next time."""
        for key in self.kept.rows.keys() - self.wanted:
            if not os.path.exists(self.home / key.partition("\0")[0]):
                self.take(key, None)

    def facts_about(self, content: str) -> list[Any] | None:
        """A file that was renamed, copied or touched is still known by its bytes."""
        if self.by_content is None:
            self.by_content = {row.content: row.facts for row in self.kept.rows.values()}
        return self.by_content.get(content)

    def take(self, key: str, row: Row | None) -> None:
        if row is None:
            self.is_changed |= self.rows.pop(key, None) is not None
        elif row is not self.rows.get(key):
            self.rows[key] = row
            self.is_changed = True

    def write(self, reader: str) -> str | None:
        """If anything changed; returns what has to be said about it."""
        if self.is_changed:
            self.path, self.note = self.kept.write(self.rows, reader)
            self.is_changed = False
        return self.note
