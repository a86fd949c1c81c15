"""Edits of caption files: of one picture, or of the tags of many, each of which can be undone."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..atomic_files import open_atomic_path
from ..captioning.tag_edits import TagEdit
from ..dataset.caption_files import FALLBACK_EXTENSION, JSON_EXTENSION, CaptionFiles, split_lines
from ..errors import UserError
from ..problems import report_file
from .background import BackgroundWork
from .pictures import Picture, PictureSet
from .undo_log import CaptionChange, UndoLog

MAX_CAPTION_LENGTH = 20_000
BUSY = "captions are being written; wait for the end, or stop it"
WRITTEN, UNDONE = "Undo puts back what was written", "Undo goes on"
"""The messages about a stopped edit and a stopped undo."""

Report = Callable[[str, int, int], None]
"""Takes what is done, how far it is, and how much there is; raises if it is to stop."""


def ignore_progress(*progress: object) -> None:
    """Tell nobody."""


@dataclass
class CaptionEditor:
    """Edits the captions of one picture set, one edit at a time; the last ones can be undone."""

    pictures: PictureSet
    log: UndoLog
    work: BackgroundWork | None = None
    """The last edit of many captions, or the last undo."""

    _extensions: dict[tuple[Path, tuple[str, ...]], Sequence[str]] = field(default_factory=dict)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """The lock that an edit or an undo holds while it writes captions."""

    @property
    def num_undo(self) -> int:
        return len(self.log.edits)

    @property
    def is_busy(self) -> bool:
        return self._turn.locked() or (self.work is not None and self.work.is_running)

    def start_tag_edit(self, plan: Callable[[], Mapping[int, str]]) -> BackgroundWork:
        """Write the captions that ``plan`` returns, in the background."""
        return self._start("writing captions", WRITTEN, lambda report: self.edit(plan(), {}, report))

    def start_undo(self) -> BackgroundWork:
        """Put back the files of the last edit, in the background."""
        return self._start("undoing", UNDONE, self.undo)

    def _start(self, title: str, if_stopped: str, run: Callable[[Report], int]) -> BackgroundWork:
        if self.is_busy:
            raise UserError(BUSY)
        self.work = BackgroundWork(title, if_stopped)
        return self.work.start(lambda work: {"count": run(work.report)})

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise UserError(BUSY)
        try:
            yield
        finally:
            self._turn.release()

    def edit(self, captions: Mapping[int, str], known: Mapping[int, str], report: Report = ignore_progress) -> int:
        """Write captions; return how many files changed.  ``known`` is what the user saw before.

        All files are looked at before the first is written; what is written until an error or a stop can be undone.
        """
        with self._take_turn():
            changes, written = self._plan_changes(captions, known, report), 0
            if not changes:
                return 0
            edit = self.log.add(changes)
            try:
                for change in changes:
                    report("writing captions", written, len(changes))
                    self._write(change)
                    written += 1
            finally:
                if written < len(changes):
                    self.log.shorten(edit, changes[:written])
                self.pictures.version += 1
            return len(changes)

    def undo(self, report: Report = ignore_progress) -> int:
        """Put back the files of the last edit, unless another program has changed them since."""
        with self._take_turn():
            if not self.log.edits:
                return 0
            changes = self._list_written(self.log.read_last(), report)
            try:
                for number, change in enumerate(reversed(changes)):
                    report("undoing", number, len(changes))
                    _write_bytes(change.file, change.before)
                    self.pictures.set_caption(change.image, change.new_caption, change.old_caption)
                self.log.remove_last()
            finally:
                self.pictures.version += 1
            return len(changes)

    def _list_written(self, changes: Sequence[CaptionChange], report: Report) -> list[CaptionChange]:
        """List the changes that are in their files; an edit or an undo that was interrupted has left out some."""
        written = []
        for number, change in enumerate(changes):
            report("looking at the files", number, len(changes))
            self.pictures.folders.resolve(change.file)
            content = _read_bytes(change.file)
            if content == _encode_caption(change.new_caption):
                written.append(change)
            elif content != change.before:
                raise UserError(report_file(change.file, "changed since by another program", "the edit is not undone"))
        return written

    def _plan_changes(
        self, captions: Mapping[int, str], known: Mapping[int, str], report: Report
    ) -> list[CaptionChange]:
        changed = {
            index: text for index, text in captions.items() if normalize_caption(text) != self.pictures.captions[index]
        }
        planned: dict[Path, CaptionChange] = {}  # two datasets may have the same picture
        for index, text in changed.items():
            report("looking at the files", len(planned), len(changed))
            change = self._plan_change(index, text, known.get(index))
            planned.setdefault(change.file, change)
        return list(planned.values())

    def _plan_change(self, index: int, text: str, known: str | None) -> CaptionChange:
        picture, now = self.pictures.pictures[index], self.pictures.captions[index]
        if not picture.is_editable:
            source = picture.subset.source
            raise UserError(report_file(picture.sample.key, f"its caption is in {source}", "edit that file"))
        if len(text) > MAX_CAPTION_LENGTH:
            raise UserError(
                report_file(picture.sample.key, f"a caption of {len(text)} characters", f"at most {MAX_CAPTION_LENGTH}")
            )
        file = find_caption_file(picture, self._find_extensions(picture))
        self.pictures.folders.resolve(file)
        before = _read_bytes(file)
        if before is None and not picture.sample.image.path.is_file():
            raise UserError(report_file(picture.sample.image.path, "the image is gone", "scan the dataset again"))
        on_disk = "" if before is None else "\n".join(split_lines(before.decode("utf-8-sig", "replace")))
        if known is not None and known != now:
            raise UserError(
                report_file(file, "was edited in another window meanwhile", f"save again to replace {now!r}")
            )
        if before is not None and on_disk != now:
            raise UserError(report_file(file, "changed by another program since it was read", "scan the dataset again"))
        return CaptionChange(picture.sample.image, file, before, now, normalize_caption(text))

    def _find_extensions(self, picture: Picture) -> Sequence[str]:
        """Return the extensions of caption files that training reads in this folder."""
        key = picture.sample.image.folder, picture.subset.normalized_caption_extensions
        if key not in self._extensions:
            names = [entry.name for entry in key[0].rglob("*")] if picture.subset.can_fall_back_to_txt else []
            files = CaptionFiles(names, key[1], picture.subset.can_fall_back_to_txt)
            texts = [name for name in files.extensions if name and name.lower() != JSON_EXTENSION]
            self._extensions[key] = texts or [FALLBACK_EXTENSION]
        return self._extensions[key]

    def _write(self, change: CaptionChange) -> None:
        _write_bytes(change.file, _encode_caption(change.new_caption))
        self.pictures.set_caption(change.image, change.old_caption, change.new_caption)


def build_tag_edit(action: str, tag: str, replacement: str, *, is_at_start: bool = False) -> TagEdit:
    """Build the edit of one tag; ``remove`` takes patterns with ``*`` and ``?``."""
    tag = tag.strip()
    if action not in ("add", "remove", "replace") or not tag:
        raise UserError("give a tag to add, remove or replace")
    if action == "add":
        return TagEdit(prepend=[tag]) if is_at_start else TagEdit(append=[tag])
    return TagEdit(remove=[tag]) if action == "remove" else TagEdit(replace={tag: replacement}, deduplicate=True)


def plan_tag_edit(pictures: PictureSet, edit: TagEdit, indices: Sequence[int]) -> dict[int, str]:
    """Return the captions that an edit changes, by position."""
    planned = {}
    for index in indices:
        picture, caption = pictures.pictures[index], pictures.captions[index]
        separator = picture.subset.caption_separator.strip() or ","
        changed = replace(edit, separator=separator).apply(caption or " ").strip()
        if picture.is_editable and changed != caption:
            planned[index] = changed
    return planned


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
    return "\n".join(split_lines(text.replace("\0", "").encode("utf-8", "replace").decode()))


def _encode_caption(caption: str) -> bytes | None:
    """Return the content of the file; None for no caption, as training refuses an empty file."""
    return f"{caption}\n".encode() if caption else None


def _read_bytes(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def _write_bytes(file: Path, data: bytes | None) -> None:
    try:
        if data is None:
            file.unlink(missing_ok=True)
            return
        with open_atomic_path(file) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise UserError(report_file(file, f"cannot be written: {error.strerror}")) from None
