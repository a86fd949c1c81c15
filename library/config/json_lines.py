"""Where each key of a JSON text stands, so that a message can name the line; the json module keeps no positions."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .file_text import text_of
from .toml_lines import KeyPath

_BLANK = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^\s,\]}]+")


def read_json(path: Path) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    """Return the data of a JSON file, which is one object, and the line of each key."""
    text = text_of(path)
    try:
        data = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ConfigError([f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: not valid JSON: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: nested too deeply for a file of settings"]) from None
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: expected an object {{...}}"])
    scanner = _Scanner(text)
    scanner.value(())
    if scanner.problems:
        raise ConfigError([f"{path}:{problem}" for problem in scanner.problems])
    return data, scanner.lines


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number that JSON knows")


class _Scanner:
    """Reads just enough of JSON to follow keys; the text is known to be valid."""

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.decoder = json.JSONDecoder()
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[str] = []  # keys that stand twice: the last would win in silence

    def value(self, path: KeyPath) -> None:
        self.skip()
        opening = self.text[self.at]
        if opening == '"':
            self.string()
        elif opening in "[{":
            self.members(path, is_object=opening == "{")
        elif match := _SCALAR.match(self.text, self.at):
            self.at = match.end()

    def members(self, path: KeyPath, *, is_object: bool) -> None:
        self.at += 1
        index = 0
        while self.here() not in "]}":
            start, name = self.at, index if not is_object else self.string()
            self.note((*path, name), start)
            if is_object:
                self.skip()
                self.at += 1  # the colon
            self.value((*path, name))
            index += 1
            if self.here() == ",":
                self.at += 1
        self.at += 1

    def here(self) -> str:
        self.skip()
        return self.text[self.at]

    def skip(self) -> None:
        if match := _BLANK.match(self.text, self.at):
            self.at = match.end()

    def string(self) -> str:
        found, self.at = self.decoder.raw_decode(self.text, self.at)
        return str(found)

    def note(self, path: KeyPath, offset: int) -> None:
        line = self.text.count("\n", 0, offset) + 1
        if path in self.lines:
            self.problems.append(f"{line}: {path[-1]}: given twice; it stands in line {self.lines[path]} already")
        self.lines.setdefault(path, line)
