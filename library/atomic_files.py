"""The content of large files as a hash, computed once and remembered by path, size and times of change."""

import hashlib
import os
from pathlib import Path

_READ_CHUNK_BYTES = 2**24


def compute_sha256(file: Path) -> str:
    """SHA-256 of what is in a file, however large it is."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fsync_file(path: Path) -> None:
    """The contents of a file."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def fsync_dir(path: Path) -> None:
    """The names in a folder, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def find_write_error(directory: Path) -> str | None:
    """What keeps files from being made in ``folder``, which is made if need be; nothing where all is well."""
    probe = directory / f".writable-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None
