"""The errors a user can cause; the command line shows them as plain lines, without a traceback."""

import platform
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from . import __version__


class UserError(Exception):
    """Something outside our code has to change; the message says what, where, and how."""

    is_reported = False
    """Whether another process tells it, so that the user does not read it once for each process."""


class CrashError(Exception):
    """An error that nobody foresaw ended the run; the message says what, where, what was kept, and what to do."""

    is_reported = False
    """As for ``UserError``."""


class RunInterrupted(Exception):
    """A signal ended the run after a whole step; the message says what was kept and how to go on."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class ConfigError(UserError):
    """The settings are wrong: one line for each problem, all of them together."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        """An exception is sent to other processes by what it was made from, and that is not its text."""
        return type(self), (self.problems,)


MAX_MESSAGE_LENGTH = 400


def format_error(error: BaseException) -> str:
    """Its kind and the first line of what it says."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:MAX_MESSAGE_LENGTH]}" if first else type(error).__name__


def write_traceback(error: BaseException, path: Path) -> str:
    """Where the traceback is now, as a sentence; when no file can be written, it follows itself."""
    text = "".join(traceback.format_exception(error))
    versions = f"lorikeet {__version__}, Python {platform.python_version()}, {sys.platform}\n"
    try:
        path.write_text(versions + text, "utf-8", "backslashreplace")
    except OSError as failure:
        return f"the traceback cannot be written to {path} ({failure.strerror}):\n{text}"
    return f"the traceback is in {path}"
