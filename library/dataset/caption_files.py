"""Captions: the caption file of an image (.txt, .caption, .json), and the caption column of a table."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..name_suggestions import suggest_name
from ..storage.filesystems import RemoteOutage
from ..storage.remote_path import is_remote

DEFAULT_EXTENSION, FALLBACK_EXTENSION, JSON_EXTENSION = ".caption", ".txt", ".json"
"""sd-scripts looks for .caption files by default; without any, .txt may be read, which most datasets have."""

CAPTION_COLUMNS = ("text", "caption", "prompt")
"""Columns that hold captions if no ``caption_column`` is set."""

_CHUNK_BYTES = 2**16
_LINE_BREAKS = re.compile(r"\r\n|\r|\n")
_UTF16_OR_UTF32_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


class CaptionColumnError(Exception):
    """The caption column cannot be determined; concerns the subset as a whole, not one image."""


class CaptionFiles:
    """Finds the caption file of an image among the files of a subset.

    An image takes the first extension for which it has a file.  Upper and lower case of an extension are the same; a
    file that has it exactly as written is preferred.
    """

    def __init__(self, names: Iterable[str], extensions: Sequence[str], can_fall_back_to_txt: bool = False):
        """``names`` are relative paths with ``/``; if none has an extension, .txt may be used in its place."""
        names = list(names)
        self.is_fallback = False
        self.by_stem = {extension: _index_by_stem(names, extension) for extension in extensions}
        if can_fall_back_to_txt and not any(self.by_stem.values()):
            texts = _index_by_stem(names, FALLBACK_EXTENSION)
            if texts:
                self.by_stem, self.is_fallback = {FALLBACK_EXTENSION: texts}, True

    @property
    def extensions(self) -> tuple[str, ...]:
        return tuple(self.by_stem)

    def find(self, image: str) -> tuple[str, str] | None:
        """Return the path of the image's caption file and its extension as set."""
        stems = _list_stems(image)
        for extension, files in self.by_stem.items():
            for stem in stems:
                if stem in files:
                    return files[stem], extension
        return None

    def list_without_image(self, images: Iterable[str]) -> list[str]:
        """List the caption files that belong to none of the images."""
        stems = {stem for image in images for stem in _list_stems(image)}
        by_stem = [files for extension, files in self.by_stem.items() if extension]
        return sorted(file for files in by_stem for stem, file in files.items() if stem not in stems)


def _index_by_stem(names: Iterable[str], extension: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for name in names:
        stem, suffix = (name[: -len(extension)], name[-len(extension) :]) if extension else (name, "")
        if suffix == extension or (suffix.lower() == extension.lower() and stem not in files):
            files[stem] = name
    return files


def _list_stems(image: str) -> list[str]:
    """List the possible stems of the caption file; face croppers append four numbers to the name of an image."""
    folder, slash, name = image.rpartition("/")
    stem = name.rpartition(".")[0]
    parts = stem.split("_")
    stems = [stem, "_".join(parts[:-4])] if len(parts) > 4 else [stem]
    return [f"{folder}{slash}{stem}" for stem in stems]


def read_caption_file(path: str | Path) -> list[str]:
    """Read the lines of a text file that are not blank; raise ``ValueError`` with the reason if there are none."""
    try:
        data = _read_small_file(path)
    except RemoteOutage as error:
        raise RemoteOutage(f"{path}: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; fix or delete the file") from None
    lines = split_lines(decode_utf8(data))
    if not lines:
        raise ValueError("is empty; write a caption, or delete the file if the image has none")
    return lines


def _read_small_file(path: str | Path) -> bytes:
    """Read a file in half the time of ``open``; a named pipe is empty instead of blocking."""
    if is_remote(path):
        return path.read_bytes()
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        chunks = [os.read(handle, _CHUNK_BYTES)]
        while chunks[-1]:
            chunks.append(os.read(handle, _CHUNK_BYTES))
    finally:
        os.close(handle)
    return b"".join(chunks)


def decode_utf8(data: bytes) -> str:
    """Decode the bytes of a text file; raise ``ValueError`` if they are not UTF-8."""
    if data.startswith(_UTF16_OR_UTF32_MARKS):
        raise ValueError("is UTF-16 or UTF-32; save the file as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    if "\0" in text:
        raise ValueError("is not text: it contains zero bytes, as UTF-16 does; save the file as UTF-8")
    return text


def unify_line_breaks(text: str) -> str:
    """Write line breaks of every kind as a line feed."""
    return _LINE_BREAKS.sub("\n", text)


def split_lines(text: str) -> list[str]:
    """Split into stripped lines without blank ones."""
    return [line.strip() for line in _LINE_BREAKS.split(text) if line.strip()]


def resolve_caption_column(columns: Sequence[str], caption_column: str | None) -> str:
    """Return the column of captions; raise ``ValueError`` with the existing columns if it is missing or ambiguous."""
    return resolve_column(columns, "caption_column", caption_column, CAPTION_COLUMNS)


def resolve_column(columns: Sequence[str], key: str, value: str | None, default_names: Sequence[str]) -> str:
    """Return the column that ``key`` is set to, or else the only one with a default name; raise ``ValueError``."""
    if value is not None:
        return require_column(columns, value, key)
    candidates = [name for name in default_names if name in columns]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        kind = key.removesuffix("_column")
        raise ValueError(f"several {kind} columns: {', '.join(candidates)}; set {key} = {candidates[0]!r}")
    names = format_choices(default_names)
    raise ValueError(f"no column {names}; columns are {format_columns(columns)}; set {key} = 'NAME'")


def require_column(columns: Sequence[str], name: str, key: str) -> str:
    """Return ``name``, the value of ``key``, if it is one of the columns; else raise ``ValueError``."""
    if name not in columns:
        hint = suggest_name(name, columns)
        raise ValueError(f"no column {name!r} (set by {key}); columns are {format_columns(columns)}{hint}")
    return name


def format_choices(names: Sequence[str]) -> str:
    """Join names as ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def format_columns(columns: Sequence[str]) -> str:
    """Join the names of columns for a message."""
    return ", ".join(columns) or "none"


def parse_caption_cell(cell: Any, column: str) -> list[str]:
    """Split a caption, or each caption of a list, into lines; a cell without text has none."""
    texts = cell if isinstance(cell, Iterable) and not isinstance(cell, (str, bytes, dict)) else [cell]
    lines: list[str] = []
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{column} is not a string: {text!r:.80}")
        lines += split_lines(text or "")
    return lines


def parse_json_object(text: str) -> dict[str, Any]:
    """Parse one JSON object; raise ``ValueError`` otherwise."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise ValueError(f"not valid JSON: {error.msg} ({position})") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("expected an object {...}")
    return values


class JsonCaptionReader:
    """Reads captions from one JSON object per image, as img2dataset writes them.

    The keys of the first object decide which one holds the caption.
    """

    def __init__(self, caption_column: str | None):
        self._caption_column = caption_column
        self.column: str | None = None

    def read_lines(self, text: str) -> list[str]:
        """Return the lines of the caption, which may be none; raise ``ValueError`` if it is not text."""
        values = parse_json_object(text)
        if self.column is None:
            try:
                self.column = resolve_caption_column(list(values), self._caption_column)
            except ValueError as error:
                raise CaptionColumnError(str(error)) from None
        return parse_caption_cell(values.get(self.column), self.column)
