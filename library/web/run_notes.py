"""What a user marks of a run: a star and a note, in ``NAME.notes.json`` beside the files of the run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..atomic_files import write_atomic
from ..errors import UserError

NOTES_END = ".notes.json"
MAX_NOTE_LENGTH = 4000


@dataclass(frozen=True)
class RunNotes:
    """The star and the note of one run."""

    is_favorite: bool = False
    text: str = ""

    @classmethod
    def read(cls, folder: Path, name: str) -> "RunNotes":
        """Read the marks of a run; a file that is damaged, or a link, has none."""
        path = folder / f"{name}{NOTES_END}"
        try:
            values = {} if path.is_symlink() else json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return cls()
        if not isinstance(values, dict):
            return cls()
        text = values.get("note")
        return cls(values.get("is_favorite") is True, text[:MAX_NOTE_LENGTH] if isinstance(text, str) else "")

    def change(self, body: Mapping[str, Any]) -> "RunNotes":
        """Return the marks with what a request sets."""
        notes = self
        if "is_favorite" in body:
            notes = replace(notes, is_favorite=body["is_favorite"] is True)
        if "note" in body:
            text = str(body["note"]).strip()
            if len(text) > MAX_NOTE_LENGTH:
                raise UserError(f"the note has {len(text):,} characters; at most {MAX_NOTE_LENGTH:,} are kept")
            notes = replace(notes, text=text)
        return notes

    def write(self, folder: Path, name: str) -> None:
        """Write the marks of a run; without any, there is no file."""
        path = folder / f"{name}{NOTES_END}"
        if not self.is_favorite and not self.text:
            path.unlink(missing_ok=True)
            return
        values = {"is_favorite": self.is_favorite, "note": self.text}
        write_atomic(path, (json.dumps(values, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace"))
