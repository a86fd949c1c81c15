"""A file that was given to the import, and the files that it names."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.toml_positions import read_text_file, read_toml_with_lines
from ...errors import UserError
from ...problems import Place, Problem, report_file
from .imported import KeyReader

PROGRAMS = "kohya_ss, ai-toolkit, OneTrainer, diffusion-pipe or SimpleTuner"


@dataclass(frozen=True)
class SourceFile:
    """A file and its content: tables, lists and values."""

    path: Path
    content: Any


def read_source(path: Path) -> SourceFile:
    """Read a JSON, YAML, TOML or .env file."""
    suffix = path.suffix.lower()
    if path.is_dir():
        raise UserError(report_file(path, "a folder", "give the configuration file in it"))
    if suffix == ".toml":
        return SourceFile(path, read_toml_with_lines(path)[0])
    text = read_text_file(path)
    if suffix in (".yaml", ".yml"):
        return SourceFile(path, _parse_yaml(text, path))
    if suffix == ".env" or path.name.endswith(".env.example"):
        return SourceFile(path, text)
    if suffix == ".json" or path.name.endswith(".json.example"):
        return SourceFile(path, _parse_json(text, path))
    raise UserError(
        report_file(path, "not a .json, .yaml, .toml or .env file", f"expected a configuration of {PROGRAMS}")
    )


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", None)
        text, place = f"not valid JSON: {getattr(error, 'msg', error)}", Place(str(path), line)
        raise UserError(Problem("", text, place=place)) from None
    except RecursionError:
        raise UserError(report_file(path, "not valid JSON: nested too deeply")) from None


def _parse_yaml(text: str, path: Path) -> Any:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise UserError(report_file(path, "not valid YAML: nested too deeply")) from None
    except ValueError as error:  # such as of a date that does not exist
        raise UserError(report_file(path, f"not valid YAML: {error}")) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = Place(str(path), None if mark is None else mark.line + 1)
        raise UserError(Problem("", f"not valid YAML: {getattr(error, 'problem', error)}", place=place)) from None


def find_companion(
    reader: KeyReader,
    key: str,
    main_path: Path,
    others: Sequence[SourceFile],
    matches: Callable[[Any], bool],
    title: str,
    default: str = "",
) -> SourceFile | None:
    """Return the file that a key names: one that was given, or the one where the key says, or next to the main file."""
    given = [source for source in others if matches(source.content)]
    name = str(reader.read(key, default) or "")
    if given:
        return given[0]
    path = Path(name).expanduser()
    candidates = [path, main_path.parent / path, main_path.parent / path.name] if name else []
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        if name:
            reason = f"no such file; give the {title} file, too: python -m library import {main_path.name} FILE"
            reader.list_change(key, reason, name)
        return None
    source = read_source(found)
    if matches(source.content):
        return source
    reader.list_change(key, f"{found} is no {title} file of this program; give the right one", name)
    return None
