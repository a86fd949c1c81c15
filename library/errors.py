"""Exceptions that end a run, and how errors are reported to the user."""

import platform
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from . import __version__
from .problems import Problem, dedupe_problems

MAX_MESSAGE_LENGTH = 400


class UserError(Exception):
    """An error that the user can fix; printed without a traceback. The message says what, where, and how."""

    is_reported = False
    """Whether another rank has printed it."""

    def __init__(self, *problems: Problem | str):
        super().__init__(*problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))

    @property
    def problems(self) -> list[Problem]:
        """What is wrong; a message that was given as text is a problem without option and place."""
        return [each if isinstance(each, Problem) else Problem("", str(each)) for each in self.args]


class CrashError(Exception):
    """An unexpected error; the message says what, where, what was saved, and what to do."""

    is_reported = False


class RunInterrupted(Exception):
    """A signal ended the run after a complete step; the message says what was saved and how to resume."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class ConfigError(UserError):
    """Invalid settings: all problems, one line each."""

    def __init__(self, problems: Iterable[Problem]):
        super().__init__(*dedupe_problems(problems))

    def __reduce__(self) -> tuple[type, tuple[list[Problem]]]:
        """Pickle the problems as one argument, where ``Exception`` would pass each of them to ``__init__``."""
        return type(self), (self.problems,)


class FileError(ConfigError):
    """Files of the user that cannot be read or written, or whose content does not fit the run, found while using them.

    Settings are checked before, by the lists in ``training/preflight.py``.
    """


def format_error(error: BaseException) -> str:
    """Format the type and the first line of the message."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:MAX_MESSAGE_LENGTH]}" if first else type(error).__name__


def take_first_line(error: BaseException) -> str:
    """Return the first line of a message of another library that says something, or the type of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def write_traceback(error: BaseException, path: Path) -> str:
    """Write the traceback to a file; return a sentence that says where it is, or the traceback if writing fails."""
    text = "".join(traceback.format_exception(error))
    versions = f"lorikeet {__version__}, Python {platform.python_version()}, {sys.platform}\n"
    try:
        path.write_text(versions + text, "utf-8", "backslashreplace")
    except OSError as failure:
        return f"the traceback cannot be written to {path} ({failure.strerror}):\n{text}"
    return f"the traceback is in {path}"
