"""Find files on disk: directory walks, include and exclude patterns, and the shards that a dataset file lists.

Which of the files of a folder are training images is decided in folder.py.
"""

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import cast

from ..name_suggestions import suggest_name
from ..problems import Place, Problem, report_file
from ..storage.filesystems import RemoteError
from ..storage.remote_path import RemotePath, is_remote, strip_query
from .listing import SHOWN_NAMES, format_first_names
from .schema import SubsetConfig, resolve_path

MAX_EXPANSIONS = 1_000_000
SHARD_EXTENSIONS = {
    "parquet": (".parquet",),
    # compressed tar files are listed too, and then rejected with a message
    "webdataset": (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"),
}
_MAX_NAMES_IN_FOLDER = 8
_NUMERIC_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_PATTERN_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)
_DATASETS_STATE_FILE = "state.json"


@dataclass
class DirectoryTree:
    """Relative paths with ``/`` in an order that is the same on every machine, without hidden files and folders."""

    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)  # the folders at the top, whether searched or not
    loops: list[str] = field(default_factory=list)  # links to folders that are searched anyway
    problems: list[Problem] = field(default_factory=list)  # folders that cannot be read

    def format_content(self, max_names: int = SHOWN_NAMES) -> str:
        """Format the first files and top folders for a message."""
        return format_first_names([*self.files, *(f"{name}/" for name in self.folders)], max_names) or "nothing"


def walk_directory(folder: Path, *, recursive: bool) -> DirectoryTree:
    """List the files of a folder; follow links, but search no folder twice, neither by a loop nor by a second link."""
    if is_remote(folder):
        return _list_remote_tree(folder, recursive=recursive)
    tree = DirectoryTree()
    root = os.path.realpath(folder)
    visited = {root}
    # links come last, so that a folder that is here itself is listed under its own path
    links = _walk(folder, "", tree, visited, recursive)
    while links:
        path = links.pop(0)
        target = os.path.realpath(folder / path)
        if target in visited or root.startswith(os.path.join(target, "")):
            tree.loops.append(path)
        else:
            visited.add(target)
            links += _walk(folder, path, tree, visited, recursive)
    for names in (tree.files, tree.folders, tree.loops):
        names.sort(key=_split_path)
    return tree


def _list_remote_tree(folder: RemotePath, *, recursive: bool) -> DirectoryTree:
    """List a remote folder in the same order as a local one."""
    tree = DirectoryTree()
    try:
        listing = folder.list_folder(recursive=recursive)
    except RemoteError as error:
        tree.problems.append(report_file(folder, f"cannot be listed: {error}"))
        return tree
    tree.files = [name for name in listing.files if not any(part.startswith(".") for part in name.split("/"))]
    tree.folders = [name for name in listing.folders if not name.startswith(".")]
    for names in (tree.files, tree.folders):
        names.sort(key=_split_path)
    return tree


def _split_path(path: str) -> list[str]:
    return path.split("/")  # as a sort key, this orders paths folder by folder


def _walk(folder: Path, start: str, tree: DirectoryTree, visited: set[str], recursive: bool) -> list[str]:
    """Collect the files below ``start``; return the links to folders."""
    stack, links = [start], []
    while stack:
        here = stack.pop()
        try:
            entries = sorted(_scan_entries(folder / here if here else folder))
        except OSError as error:
            place = Place(str(folder / here))
            tree.problems.append(Problem("", f"cannot be read: {error.strerror}", place=place))
            continue
        for name, is_folder, is_link in entries:
            path = f"{here}/{name}" if here else name
            if not is_folder:
                tree.files.append(path)
                continue
            if not here:
                tree.folders.append(path)
            if not recursive:
                continue
            if is_link:
                links.append(path)
            elif (target := os.path.realpath(folder / path)) in visited:  # a mount or junction, which is not a link
                tree.loops.append(path)
            else:
                visited.add(target)
                stack.append(path)
    return links


