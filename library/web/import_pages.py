"""Configurations of other programs that are dropped into the page, by what ``python -m library import`` does."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import UserError
from ..problems import Problem, report_file
from ..tools.import_config import choose_name, run_import_config
from ..tools.importers.source_file import SourceFile, read_source
from .folders import OpenedFolders
from .picture_pages import take_json
from .workbench import JSONAnswer, get_workbench

IMPORTS_FOLDER = "imports"
MAX_FILES, MAX_NAME_BYTES, MAX_PATH_LENGTH, MAX_DEPTH = 8, 240, 1024, 40


def import_files(request: Request, body: Mapping[str, Any]) -> Response:
    """Turn dropped files into a run TOML and a dataset file: ``{"files": [{"name": ..., "text": ...}]}``."""
    folders = get_workbench(request).folders
    texts = _take_files(body.get("files"))
    with tempfile.TemporaryDirectory(prefix="lorikeet-import-") as temporary:
        paths = [Path(temporary).resolve() / "imported" / name for name in texts]
        paths[0].parent.mkdir()
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        try:
            sources = [read_source(path) for path in paths]
            if problems := [each for source in sources for each in _find_paths_outside(folders, source)]:
                raise UserError(*problems)
            target = _choose_folder(folders.folders[0] / IMPORTS_FOLDER, choose_name(sources[0]))
            report, _ = run_import_config([*map(str, paths), "--output_dir", str(target)])
        except UserError as error:
            raise UserError(*(_name_dropped_file(each, paths[0].parent) for each in error.problems)) from None
    settings_file = min(target.glob("*.toml"), key=lambda path: len(path.name))  # beside that of the dataset
    report = _shorten(report, (f"{paths[0].parent}/", f"{paths[0].parent}\\", f"{folders.folders[0]}/"))
    return JSONAnswer({"report": report, "file": folders.make_key(settings_file)})


def _take_files(files: Any) -> dict[str, str]:
    """Return the text of each file by its name, without folders."""
    if not isinstance(files, list) or not 0 < len(files) <= MAX_FILES:
        raise UserError(f"drop 1 to {MAX_FILES} files")
    texts: dict[str, str] = {}
    for entry in files:
        name, text = (entry.get("name"), entry.get("text")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise UserError("expected the names and texts of files")
        plain = name.replace("\\", "/").rpartition("/")[2]
        is_name = plain.isprintable() and not plain.startswith(".") and ":" not in plain
        if not is_name or not 0 < len(plain.encode()) <= MAX_NAME_BYTES:
            raise UserError(report_file(name, "no name of a configuration file", "rename it"))
        if not _is_unicode(text):
            raise UserError(report_file(plain, "is no text in UTF-8"))
        if plain in texts:
            raise UserError(report_file(plain, "is there twice", "drop the files of one run"))
        texts[plain] = text
    return texts


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find_paths_outside(folders: OpenedFolders, source: SourceFile) -> Iterator[Problem]:
    """Find files and folders of this machine that a file names and that are not open: none of them is read."""
    own = source.path.parent
    for text in dict.fromkeys(_iter_texts(source.content, 0, set())):
        for path in _resolve_existing(text, own) if len(text) <= MAX_PATH_LENGTH else ():
            if not folders.contains(path) and not path.is_relative_to(own):
                way_out = f"restart the page with --root {path.parent}"
                yield report_file(source.path, f"names {text}, which is outside of the opened folders", way_out)
                break


def _iter_texts(content: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """Iterate over the texts in tables and lists; one that YAML refers to again and again is looked at once."""
    if depth > MAX_DEPTH or (not isinstance(content, str) and id(content) in seen):
        return
    seen.add(id(content))
    if isinstance(content, str):
        # A file with environment variables is one text, whose values are paths.
        yield from [content, *(line.partition("=")[2].strip().strip("'\"") for line in content.splitlines())]
    elif isinstance(content, dict):
        for value in content.values():
            yield from _iter_texts(value, depth + 1, seen)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _iter_texts(value, depth + 1, seen)


def _resolve_existing(text: str, own: Path) -> Iterator[Path]:
    """Resolve the paths that a text is, from the working directory and from the folder of the file itself."""
    for start in (Path.cwd(), own):
        with suppress(OSError, ValueError, RuntimeError):
            path = start / Path(text).expanduser()
            if text.strip() and path.exists():
                yield path.resolve()


def _choose_folder(parent: Path, name: str) -> Path:
    """Return a folder that is not there yet."""
    taken = (parent / f"{name}-{number}" if number > 1 else parent / name for number in range(1, 10_000))
    return next(path for path in taken if not path.exists())


def _name_dropped_file(problem: Problem, folder: Path) -> Problem:
    """Name a file as the user knows it."""
    place, names = problem.place, (f"{folder}/", f"{folder}\\")
    if place is not None and place.file:
        place = replace(place, file=_shorten(place.file, names))
    return replace(problem, text=_shorten(problem.text, names), place=place)


def _shorten(text: str, prefixes: Sequence[str]) -> str:
    for prefix in prefixes:
        text = text.replace(prefix, "")
    return text


ROUTES = (Route("/api/import", take_json(import_files), methods=["POST"]),)
