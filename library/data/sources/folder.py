"""Pictures in a folder, with caption files beside them or with a table of HF datasets."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ...dataset.schema import SubsetConfig
from ..caption_files import CaptionFiles, read_caption
from ..listing import PICTURE_ENDINGS, CaptionLines, Listing, first_of, is_picture
from ..origin import Origin
from .folder_tables import FolderTables, read_tables
from .json_captions import ENDING, ColumnError, JsonCaptions
from .patterns import selected
from .table import text_of
from .tree import Tree, tree_of

_COMMON_ENDINGS = (".txt", ".caption")
_MOST_FOLDERS = 50  # that are looked into to find out where the pictures are


def from_folder(subset: SubsetConfig, folder: Path, dataset: int, index: int) -> Listing:
    """The pictures of the folder in the order of their paths."""
    listing = Listing(subset, dataset, index)
    tree = tree_of(folder, recursive=subset.recursive)
    listing.problems += tree.problems
    pictures = _chosen(folder, tree, listing)
    files = CaptionFiles(tree.files, subset.caption_endings)
    listing.wanted_ending = " or ".join(files.endings)
    beside = {picture: files.of(picture) for picture in pictures}
    is_asked_for = subset.caption_column is not None or subset.image_column is not None
    tables = read_tables(folder, tree, beside.keys(), is_asked_for or None in beside.values(), listing)
    if listing.problems:
        return listing
    _add_pictures(folder, beside, tables, listing)
    if files.is_fallback:
        endings = " or ".join(subset.caption_endings)
        listing.notes.append(f"{folder}: no {endings} files; captions are read from {files.endings[0]}")
    looked_for = f"{listing.wanted_ending} file" + (f" and no text in {', '.join(tables.names)}" * bool(tables.names))
    listing.conclude(str(folder), looked_for)
    _hint_at_others(folder, tree, files, listing)
    for key in ("image_column", "caption_column"):
        listing.has_no_use_for(key, f"there is no table in {folder.absolute()} to which it could belong")
    return listing


def _chosen(folder: Path, tree: Tree, listing: Listing) -> list[str]:
    """The pictures among the files that ``include`` and ``exclude`` leave."""
    subset = listing.subset
    pictures = [name for name in tree.files if is_picture(name)]
    if not pictures and not tree.problems:
        listing.wrong("image_dir", f"no pictures; {_what_is_there(folder, tree)}")
    if tree.loops:
        listing.notes.append(f"{folder}: links to folders that are searched anyway are not followed:"
                             f" {first_of(tree.loops)}")  # fmt: skip
    choice = selected(pictures, subset.include, subset.exclude)
    there = f"the {len(pictures)} pictures in {folder.absolute()}; there are {first_of(pictures)}"
    if pictures and not choice.chosen:
        listing.wrong("include" if subset.include else "exclude", f"include and exclude leave none of {there}")
        return []
    for key, text in choice.busy:
        listing.uses(key, text)
    for key, text in choice.idle if pictures else ():
        listing.has_no_use_for(key, f"{text!r} matches none of {there}", text)
    if subset.include or subset.exclude:
        listing.notes.append(f"{folder}: include and exclude leave {len(choice.chosen)} of {len(pictures)} pictures")
    if not subset.recursive and pictures and (below := _with_pictures(folder, tree.folders)):
        listing.notes.append(f"{folder}: pictures in folders below it are not taken; recursive = true takes them:"
                             f" {first_of([f'{name}/' for name in below])}")  # fmt: skip
    return choice.chosen


def _add_pictures(folder: Path, beside: dict[str, tuple[str, str] | None], tables: FolderTables,
                  listing: Listing) -> None:  # fmt: skip
    objects = JsonCaptions(listing.subset.caption_column)
    for picture, found in beside.items():
        try:
            caption = tables.captions.get(picture, CaptionLines()) if found is None else _read(folder, *found, objects)
        except ColumnError as error:
            listing.wrong("caption_extension", str(error))
            listing.uses("caption_column")
            return
        listing.add(Origin(folder, picture), picture, caption)
    if objects.column is not None:
        listing.uses("caption_column")


def _read(folder: Path, name: str, ending: str, objects: JsonCaptions) -> CaptionLines:
    path = os.path.join(folder, name)
    try:
        if ending.lower() == ENDING:
            return CaptionLines(objects.lines(text_of(Path(path)), path), ending)
        return CaptionLines(read_caption(path), ending)
    except ValueError as error:
        told = str(error)
        return CaptionLines((), ending, told if told.startswith(path) else f"{path}: {told}")


def _hint_at_others(folder: Path, tree: Tree, files: CaptionFiles, listing: Listing) -> None:
    """Pictures without a caption that have a file of the other usual ending."""
    for ending in _COMMON_ENDINGS:
        if listing.without and ending not in files.endings:
            others = CaptionFiles(tree.files, [ending])
            count = sum(others.of(name) is not None for name in listing.without) if ending in others.endings else 0
            if count:
                both = [*files.endings, ending]
                listing.notes.append(f"{folder}: {count} of the pictures without a caption have a {ending} file:"
                                     f" caption_extension = {both} takes these, too")  # fmt: skip


def _what_is_there(folder: Path, tree: Tree) -> str:
    """What was seen in a folder without pictures, and the way out."""
    kinds = Counter(PurePosixPath(name).suffix.lower() or "without an ending" for name in tree.files)
    seen = [f"{count} {kind}" for kind, count in kinds.most_common(4)]
    below = {name: _count(folder / name) for name in _with_pictures(folder, tree.folders)}
    seen += [f"{count} pictures one level down in {name}/" for name, count in list(below.items())[:3]]
    seen += [f"folder {name}/" for name in tree.folders[:3] if name not in below]
    what = f"{folder.absolute()} has {', '.join(seen) if seen else 'nothing in it'}"
    if below:
        return (f"{what}; folders are not searched below: set recursive = true, or image_dir ="
                f" {str(folder / next(iter(below)))!r}")  # fmt: skip
    for key, ending in (("parquet", ".parquet"), ("parquet", ".arrow"), ("webdataset", ".tar")):
        if kinds[ending]:
            return f"{what}; pictures in {ending} files are named by {key} = {str(folder)!r} in the place of image_dir"
    return f"{what}; pictures end in {' '.join(PICTURE_ENDINGS)}"


def _with_pictures(folder: Path, names: Sequence[str]) -> list[str]:
    """The folders in a folder that hold pictures."""
    return [name for name in names[:_MOST_FOLDERS] if _has_pictures(folder / name)]


def _has_pictures(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(is_picture(entry.name) for entry in entries)
    except OSError:
        return False


def _count(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(is_picture(entry.name) for entry in entries)
