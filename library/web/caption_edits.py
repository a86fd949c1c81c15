"""Edits of caption files: of one picture, or of the tags of many, each of which can be undone."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..atomic_files import open_atomic_path
from ..captioning.tag_edits import TagEdit
from ..dataset.caption_files import FALLBACK_EXTENSION, JSON_EXTENSION, CaptionFiles, split_lines
from ..errors import UserError
from .pictures import Picture, PictureSet

MAX_UNDO = 50
MAX_CAPTION_LENGTH = 20_000


@dataclass(frozen=True)
class _Change:
    index: int
    file: Path
    before: bytes | None  # None: there was no file
    old_caption: str
    new_caption: str


@dataclass
class CaptionEditor:
    """Edits the captions of one picture set; the last edits can be undone as long as the page runs."""

    pictures: PictureSet
    _undo: list[list[_Change]] = field(default_factory=list)
    _extensions: dict[tuple[Path, tuple[str, ...]], Sequence[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_undo(self) -> int:
        return len(self._undo)

    def edit(self, captions: Mapping[int, str], known: Mapping[int, str]) -> int:
        """Write captions; return how many files changed.  ``known`` is what the user saw before."""
        with self._lock:
            changes = [
                self._plan_change(index, text, known.get(index))
                for index, text in captions.items()
                if normalize_caption(text) != self.pictures.captions[index]
            ]
            for number, change in enumerate(changes):
                try:
                    self._write(change)
                except OSError as error:
                    self._remember(changes[:number])
                    raise UserError(f"{change.file}: cannot be written: {error.strerror}") from None
            self._remember(changes)
            return len(changes)

    def plan_tag_edit(
        self, action: str, tag: str, replacement: str, indices: Sequence[int], *, is_at_start: bool = False
    ) -> dict[int, str]:
        """Return the captions that an edit of one tag changes; ``remove`` takes patterns with ``*`` and ``?``."""
        tag = tag.strip()
        if action not in ("add", "remove", "replace") or not tag:
            raise UserError("give a tag to add, remove or replace")
        planned = {}
        for index in indices:
            picture, caption = self.pictures.pictures[index], self.pictures.captions[index]
            separator = picture.subset.caption_separator.strip() or ","
            edit = {
                "add": TagEdit(prepend=[tag], separator=separator)
                if is_at_start
                else TagEdit(append=[tag], separator=separator),
                "remove": TagEdit(remove=[tag], separator=separator),
                "replace": TagEdit(replace={tag: replacement}, deduplicate=True, separator=separator),
            }[action]
            changed = edit.apply(caption or " ").strip()
            if picture.is_editable and changed != caption:
                planned[index] = changed
        return planned

    def undo(self) -> int:
        """Put back the files of the last edit, unless another program has changed them since."""
        with self._lock:
            if not self._undo:
                return 0
            changes = self._undo[-1]
            for change in changes:
                if _read_bytes(change.file) != _encode_caption(change.new_caption):
                    raise UserError(f"{change.file}: changed since by another program; the edit is not undone")
            for change in reversed(changes):
                _write_bytes(change.file, change.before)
                self.pictures.set_caption(change.index, change.old_caption)
            self._undo.pop()
            self.pictures.version += 1
            return len(changes)

    def _plan_change(self, index: int, text: str, known: str | None) -> _Change:
        picture, now = self.pictures.pictures[index], self.pictures.captions[index]
        if not picture.is_editable:
            source = picture.subset.source
            raise UserError(f"{picture.sample.key}: its caption is in {source}; edit that file")
        if len(text) > MAX_CAPTION_LENGTH:
            raise UserError(f"{picture.sample.key}: a caption of {len(text)} characters; at most {MAX_CAPTION_LENGTH}")
        file = find_caption_file(picture, self._find_extensions(picture))
        self.pictures.folders.resolve(file)
        before = _read_bytes(file)
        on_disk = "" if before is None else "\n".join(split_lines(before.decode("utf-8-sig", "replace")))
        if (known is not None and known != now) or (before is not None and on_disk != now):
            raise UserError(f"{file}: changed by another program since it was read; scan the dataset again")
        return _Change(index, file, before, now, normalize_caption(text))

    def _find_extensions(self, picture: Picture) -> Sequence[str]:
        """Return the extensions of caption files that training reads in this folder."""
        key = picture.sample.image.folder, picture.subset.normalized_caption_extensions
        if key not in self._extensions:
            names = [entry.name for entry in key[0].rglob("*")] if picture.subset.can_fall_back_to_txt else []
            files = CaptionFiles(names, key[1], picture.subset.can_fall_back_to_txt)
            texts = [name for name in files.extensions if name and name.lower() != JSON_EXTENSION]
            self._extensions[key] = texts or [FALLBACK_EXTENSION]
        return self._extensions[key]

    def _write(self, change: _Change) -> None:
        _write_bytes(change.file, _encode_caption(change.new_caption))
        self.pictures.set_caption(change.index, change.new_caption)

    def _remember(self, changes: Sequence[_Change]) -> None:
        if changes:
            self._undo = [*self._undo, list(changes)][-MAX_UNDO:]
            self.pictures.version += 1


def find_caption_file(picture: Picture, extensions: Sequence[str]) -> Path:
    """Return the caption file of a picture as training finds it, or the one to create."""
    path = picture.sample.image.path
    stem = path.name.rpartition(".")[0]
    stems = [stem, "_".join(stem.split("_")[:-4])]
    spellings = [form for name in extensions for form in (name, name.lower(), name.upper())]
    names = [f"{each}{end}" for each in stems for end in spellings if each and (path.parent / f"{each}{end}").is_file()]
    found = CaptionFiles(names, extensions).find(path.name)
    return path.parent / (found[0] if found is not None else f"{stem}{extensions[0]}")


def normalize_caption(text: str) -> str:
    """Return the lines of a caption as they are read back."""
    return "\n".join(split_lines(text.replace("\0", "")))


def _encode_caption(caption: str) -> bytes | None:
    """Return the content of the file; None for no caption, as training refuses an empty file."""
    return f"{caption}\n".encode("utf-8", "replace") if caption else None


def _read_bytes(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def _write_bytes(file: Path, data: bytes | None) -> None:
    if data is None:
        file.unlink(missing_ok=True)
        return
    with open_atomic_path(file) as temporary:
        temporary.write_bytes(data)
