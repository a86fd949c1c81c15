"""The text of a file that a user wrote; what keeps it from being read is told as a mistake in the settings."""

from pathlib import Path

from ..errors import ConfigError


def read_text_file(path: Path) -> str:
    """UTF-8, with a byte order mark or without."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file (looked in {path.resolve().parent})"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
