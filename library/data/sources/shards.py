"""The files behind ``parquet`` and ``webdataset``: names, folders, patterns, and ``{000..012}``."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...dataset.schema import SubsetConfig, found_from
from ...registry import did_you_mean
from ..listing import first_of
from .arrow import INSTALL, is_missing
from .patterns import expanded
from .table_files import saved_by_datasets
from .tree import Tree, by_name, tree_of

ENDINGS = {
    "parquet": (".parquet",),
    "webdataset": (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"),
}
"""Of the files in a folder; compressed shards are taken so that they are refused by name."""


@dataclass
class Shards:
    """Files in the order in which they are read, and a line for each name behind which there are none."""

    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def shards_of(subset: SubsetConfig) -> Shards:
    """The files of a subset that has ``parquet`` or ``webdataset``; of others none."""
    shards = Shards()
    named: set[Path] = set()
    for key in ENDINGS:
        for name in getattr(subset, key):
            where = f"{subset.place(key)}: {key}"
            try:
                found = list(_behind(name, key, subset))
            except ValueError as error:
                shards.problems.append(f"{where}: {error}")
                continue
            twice = [str(path) for path in found if path in named]
            if twice:
                shards.problems.append(f"{where}: {name!r} names what was named already: {first_of(twice)}")
            shards.files += found
            named.update(found)
    return shards


def missing_shards(subset: SubsetConfig) -> Iterator[str]:
    """What a subset cannot be read without."""
    yield from shards_of(subset).problems
    key = "parquet" if subset.parquet else "metadata_file"
    if (subset.parquet or str(subset.metadata_file).lower().endswith(".parquet")) and is_missing():
        yield f"{subset.place(key)}: {key}: parquet files need pyarrow: {INSTALL}"


def _behind(name: str, key: str, subset: SubsetConfig) -> Iterator[Path]:
    """``ValueError`` when there are no files behind a name."""
    if "://" in name or name.startswith("pipe:"):
        raise ValueError(f"{name!r} is an address; download the files and name the folder")
    absent = []
    for one in expanded(name):
        path = found_from(subset.file, one)
        if path.is_dir():
            yield from _inside(path, key, recursive=subset.recursive)
        elif path.is_file():
            yield path
        elif found := _globbed(one, subset.file.parent):
            yield from found
        else:
            absent.append(one)
    if absent:
        raise ValueError(_absence(absent, subset.file))


def _inside(folder: Path, key: str, *, recursive: bool) -> list[Path]:
    tree = tree_of(folder, recursive=recursive)
    if tree.problems:
        raise ValueError(tree.problems[0])
    found = [folder / name for name in tree.files if name.lower().endswith(ENDINGS[key])]
    if not found and key == "parquet":
        found = saved_by_datasets(folder, tree.files)
    if not found:
        seen = [*tree.files, *(f"{name}/" for name in tree.folders)]
        deeper = "; recursive = true searches folders below, too" if tree.folders and not recursive else ""
        also = " and nothing that save_to_disk wrote" if key == "parquet" else ""
        raise ValueError(f"{folder.absolute()} has no {ENDINGS[key][0]} files{also}; there are"
                         f" {first_of(seen) or 'none at all'}{deeper}")  # fmt: skip
    return found


def _globbed(pattern: str, beside: Path) -> list[Path]:
    if not glob.has_magic(pattern):
        return []
    path = os.path.expanduser(pattern)
    names = glob.glob(path, recursive=True)
    found = [Path(name) for name in names]
    found = found or [beside / name for name in glob.glob(path, root_dir=beside, recursive=True)]
    return sorted((path for path in found if path.is_file()), key=lambda path: by_name(path.as_posix()))


def _absence(names: list[str], file: Path) -> str:
    """What was named, and what is there instead."""
    folder = Path(names[0]).expanduser().parent
    folders = [path for path in (folder, file.parent / folder) if path.is_dir()]
    seen = tree_of(folders[0], recursive=False) if folders else Tree()
    there = [*seen.files, *(f"{name}/" for name in seen.folders)]
    what = f"{folders[0].absolute()} has {first_of(there) or 'nothing in it'}" if folders else f"nor is {folder}"
    also = "" if Path(names[0]).is_absolute() else f" (also looked beside {file})"
    if len(names) > 1:
        return f"{len(names)} files are not there{also}: {first_of(names)}; {what}"
    hint = did_you_mean(Path(names[0]).name, [name.rstrip("/") for name in there])
    return f"{names[0]!r} is not there{also}; {what}{hint}"
