"""The door to pyarrow, which is needed for parquet and Arrow files only and may be missing."""

import importlib
import importlib.util
from typing import Any

from ...errors import UserError

INSTALL = "pip install 'pyarrow>=17'"


def is_missing() -> bool:
    """Whether pyarrow is not installed; imports nothing."""
    return importlib.util.find_spec("pyarrow") is None


def parquet_module() -> Any:
    """``pyarrow.parquet``, imported when it is needed."""
    return _imported("pyarrow.parquet")


def arrow_module() -> Any:
    """``pyarrow``, imported when it is needed."""
    return _imported("pyarrow")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"parquet files need pyarrow: {INSTALL} ({error})") from None


def failures() -> tuple[type[Exception], ...]:
    """What reading a broken file raises."""
    exception: type[Exception] = importlib.import_module("pyarrow").ArrowException
    return exception, OSError, ValueError


def first_line(error: Exception) -> str:
    """What went wrong, without pyarrow's own details."""
    return str(error).partition("\n")[0]
