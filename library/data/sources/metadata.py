"""Pictures and captions as a metadata file names them: .json and .jsonl of sd-scripts, tables of HF datasets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dataset.schema import SubsetConfig
from ..caption_files import lines_of
from ..listing import PICTURE_ENDINGS, CaptionLines, Listing
from ..origin import Origin
from .columns import CAPTION_COLUMNS, caption_column, known, lines_in
from .table import Table, parsed, read_table, text_of

FILE_COLUMNS = ("image_path", "file_name")
"""Names of a column of paths: of sd-scripts and musubi-tuner, and of HF datasets."""
_KOHYA = ("caption", "tags")
_REFUSED = ("control_path", "image_path_0", "video_path")
"""Columns of musubi-tuner that change what is trained."""


@dataclass(frozen=True)
class Entry:
    """One picture of a metadata file."""

    name: str
    values: Mapping[str, Any]
    place: str


@dataclass(frozen=True)
class Entries:
    """All pictures of a metadata file, where their files are looked for, and which column is the caption."""

    entries: Sequence[Entry]
    folders: Sequence[Path]
    column: str | None  # None: the caption, and behind it the tags


def from_metadata(subset: SubsetConfig, metadata: Path, dataset: int, index: int) -> Listing:
    """The pictures that the file names, in its order."""
    listing = Listing(subset, dataset, index, wanted_ending=metadata.suffix.lower())
    try:
        found = _entries(subset, metadata)
    except ValueError as error:
        listing.wrong("metadata_file", str(error))
        return listing
    if not found.entries:
        listing.wrong("metadata_file", f"{metadata} names no pictures")
    for entry in found.entries:
        image = _located(entry.name, found.folders)
        if image is None:
            looked = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in found.folders))
            listing.absent.append(f"{entry.place}: {entry.name!r} is not there; looked in {looked}")
            continue
        try:
            caption = CaptionLines(_lines(entry.values, found.column, subset), listing.wanted_ending)
        except ValueError as error:
            caption = CaptionLines(problem=f"{entry.place}: {entry.name!r}: {error}")
        listing.add(Origin(image.parent, image.name), entry.name, caption)
    listing.conclude(str(metadata))
    return listing


def _entries(subset: SubsetConfig, metadata: Path) -> Entries:
    """``ValueError`` when the file cannot be understood."""
    given = subset.folder()
    folders = [*([given] if given is not None else []), metadata.parent]
    if metadata.suffix.lower() == ".json":
        if subset.image_column is not None:
            raise ValueError(f"{metadata}: image_column has no meaning for .json, whose keys name the pictures")
        entries = list(_json_entries(metadata))
        columns = dict.fromkeys(name for entry in entries for name in entry.values)
        return Entries(entries, [Path(), *folders], _column(list(columns), subset, metadata))
    wanted = {*FILE_COLUMNS, *CAPTION_COLUMNS, *_KOHYA, subset.image_column, subset.caption_column} - {None}
    table = read_table(metadata, {name for name in wanted if name is not None})
    if not table.rows:
        return Entries([], folders, None)
    name = file_column(table, subset.image_column)
    for refused in _REFUSED:
        if refused in table.columns:
            raise ValueError(f"{metadata}: column {refused}: not yet: what musubi-tuner makes of it; take it out")
    entries = list(_table_entries(table, name))
    # sd-scripts looks from the working directory, HF datasets from the file
    folders = folders if name == "file_name" else [Path(), *folders]
    return Entries(entries, folders, _column(table.columns, subset, metadata))


def file_column(table: Table, wanted: str | None) -> str:
    """The column of file names; ``ValueError`` when it is not to be told."""
    if wanted is not None:
        try:
            return known(table.columns, wanted, "image_column")
        except ValueError as error:
            raise ValueError(f"{table.path} {error}") from None
    found = [name for name in FILE_COLUMNS if name in table.columns]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{table.path}: pictures may stand in {' or '.join(found)}; say which: image_column ="
                         f" {found[0]!r}")  # fmt: skip
    raise ValueError(f"{table.path} has no {' or '.join(FILE_COLUMNS)}; there are {', '.join(table.columns)}; say which"
                     " column names the pictures: image_column = 'NAME'")  # fmt: skip


def _column(columns: Sequence[str], subset: SubsetConfig, metadata: Path) -> str | None:
    is_of_sd_scripts = metadata.suffix.lower() in (".json", ".jsonl")
    others = [name for name in CAPTION_COLUMNS if name != "caption" and name in columns]
    # a file of sd-scripts that has neither is told picture by picture
    if subset.caption_column is None and is_of_sd_scripts and not others:
        return None
    try:
        return caption_column(columns, subset.caption_column)
    except ValueError as error:
        raise ValueError(f"{metadata}: {error}") from None


def _json_entries(metadata: Path) -> Iterator[Entry]:
    for name, values in parsed(text_of(metadata), str(metadata)).items():
        if not isinstance(values, dict):
            raise ValueError(f"{metadata}: {name!r}: expected an object with caption or tags")
        yield Entry(name, values, str(metadata))


def _table_entries(table: Table, column: str) -> Iterator[Entry]:
    for number, values in table.rows:
        name, place = values.get(column), table.place(number)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{place} has no {column}")
        yield Entry(name, values, place)


def _located(name: str, folders: Sequence[Path]) -> Path | None:
    """The file meant by a path, or by a name without its ending, as seen from each of the folders in turn."""
    for folder in folders:
        path = folder / name
        if path.is_file():
            return path
        for ending in PICTURE_ENDINGS:
            if (longer := path.with_name(path.name + ending)).is_file():
                return longer
    return None


def _lines(values: Mapping[str, Any], column: str | None, subset: SubsetConfig) -> list[str]:
    """The caption, of which several lines are alternatives; ``ValueError`` when there is none."""
    if column is None:
        return _with_tags(values, subset)
    try:
        lines = lines_in(values.get(column))
    except ValueError as error:
        raise ValueError(f"{column} {error}") from None
    if not lines:
        raise ValueError(f"has no text in {column}")
    return lines


def _with_tags(values: Mapping[str, Any], subset: SubsetConfig) -> list[str]:
    """Caption and tags in one, as sd-scripts joins them; of several lines, if they are alternatives, each gets tags."""
    caption, tags = (_text(values, name) for name in _KOHYA)
    if not caption and not tags:
        raise ValueError("has neither caption nor tags")
    lines = lines_of(caption) if subset.enable_wildcard else [caption]
    return [subset.caption_separator.join(filter(None, (line, tags))) for line in lines or [""]]


def _text(values: Mapping[str, Any], name: str) -> str:
    try:
        lines_in(values.get(name))
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    cell = values.get(name) or ""
    return (cell if isinstance(cell, str) else "\n".join(filter(None, cell))).strip()
