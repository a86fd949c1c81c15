"""Where each key of a TOML text stands, so that a message can name the line; tomllib keeps no positions."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .file_text import text_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath = tuple[str | int, ...]
"""Keys and array positions from the root: ``("datasets", 0, "subsets", 1, "image_dir")``."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACES = re.compile(r"[ \t]*")
_KEY = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[A-Za-z0-9_-]+")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)
_SCALAR = re.compile(r"[^\s,\]}#]+(?: [^\s,\]}#]+)?")  # a date and its time may stand apart


def read_toml(path: Path) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    """Return the data of a TOML file and the line of each key."""
    text = text_of(path)
    try:
        return tomllib.loads(text), key_lines(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = re.search(r" \(at line (\d+), column \d+\)", message)
        place = f"{path}:{found[1]}" if found else f"{path}:{text.count(chr(10)) + 1}"
        reason = message.replace(found[0], "") if found else message.replace(" (at end of document)", "")
        raise ConfigError([f"{place}: not valid TOML: {reason}"]) from None


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, counted from 1, on which each key of a valid TOML text first stands."""
    return _Scanner(text).scan()


def _unquoted(key: str) -> str:
    """A part of a key as the parser sees it."""
    if key[0] not in "\"'":
        return key
    return str(tomllib.loads(f"key = {key}")["key"])


class _Scanner:
    """Reads just enough of TOML to follow keys; the text is known to be valid."""

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.lines: dict[KeyPath, int] = {}
        self.lengths: dict[KeyPath, int] = {}  # of arrays of tables

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self.skip(_BLANK)
        while self.at < len(self.text):
            if self.text.startswith("[", self.at):
                table = self.header()
            else:
                self.assignment(table)
            self.skip(_BLANK)
        return self.lines

    def skip(self, pattern: re.Pattern[str]) -> None:
        if match := pattern.match(self.text, self.at):
            self.at = match.end()

    def header(self) -> KeyPath:
        """``[a.b]`` or ``[[a.b]]``; inside an array of tables a name means its newest table."""
        is_array = self.text.startswith("[[", self.at)
        start = self.at
        self.at += 2 if is_array else 1
        *parents, last = self.dotted_key()
        self.at = self.text.index("]", self.at) + (2 if is_array else 1)
        path: KeyPath = ()
        for name in parents:
            path = (*path, name)
            self.note(path, start)
            path = self.newest(path)
        path = (*path, last)
        self.note(path, start)
        if is_array:
            self.lengths[path] = self.lengths.get(path, 0) + 1
            path = self.newest(path)
            self.note(path, start)
        return path

    def newest(self, path: KeyPath) -> KeyPath:
        return (*path, self.lengths[path] - 1) if path in self.lengths else path

    def assignment(self, table: KeyPath) -> None:
        start = self.at
        path = table
        for name in self.dotted_key():
            path = (*path, name)
            self.note(path, start)
        self.at = self.text.index("=", self.at) + 1
        self.skip(_SPACES)
        self.value(path)

    def dotted_key(self) -> list[str]:
        names = []
        while True:
            self.skip(_SPACES)
            match = _KEY.match(self.text, self.at)
            if match is None:
                raise AssertionError(f"no key at offset {self.at} of a text that was parsed as TOML")
            names.append(_unquoted(match[0]))
            self.at = match.end()
            self.skip(_SPACES)
            if not self.text.startswith(".", self.at):
                return names
            self.at += 1

    def value(self, path: KeyPath) -> None:
        opening = self.text[self.at]
        if opening in "[{":
            self.at += 1
            index = 0
            self.skip(_BLANK)
            while self.text[self.at] not in "]}":
                if opening == "[":
                    self.note((*path, index), self.at)
                    self.value((*path, index))
                    index += 1
                else:
                    self.assignment(path)
                self.skip(_BLANK)
                if self.text[self.at] == ",":
                    self.at += 1
                    self.skip(_BLANK)
            self.at += 1
        else:
            self.skip(_STRING if opening in "\"'" else _SCALAR)

    def note(self, path: KeyPath, offset: int) -> None:
        self.lines.setdefault(path, self.text.count("\n", 0, offset) + 1)
