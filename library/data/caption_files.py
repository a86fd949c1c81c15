"""Caption files: which of them belongs to a picture, and what stands in it."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_PIECE = 2**16
_LINE_ENDS = re.compile(r"\r\n|\r|\n")
_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
DEFAULT, FALLBACK = ".caption", ".txt"
"""sd-scripts looks for .caption; where there is none, .txt is what nearly everybody has."""


def read_caption(path: str | Path) -> list[str]:
    """The lines of a caption file that are not empty; ``ValueError`` says what is wrong with the file."""
    try:
        data = _bytes_of(path)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; mend the file, or delete it") from None
    lines = lines_of(decoded(data))
    if not lines:
        raise ValueError("is empty; write a caption, or delete the file if the picture has none")
    return lines


def _bytes_of(path: str | Path) -> bytes:
    """A small file; half as long as Python's own file objects take, and at once if it is a pipe."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        pieces = [os.read(handle, _PIECE)]
        while pieces[-1]:
            pieces.append(os.read(handle, _PIECE))
    finally:
        os.close(handle)
    return b"".join(pieces)


def decoded(data: bytes) -> str:
    """Bytes of a file as text; ``ValueError`` if they are no UTF-8."""
    if data.startswith(_OTHER_MARKS):
        raise ValueError("is UTF-16 or UTF-32; save the file as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    if "\0" in text:
        raise ValueError("is no text: it holds zero bytes, as UTF-16 does; save the file as UTF-8")
    return text


def lines_of(text: str) -> list[str]:
    """What stands on each line, without empty ones."""
    return [line.strip() for line in _LINE_ENDS.split(text) if line.strip()]


class CaptionFiles:
    """The caption files among the files of a subset, by the names of their pictures.

    A picture takes the first of the endings that it has a file with; .txt stands in where .caption was looked for and
    no picture has a file with any of the endings.  Upper and lower case of an ending are one; a
    file that is written as the ending itself goes first.
    """

    def __init__(self, names: Iterable[str], endings: Sequence[str]):
        """``names`` are paths with ``/``, in the order in which they are to be told."""
        names = list(names)
        self.is_fallback = False
        self.by_stem = {ending: _by_stem(names, ending) for ending in endings}
        if DEFAULT in endings and FALLBACK not in endings and not any(self.by_stem.values()):
            texts = _by_stem(names, FALLBACK)
            self.by_stem, self.is_fallback = ({FALLBACK: texts}, True) if texts else (self.by_stem, False)

    @property
    def endings(self) -> tuple[str, ...]:
        return tuple(self.by_stem)

    def of(self, picture: str) -> tuple[str, str] | None:
        """Path of the caption file of a picture, and its ending as it was asked for."""
        folder, slash, name = picture.rpartition("/")
        stems = [f"{folder}{slash}{stem}" for stem in stems_of(name)]
        return next(((found, ending) for ending, files in self.by_stem.items() for stem in stems
                     if (found := files.get(stem)) is not None), None)  # fmt: skip


def _by_stem(names: Iterable[str], ending: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        stem, own = (name[: -len(ending)], name[-len(ending) :]) if ending else (name, "")
        if own == ending or (own.lower() == ending.lower() and stem not in found):
            found[stem] = name
    return found


def stems_of(name: str) -> list[str]:
    """What its caption file may be called; face cutters add four numbers to the name of the picture."""
    stem = name.rpartition(".")[0]
    parts = stem.split("_")
    return [stem, "_".join(parts[:-4])] if len(parts) > 4 else [stem]