def _scan_entries(folder: Path) -> Iterator[tuple[str, bool, bool]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):  # such as "._a.png", which macOS adds
                yield entry.name, _is_folder(entry), entry.is_symlink()


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def expand_braces(pattern: str) -> list[str]:
    """Expand ``{a,b}`` and ``{000..012}`` as a shell does; raise ``ValueError`` if there are too many names."""
    for start in (index for index, character in enumerate(pattern) if character == "{"):
        commas, end = _find_closing_brace(pattern, start)
        choices = _parse_choices(pattern, [start, *commas, end]) if end else None
        if choices is not None:
            names: list[str] = []
            for choice in choices:
                names += expand_braces(pattern[:start] + choice + pattern[end + 1 :])
                if len(names) > MAX_EXPANSIONS:
                    raise ValueError(f"{pattern!r} expands to more than {MAX_EXPANSIONS} names")
            return names
    return [pattern]


def _find_closing_brace(pattern: str, start: int) -> tuple[list[int], int]:
    """Return the positions of the commas between the braces and of the closing brace, 0 if there is none."""
    depth = 0
    commas: list[int] = []
    for index in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[index], 0)
        if depth == 0:
            return commas, index
        if depth == 1 and pattern[index] == ",":
            commas.append(index)
    return commas, 0


def _parse_choices(pattern: str, edges: Sequence[int]) -> list[str] | None:
    """Return the alternatives between the edges or the numbers of a range, or None if it is neither."""
    parts = [pattern[left + 1 : right] for left, right in pairwise(edges)]
    numbers = _NUMERIC_RANGE.fullmatch(parts[0])
    if len(parts) > 1 or numbers is None:
        return parts if len(parts) > 1 else None
    first, last = int(numbers[1]), int(numbers[2])
    if abs(last - first) >= MAX_EXPANSIONS:
        raise ValueError(f"{{{parts[0]}}} expands to more than {MAX_EXPANSIONS} names")
    is_padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-").startswith("0") for text in numbers.groups())
    width = max(len(numbers[1]), len(numbers[2])) if is_padded else 0
    step = 1 if last >= first else -1
    return [f"{number:0{width}d}" for number in range(first, last + step, step)]


@dataclass(frozen=True)
class PathPattern:
    """A pattern of ``include`` or ``exclude``: ``*``, ``?``, ``[a-c]`` in a name, ``**`` over folders, braces."""

    text: str
    regex: re.Pattern[str]

    @classmethod
    def compile(cls, text: str) -> "PathPattern":
        """Compile to a regex: without ``/`` for any part of a path, else from its start; a folder means its content."""
        alternatives = []
        for pattern in expand_braces(text):
            body = pattern.rstrip("/")
            prefix = "" if "/" in body else "(?:.*/)?"
            body = body.removeprefix("./").removeprefix("/")
            body = "".join(_translate_token(token[0]) for token in _PATTERN_TOKEN.finditer(body))
            alternatives.append(prefix + body + ("/.*" if pattern.endswith("/") else "(?:/.*)?"))
        try:
            return cls(text, re.compile("|".join(alternatives), re.DOTALL))
        except re.error as error:
            raise ValueError(f"{text!r} is not a valid pattern: {error.msg}") from None

    def matches(self, path: str) -> bool:
        return self.regex.fullmatch(path) is not None


