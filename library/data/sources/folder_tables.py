"""Captions from the metadata.jsonl, .csv or .parquet of a folder of HF datasets."""

import posixpath
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ..listing import CaptionLines, Listing, first_of, is_picture
from .columns import CAPTION_COLUMNS, caption_column, lines_in
from .metadata import file_column
from .table import TABLE_ENDINGS, read_table
from .tree import Tree

NAMES = tuple(f"metadata{ending}" for ending in TABLE_ENDINGS)
_FILE_NAME = "file_name"


@dataclass
class FolderTables:
    """What the tables of a folder, and of those below it, say about its pictures."""

    captions: dict[str, CaptionLines] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # of those that were read
    deeper: list[str] = field(default_factory=list)  # pictures in folders that are not searched


def read_tables(folder: Path, tree: Tree, pictures: Collection[str], needed: bool, listing: Listing) -> FolderTables:
    """Read them if they are ``needed``; problems and notes go into the listing."""
    found = FolderTables()
    by_folder: defaultdict[str, list[str]] = defaultdict(list)
    for path in tree.files:
        if posixpath.basename(path) in NAMES:
            by_folder[posixpath.dirname(path)].append(path)
    # the nearest table goes first: what is further down overwrites
    for where in sorted(by_folder, key=lambda path: path.count("/") + bool(path)):
        paths = by_folder[where]
        if not needed:
            listing.notes.append(f"{folder}: {', '.join(paths)} is not used: every picture has a caption file")
        elif len(paths) > 1:
            listing.wrong("image_dir", f"{', '.join(paths)} are in {folder}; keep one of them, or name it:"
                          " metadata_file = 'FILE'")  # fmt: skip
        else:
            try:
                _read(folder, paths[0], set(tree.files), pictures, found, listing)
            except ValueError as error:
                listing.wrong("image_dir", str(error))
    if found.deeper:
        listing.notes.append(f"{folder}: {len(found.deeper)} pictures that {found.names[0]} names lie further down and"
                             f" are not taken; recursive = true takes them: {first_of(found.deeper)}")  # fmt: skip
    return found


def _read(folder: Path, path: str, files: set[str], pictures: Collection[str], found: FolderTables,
          listing: Listing) -> None:  # fmt: skip
    subset = listing.subset
    wanted = {_FILE_NAME, *CAPTION_COLUMNS, subset.image_column, subset.caption_column}
    table = read_table(folder / path, {name for name in wanted if name is not None})
    if subset.image_column is None and _FILE_NAME not in table.columns:
        listing.notes.append(f"{folder / path}: not used: it has no column {_FILE_NAME}; metadata_file names files of"
                             " other kinds")  # fmt: skip
        return
    names = _FILE_NAME if subset.image_column is None else file_column(table, subset.image_column)
    if subset.caption_column is None and subset.class_tokens and not set(CAPTION_COLUMNS) & set(table.columns):
        listing.notes.append(f"{table.path}: not used: no column is called {', '.join(CAPTION_COLUMNS)}; there are"
                             f" {', '.join(table.columns)}")  # fmt: skip
        return
    try:
        captions = caption_column(table.columns, subset.caption_column)
    except ValueError as error:
        raise ValueError(f"{table.path}: {error}") from None
    for key in ("image_column", "caption_column"):
        listing.uses(key)
    found.names.append(path)
    lines: dict[str, int] = {}
    for number, values in table.rows:
        name, where = values.get(names), table.place(number)
        picture = posixpath.normpath(posixpath.join(posixpath.dirname(path), str(name)))
        if not isinstance(name, str) or not name:
            listing.absent.append(f"{where}: has no {names}")
        elif picture in lines:
            listing.absent.append(f"{where}: {name!r} stands in line {lines[picture]}, too; keep one of the two")
        elif picture in pictures:
            found.captions[picture] = _caption(values.get(captions), posixpath.basename(path), f"{where}: {captions}")
        elif picture not in files and is_picture(picture) and (folder / picture).is_file():
            found.deeper.append(picture)
        elif picture not in files:
            listing.absent.append(f"{where}: {name!r} is not there; looked in {folder.absolute()}")
        lines.setdefault(picture, number)


def _caption(value: object, source: str, place: str) -> CaptionLines:
    try:
        return CaptionLines(lines_in(value), source)
    except ValueError as error:
        return CaptionLines((), source, f"{place} {error}")
