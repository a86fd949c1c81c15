"""The files of a folder, or of all folders below it, in an order that is the same on every machine."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Tree:
    """Paths as seen from the folder, with ``/``; what begins with a dot is left out, as are loops."""

    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)  # at the top, searched or not
    loops: list[str] = field(default_factory=list)  # links to folders that are searched anyway
    problems: list[str] = field(default_factory=list)  # folders that cannot be read


def tree_of(folder: Path, *, recursive: bool) -> Tree:
    """Follows links, but comes to no folder twice: not by a circle, and not by a second way."""
    tree = Tree()
    root = os.path.realpath(folder)
    seen = {root}
    # what is linked waits until everything is seen that lies here itself, so that it is named by its own path
    linked = _search(folder, "", tree, seen, recursive)
    while linked:
        path = linked.pop(0)
        target = os.path.realpath(folder / path)
        if target in seen or root.startswith(os.path.join(target, "")):  # here already, or above the folder itself
            tree.loops.append(path)
        else:
            seen.add(target)
            linked += _search(folder, path, tree, seen, recursive)
    for names in (tree.files, tree.folders, tree.loops):
        names.sort(key=by_name)
    return tree


def by_name(path: str) -> list[str]:
    """Sorts paths folder by folder."""
    return path.split("/")


def _search(folder: Path, start: str, tree: Tree, seen: set[str], recursive: bool) -> list[str]:
    """Gather the files from ``start`` on; returns the links to folders that were met."""
    waiting, linked = [start], []
    while waiting:
        here = waiting.pop()
        try:
            entries = sorted(_entries(folder / here if here else folder))
        except OSError as error:
            tree.problems.append(f"{folder / here}: cannot be read: {error.strerror}")
            continue
        for name, is_folder, is_link in entries:
            path = f"{here}/{name}" if here else name
            if not is_folder:
                tree.files.append(path)
                continue
            if not here:
                tree.folders.append(path)
            if recursive and is_link:
                linked.append(path)
            elif recursive and (target := os.path.realpath(folder / path)) in seen:  # joined, which is no link by name
                tree.loops.append(path)
            elif recursive:
                seen.add(target)
                waiting.append(path)
    return linked


def _entries(folder: Path) -> Iterator[tuple[str, bool, bool]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):  # such as the "._a.png" that macOS leaves behind
                yield entry.name, _is_folder(entry), entry.is_symlink()


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False
