"""Read TOML with the line of every key, so that messages can point to it; read the keys of a run TOML."""

import re
import sys
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..problems import Place, Problem, report_file
from .kohya_compat import RENAMED_OPTIONS, RawSetting
from .operating_systems import find_escaped_paths

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath = tuple[str | int, ...]
"""Keys and array indices from the root: ``("datasets", 0, "subsets", 1, "image_dir")``."""

SECRET_KEYS = ("wandb_api_key", "huggingface_token")
"""Keys whose values are in no message."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACES = re.compile(r"[ \t]*")
_KEY = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[A-Za-z0-9_-]+")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)
_SCALAR = re.compile(r"[^\s,\]}#]+(?: [^\s,\]}#]+)?")  # a space may separate date and time


def read_text_file(path: Path) -> str:
    """Read UTF-8 text, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise _build_error(path, f"no such file (looked in {path.resolve().parent})") from None
    except UnicodeDecodeError as error:
        raise _build_error(path, f"not UTF-8 at byte {error.start}", "save the file as UTF-8") from None
    except OSError as error:
        raise _build_error(path, f"cannot be read: {error.strerror}") from None


def read_toml_with_lines(path: Path) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    """Return the data of a TOML file, and the line of each key."""
    text = read_text_file(path)
    try:
        data, lines = tomllib.loads(text), find_key_lines(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        position = re.search(r" \(at line (\d+), column \d+\)", message)
        line = int(position[1]) if position else text.count("\n") + 1
        if first := _find_duplicate_key(text.splitlines()[:line]):
            text, place = f"duplicate key, first set in line {first[1]}", Place(str(path), line, key=first[0])
            raise ConfigError([Problem(first[0], text, place=place)]) from None
        reason = message.replace(position[0] if position else " (at end of document)", "")
        fix = _suggest_toml_fix(text.splitlines()[line - 1] if line <= len(text.splitlines()) else "")
        raise ConfigError([Problem("", f"not valid TOML: {reason}", fix, Place(str(path), line))]) from None
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
        raise _build_error(path, f"not valid TOML: {error}") from None
    if problems := list(_report_escaped_paths(path, data, lines)):
        raise ConfigError(problems)
    return data, lines


def _report_escaped_paths(path: Path, data: Mapping[str, Any], lines: Mapping[KeyPath, int]) -> Iterator[Problem]:
    """Report paths of Windows that are valid TOML and mean something else, since the file they name does not exist."""
    for keys, fix in find_escaped_paths(data):
        name = next((key for key in reversed(keys) if isinstance(key, str)), "")
        line = next((lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), None)
        text = "a backslash in double quotes begins an escape, and no path has such characters"
        yield Problem(name, text, fix, Place(str(path), line, key=name))


def _build_error(path: Path, text: str, fix: str = "") -> ConfigError:
    return ConfigError([report_file(path, text, fix)])


def _find_duplicate_key(lines: list[str]) -> tuple[str, int] | None:
    """Return the key of the last line, and the line that sets it before in the same table."""
    key = lines[-1].partition("=")[0].strip() if lines and "=" in lines[-1] else ""
    for number in range(len(lines) - 1, 0, -1):
        name = lines[number - 1].partition("=")[0].strip()
        if name.startswith("[") or not key:
            return None
        if name == key:
            return key, number
    return None


def _suggest_toml_fix(line: str) -> str:
    """Suggest how to write what is often written wrong: booleans of Python, paths of Windows, text without quotes."""
    key, _, value = line.partition("=")
    value = value.partition(" #")[0].strip()
    if value in ("True", "False"):
        return f"write {value.lower()} in lower case"
    if value == "None":
        return "TOML has no None: remove the line"
    if value.startswith('"') and "\\" in value:
        return "write paths with backslashes in single quotes: " + value.replace('"', "'")
    if key.strip() in SECRET_KEYS:
        value = re.sub(r"\w+", "...", value)
    if value and re.fullmatch(r"[A-Za-z/~.][^\"'\[\]{}]*", value):
        return f'text needs quotes: {key.strip()} = "{value}"'
    return ""


def find_key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, counted from 1, where each key of a valid TOML text first occurs."""
    return _KeyScanner(text).scan()


def _unquote_key(key: str) -> str:
    return str(tomllib.loads(f"key = {key}")["key"]) if key[0] in "\"'" else key


class _KeyScanner:
    """Scan just enough of TOML to follow the keys; the text is known to be valid."""

    def __init__(self, text: str):
        self.text, self.offset = text, 0
        self.lines: dict[KeyPath, int] = {}
        self.array_lengths: dict[KeyPath, int] = {}  # of arrays of tables

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self.skip(_BLANK)
        while self.offset < len(self.text):
            if self.text.startswith("[", self.offset):
                table = self.read_table_header()
            else:
                self.read_assignment(table)
            self.skip(_BLANK)
        return self.lines

    def skip(self, pattern: re.Pattern[str]) -> None:
        if match := pattern.match(self.text, self.offset):
            self.offset = match.end()

    def read_table_header(self) -> KeyPath:
        """Read ``[a.b]`` or ``[[a.b]]``; the name of an array of tables refers to its last table."""
        is_array = self.text.startswith("[[", self.offset)
        start = self.offset
        self.offset += 2 if is_array else 1
        *parents, last = self.read_dotted_key()
        self.offset = self.text.index("]", self.offset) + (2 if is_array else 1)
        path: KeyPath = ()
        for name in parents:
            path = (*path, name)
            self.record_line(path, start)
            path = self.resolve_last_table(path)
        path = (*path, last)
        self.record_line(path, start)
        if is_array:
            self.array_lengths[path] = self.array_lengths.get(path, 0) + 1
            path = self.resolve_last_table(path)
            self.record_line(path, start)
        return path

    def resolve_last_table(self, path: KeyPath) -> KeyPath:
        return (*path, self.array_lengths[path] - 1) if path in self.array_lengths else path

    def read_assignment(self, table: KeyPath) -> None:
        start = self.offset
        path = table
        for name in self.read_dotted_key():
            path = (*path, name)
            self.record_line(path, start)
        self.offset = self.text.index("=", self.offset) + 1
        self.skip(_SPACES)
        self.read_value(path)

    def read_dotted_key(self) -> list[str]:
        names = []
        while True:
            self.skip(_SPACES)
            match = _KEY.match(self.text, self.offset)
            if match is None:
                raise AssertionError(f"no key at offset {self.offset} of valid TOML")
            names.append(_unquote_key(match[0]))
            self.offset = match.end()
            self.skip(_SPACES)
            if not self.text.startswith(".", self.offset):
                return names
            self.offset += 1

    def read_value(self, path: KeyPath) -> None:
        opening = self.text[self.offset]
        if opening in "[{":
            self.offset += 1
            index = 0
            self.skip(_BLANK)
            while self.text[self.offset] not in "]}":
                if opening == "[":
                    self.record_line((*path, index), self.offset)
                    self.read_value((*path, index))
                    index += 1
                else:
                    self.read_assignment(path)
                self.skip(_BLANK)
                if self.text[self.offset] == ",":
                    self.offset += 1
                    self.skip(_BLANK)
            self.offset += 1
        else:
            self.skip(_STRING if opening in "\"'" else _SCALAR)

    def record_line(self, path: KeyPath, offset: int) -> None:
        self.lines.setdefault(path, self.text.count("\n", 0, offset) + 1)


def read_run_toml(path: Path, command_options: Container[str], problems: list[Problem]) -> Iterator[RawSetting]:
    """Read the keys of a run TOML; as in sd-scripts, section names have no meaning."""
    data, lines = read_toml_with_lines(path)
    first: dict[str, tuple[int, Any]] = {}
    if "general_args" in data and "subsets" in data:
        program = "LoRA_Easy_Training_Scripts"
        raise _build_error(path, f"a file of {program}' window", "give runtime_store/config.toml, its run file")
    for key, item in data.items():
        members = {(key, name): value for name, value in item.items()} if isinstance(item, dict) else {(key,): item}
        for key_path, value in members.items():
            name, line = str(key_path[-1]), lines[key_path]
            current_name, place = RENAMED_OPTIONS.get(name, name), Place(str(path), line, key=name)
            if current_name in first:
                first_line, first_value = first[current_name]
                if value != first_value:
                    yield RawSetting(name, value, place, is_flag=False, replaced_line=first_line)
            elif name in command_options:
                problems.append(Problem(name, "only allowed on the command line", place=place))
            elif is_table(value) and ("datasets" in key_path or "subsets" in key_path):
                fix = "this looks like a dataset TOML: give it with --dataset_config"
                problems.append(Problem(name, "expected a value, got a table", fix, place))
            else:
                yield RawSetting(name, value, place, is_flag=False)
            first.setdefault(current_name, (line, value))


def is_table(value: Any) -> bool:
    """Whether a TOML value is a table or a list with tables."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
