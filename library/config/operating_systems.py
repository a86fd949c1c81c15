"""File names, paths and command lines by the rules of the operating system: what Windows accepts, and how it quotes."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..problems import Problem

IS_WINDOWS = os.name == "nt"
MAX_NAME_BYTES = 255
"""The longest name of a file: in bytes on Linux and macOS, in UTF-16 units on Windows."""

MAX_WINDOWS_PATH = 259
MAX_SHOWN = 40
"""The part of a long name that a message shows."""

_ADDED_CHARACTERS = 64
"""What a run adds to its name at most: a dot, the step, the part, the process, the extension."""

_WINDOWS_CHARACTERS = re.compile(r'[<>:"/\\|?*]')
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")
_RESERVED_NAMES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?", re.IGNORECASE)
_ESCAPED_CHARACTERS = {"\x07": r"\a", "\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", "\x1b": r"\e"}
_DRIVE_PATH = re.compile(r'[A-Za-z]:[^ "<>|?*][^"<>|?*]*')
_PATH_KEY = re.compile(r"(.*_)?(dir|directory|file|path|folder|image_dir|vae|dit|ae|t5xxl|clip_[lg]|weights)")


def validate_output_name(name: str, output_dir: str, *, is_windows: bool = IS_WINDOWS) -> Iterator[Problem]:
    """Check that files of this name can be written: after hours of training it would be too late."""
    if problem := find_name_problem(name, is_windows=is_windows):
        shown = repr(name) if len(name) < MAX_SHOWN else f"{name[:MAX_SHOWN]!r}..."
        yield Problem("output_name", f"{shown} {problem}", "give another name")
        return
    longest = len(os.path.abspath(os.path.expanduser(output_dir))) + len("/sample/") + len(name) + _ADDED_CHARACTERS
    if is_windows and longest > MAX_WINDOWS_PATH and not has_long_paths():
        yield Problem(
            "output_dir",
            f"paths in it get {longest} characters, and Windows allows {MAX_WINDOWS_PATH}",
            "give a shorter output_dir or output_name, or enable long paths: as administrator, reg add"
            r" HKLM\SYSTEM\CurrentControlSet\Control\FileSystem /v LongPathsEnabled /t REG_DWORD /d 1",
        )


def find_name_problem(name: str, *, is_windows: bool = IS_WINDOWS) -> str:
    """Return why no file can have this name, or one that begins with it; empty if it can."""
    try:
        units = len(name.encode("utf-16-le", "surrogatepass")) // 2 if is_windows else len(os.fsencode(name))
    except UnicodeEncodeError:
        return "has half a character (a lone surrogate), which is in no text"
    if _CONTROL_CHARACTERS.search(name):
        return "has a control character"
    if units + _ADDED_CHARACTERS > MAX_NAME_BYTES:
        return f"is too long: names may have {MAX_NAME_BYTES - _ADDED_CHARACTERS} bytes, as more is added to them"
    if not is_windows:
        return ""
    if found := _WINDOWS_CHARACTERS.search(name):
        return f"has {found[0]!r}, which is not allowed in names of Windows"
    if _RESERVED_NAMES.fullmatch(name):
        return "is a name of a device of Windows"
    if name != name.rstrip(". "):
        return "ends with a dot or a space, which Windows removes"
    return ""


def has_long_paths() -> bool:
    """Whether this Windows allows paths of more than 259 characters."""
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"SYSTEM\CurrentControlSet\Control\FileSystem") as key:
                return bool(winreg.QueryValueEx(key, "LongPathsEnabled")[0])
        except OSError:
            return False
    return True


def find_escaped_paths(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    r"""Yield the keys of paths in which TOML has read backslashes as escapes, such as \n in "C:\new", and a way out."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from find_escaped_paths(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from find_escaped_paths(value, (*path, index))
    elif isinstance(data, str) and any(each in data.rstrip("\n") for each in _ESCAPED_CHARACTERS):
        key = next((each for each in reversed(path) if isinstance(each, str)), "")
        if _DRIVE_PATH.fullmatch(data) or _PATH_KEY.fullmatch(key):
            written = "".join(_ESCAPED_CHARACTERS.get(each, each) for each in data)
            yield path, f"write paths with backslashes in single quotes: '{written}'"


def split_words(text: str, *, is_windows: bool = IS_WINDOWS) -> list[str]:
    r"""Split words as the shell of the system does; a backslash of Windows escapes nothing."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    lexer.escape = "" if is_windows else lexer.escape
    return list(lexer)


def join_words(words: Sequence[str], *, is_windows: bool = IS_WINDOWS) -> str:
    """Quote words for the shell of the system; ``split_words`` reads them back."""
    if not is_windows:
        return shlex.join(words)
    return " ".join(_quote_for_windows(word) for word in words)


def _quote_for_windows(word: str) -> str:
    if word and not re.search(r"[\s\"']", word):
        return word
    return "'\"'".join(f'"{part}"' for part in word.split('"'))


def format_path(path: Path | str) -> str:
    """Return a path as a value of TOML: a literal string, whose backslashes are no escapes."""
    text = str(path)
    return f"'{text}'" if "'" not in text else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
