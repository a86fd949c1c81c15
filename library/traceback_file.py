"""An error that nobody foresaw, for two readers: a sentence for the user, and a file for whoever repairs it."""

import platform
import sys
import traceback
from pathlib import Path

from . import __version__

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
