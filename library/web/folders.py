"""The folders that were opened on the command line: nothing outside of them is read, written or listed."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..errors import UserError

MAX_DEPTH = 8
SKIPPED_FOLDERS = {"node_modules", "__pycache__", "site-packages"}
"""Folders that are skipped besides hidden ones."""

OWN_TESTS = Path(__file__).resolve().parents[2] / "tests"
"""The test data of this project, which is skipped where its checkout is opened: dataset files and runs of no user."""

SETTLED_NS = 3 * 10**9
"""A folder that has changed less long ago may change again at the same time of its file system."""

T = TypeVar("T")


class OutsideFolders(UserError):
    """A path that is not below an opened folder."""


@dataclass(frozen=True)
class OpenedFolders:
    """Resolved folders.  A path in an address is ``NUMBER/path below that folder``, so none begins with a slash."""

    folders: tuple[Path, ...]

    @classmethod
    def open(cls, names: Sequence[str]) -> "OpenedFolders":
        return cls(tuple(dict.fromkeys(Path(name).expanduser().resolve() for name in names)))

    def resolve(self, path: str | Path) -> Path:
        """Follow symbolic links and ``..``; raise ``OutsideFolders`` unless the result is below an opened folder."""
        try:
            resolved = Path(path).expanduser().resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte
            raise OutsideFolders(f"{str(path)!r}: not a path") from None
        if not any(resolved.is_relative_to(folder) for folder in self.folders):
            raise OutsideFolders(f"{path}: outside of the opened folders; restart with --root {resolved.parent}")
        return resolved

    def contains(self, path: str | Path) -> bool:
        try:
            self.resolve(path)
        except OutsideFolders:
            return False
        return True

    def resolve_key(self, key: str) -> Path:
        """Return the path of an address."""
        number, _, rest = key.partition("/")
        if not number.isdecimal() or int(number) >= len(self.folders):
            raise OutsideFolders(f"{key!r}: no such folder is open")
        return self.resolve(self.folders[int(number)] / rest)

    def make_key(self, path: Path) -> str:
        """Return the path as it stands in addresses: below the deepest opened folder."""
        inside = [(len(folder.parts), number) for number, folder in enumerate(self.folders) if _is_below(path, folder)]
        if not inside:
            raise OutsideFolders(f"{path}: outside of the opened folders")
        number = max(inside)[1]
        return f"{number}/{path.relative_to(self.folders[number]).as_posix()}"

    def format_path(self, path: Path) -> str:
        """Format a path for people: below its opened folder, with that folder's name if there are several."""
        for folder in sorted(self.folders, key=lambda folder: -len(folder.parts)):
            if _is_below(path, folder):
                below = path.relative_to(folder).as_posix()
                return below if len(self.folders) == 1 else f"{folder.name}/{below}"
        return str(path)

    def walk(self) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
        """Iterate over all folders with their entries; hidden folders and links to folders are not entered."""
        return self._walk(_list_entries)

    def _walk(self, read: Callable[[Path], tuple[T, Sequence[str]]]) -> Iterator[tuple[Path, T]]:
        """``read`` returns the content of a folder, and the names of the folders to enter."""
        seen = set[Path]()
        pending = [(folder, 0) for folder in reversed(self.folders)]
        while pending:
            folder, depth = pending.pop()
            if folder in seen:
                continue
            seen.add(folder)
            try:
                content, subfolders = read(folder)
            except OSError:
                continue
            yield folder, content
            if depth < MAX_DEPTH:
                inside = (folder / name for name in subfolders)
                pending += [(path, depth + 1) for path in inside if path != OWN_TESTS]


def format_setting_path(path: Path) -> str:
    """Format a path for settings: relative to the working directory, as users write it, if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@dataclass
class FileFinder:
    """Finds files by name again and again; a folder that has not changed since, such as one of pictures, is not read.

    The time of a folder changes when files are added or removed; what is in them is not looked at here.
    """

    folders: OpenedFolders
    ends: tuple[str, ...]
    part: str
    """The text that the name of a listed file contains, if it has none of the endings."""

    _known: dict[Path, tuple[int, list[str], list[str]]] = field(default_factory=dict)

    def iter_folders(self) -> Iterator[tuple[Path, list[str]]]:
        """Iterate over the folders, with the names of the files that are looked for."""
        return self.folders._walk(self._read)

    def _read(self, folder: Path) -> tuple[list[str], list[str]]:
        changed_at, known = folder.stat().st_mtime_ns, self._known.get(folder)
        if known is None or known[0] != changed_at:
            names, subfolders = self._list_names(folder)
            is_settled = time.time_ns() - changed_at > SETTLED_NS
            known = self._known[folder] = (changed_at if is_settled else -1, names, subfolders)
        return known[1], known[2]

    def _list_names(self, folder: Path) -> tuple[list[str], list[str]]:
        """List the files that are looked for, and the folders to enter; there may be 100,000 pictures."""
        entries, subfolders = _list_entries(folder)
        found = [entry for entry in entries if entry.name.endswith(self.ends) or self.part in entry.name]
        return [entry.name for entry in found if self._is_readable(folder, entry)], subfolders

    def _is_readable(self, folder: Path, entry: os.DirEntry[str]) -> bool:
        """Whether it is a file, and if a link, one that does not lead out of the opened folders."""
        return entry.is_file() and (not entry.is_symlink() or self.folders.contains(folder / entry.name))


def _list_entries(folder: Path) -> tuple[list[os.DirEntry[str]], list[str]]:
    with os.scandir(folder) as opened:
        entries = [entry for entry in opened if entry.name.isprintable() or _is_addressable(entry.name)]
    return entries, [entry.name for entry in entries if _is_folder(entry) and _is_entered(entry.name)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _is_addressable(name: str) -> bool:
    """Whether a name can stand in an address: names that are no UTF-8 or have line breaks are passed over."""
    try:
        return "\n" not in name.encode().decode()
    except UnicodeEncodeError:
        return False


def _is_entered(name: str) -> bool:
    return not name.startswith(".") and name not in SKIPPED_FOLDERS


def _is_below(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder)