def _translate_token(token: str) -> str:
    """Translate one token of a pattern to a regex."""
    if len(token) > 2 and token[0] == "[" and token != "[!]":
        content = token[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
        content = content.replace("]", r"\]").replace("&&", r"&\&").replace("~~", r"~\~").replace("||", r"|\|")
        return f"(?!/)[^{content[1:]}]" if content[0] == "!" else f"(?!/)[{content}]"
    return {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token, re.escape(token))


@dataclass(frozen=True)
class PathSelection:
    """The paths that patterns select, and which patterns matched, each as its key and text."""

    paths: list[str]
    unmatched: list[tuple[str, str]]
    matched: list[tuple[str, str]]


def select_paths(paths: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> PathSelection:
    """Select the paths that match one of ``include``, if any is set, and none of ``exclude``."""
    if not include and not exclude:
        return PathSelection(list(paths), [], [])
    selected = set() if include else set(paths)
    unmatched: list[tuple[str, str]] = []
    matched: list[tuple[str, str]] = []
    for key, texts in (("include", include), ("exclude", exclude)):
        for text in texts:
            pattern = PathPattern.compile(text)
            matching = [path for path in paths if pattern.matches(path)]
            (matched if matching else unmatched).append((key, text))
            selected = selected.union(matching) if key == "include" else selected.difference(matching)
    return PathSelection([path for path in paths if path in selected], unmatched, matched)


@dataclass
class Shards:
    """Files in the order in which they are read, and a message for each name without any."""

    files: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def resolve_shards(subset: SubsetConfig) -> Shards:
    """Resolve the names of ``parquet`` or ``webdataset``: files, folders, glob and brace patterns."""
    shards = Shards()
    listed: set[Path] = set()
    for key in SHARD_EXTENSIONS:
        for name in getattr(subset, key):
            try:
                files = list(_resolve_name(name, key, subset))
            except (ValueError, RemoteError) as error:
                text = f"{strip_query(name)}: {error}" if isinstance(error, RemoteError) else str(error)
                shards.problems.append(subset.report(key, text))
                continue
            duplicates = [str(path) for path in files if path in listed]
            if duplicates:
                text = f"{strip_query(name)!r} matches files listed before: {format_first_names(duplicates)}"
                shards.problems.append(subset.report(key, text))
            shards.files += files
            listed.update(files)
    return shards


def _resolve_name(name: str, key: str, subset: SubsetConfig) -> Iterator[Path]:
    """Yield the files of one name; raise ``ValueError`` if there are none."""
    if name.startswith("pipe:"):
        raise ValueError(f"{name!r} is a command; give the URL or path that it reads")
    missing, missing_urls = list[str](), list[RemotePath]()
    for pattern in expand_braces(name):
        path = resolve_path(subset.dataset_file, pattern, subset.remote)
        if is_remote(path) and path.is_file():  # one listing for all files of a folder
            yield _require_readable(cast(Path, path))
        elif path.is_dir():
            yield from _list_shards(path, key, recursive=subset.recursive)
        elif not is_remote(path) and path.is_file():
            yield path
        elif is_remote(path):
            files = _glob_remote_files(path)
            missing_urls += [] if files else [path]
            yield from files
        elif files := _glob_files(pattern, (subset.dataset_file or Path()).parent):
            yield from files
        else:
            missing.append(pattern)
    if missing_urls:
        raise ValueError(describe_missing_url(missing_urls))
    if missing:
        raise ValueError(describe_missing_path(missing, subset.dataset_file))


def _require_readable(path: Path) -> Path:
    """Return the path; raise ``ValueError`` for a remote file that has to be on a disk."""
    if is_remote(path) and path.suffix.lower() == ".arrow":
        raise ValueError(f"{path}: .arrow files are memory-mapped; download them, or save the dataset as parquet")
    return path


def _list_shards(folder: Path, key: str, *, recursive: bool) -> list[Path]:
    tree = walk_directory(folder, recursive=recursive)
    if tree.problems:
        raise ValueError(str(tree.problems[0]))
    files = [folder / name for name in tree.files if name.lower().endswith(SHARD_EXTENSIONS[key])]
    if not files and key == "parquet":
        files = list(map(_require_readable, _list_saved_dataset(folder, tree.files)))
    if not files:
        hint = "; set recursive = true to search its folders" if tree.folders and not recursive else ""
        kinds = f"{SHARD_EXTENSIONS[key][0]} files" + (" or save_to_disk datasets" if key == "parquet" else "")
        raise ValueError(f"no {kinds} in {folder.absolute()}, which contains {tree.format_content()}{hint}")
    return files


def _list_saved_dataset(folder: Path, names: Sequence[str]) -> list[Path]:
    """List the files written by ``save_to_disk`` of HF datasets; other .arrow files in the folder are its cache."""
    files = []
    for name in names:
        if PurePosixPath(name).name != _DATASETS_STATE_FILE:
            continue
        try:
            state = json.loads((folder / name).read_text(encoding="utf-8"))
            files += [(folder / name).with_name(item["filename"]) for item in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError):  # another program's file of this name
            continue
    return files


def _glob_remote_files(pattern: RemotePath) -> list[Path]:
    """List the remote files that match a pattern with ``*``, ``?``, ``[a-c]`` or ``**``; none without these."""
    parts = str(pattern).split("/")
    first = next((number for number, part in enumerate(parts) if number > 2 and glob.has_magic(part)), None)
    if first is None or not pattern.can_list:
        return []
    folder, rest = pattern, "/".join(parts[first:])
    for _ in parts[first:]:
        folder = folder.parent
    tree = walk_directory(cast(Path, folder), recursive="/" in rest or "**" in rest)
    if tree.problems:
        raise ValueError(str(tree.problems[0]))
    regex = re.compile("".join(_translate_token(token[0]) for token in _PATTERN_TOKEN.finditer(rest)), re.DOTALL)
    return [_require_readable(cast(Path, folder / name)) for name in tree.files if regex.fullmatch(name)]


def _glob_files(pattern: str, config_folder: Path) -> list[Path]:
    if not glob.has_magic(pattern):
        return []
    path = os.path.expanduser(pattern)
    matches = [Path(name) for name in glob.glob(path, recursive=True)]
    matches = matches or [config_folder / name for name in glob.glob(path, root_dir=config_folder, recursive=True)]
    return sorted((path for path in matches if path.is_file()), key=lambda path: _split_path(path.as_posix()))


def describe_missing_url(paths: Sequence[RemotePath]) -> str:
    """Report remote files or folders that do not exist, with the content of the folder of the first one."""
    path, missing = paths[0], f"{paths[0]} does not exist"
    if len(paths) > 1:
        missing = f"{len(paths)} files not found: {format_first_names(list(map(str, paths)))}"
    if not path.can_list:
        return f"{missing}; check the URL"
    if path.parent == path:
        return f"{path} is empty"
    tree = walk_directory(cast(Path, path.parent), recursive=False)
    content = f"{path.parent} contains {tree.format_content(_MAX_NAMES_IN_FOLDER)}"
    content = str(tree.problems[0]) if tree.problems else content
    return f"{missing}; {content}{suggest_name(path.name, [*tree.files, *tree.folders])}"


def describe_missing_path(names: Sequence[str], dataset_file: Path | None = None) -> str:
    """Report paths that do not exist, with the content of the folder in which the first one was expected."""
    path = Path(names[0]).expanduser()
    candidates = [path.absolute(), *([(dataset_file.parent / path).absolute()] if dataset_file is not None else [])]
    missing = next((candidate for candidate in candidates if candidate.parent.is_dir()), candidates[0])
    while not missing.parent.is_dir():
        missing = missing.parent
    tree = walk_directory(missing.parent, recursive=False)
    content = f"{missing.parent} contains {tree.format_content(_MAX_NAMES_IN_FOLDER)}"
    content = str(tree.problems[0]) if tree.problems else content
    searched = "" if path.is_absolute() or dataset_file is None else f" (also searched next to {dataset_file})"
    if len(names) > 1:
        return f"{len(names)} files not found{searched}: {format_first_names(names)}; {content}"
    return f"{names[0]!r} not found{searched}; {content}{suggest_name(missing.name, [*tree.files, *tree.folders])}"
