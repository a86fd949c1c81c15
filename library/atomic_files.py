"""Write files atomically, make them durable, hash them, and find out whether a directory is writable."""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FileEntry = Mapping[str, Any]
"""The size and the SHA-256 of a file."""

_READ_CHUNK_BYTES = 2**24
_IN_USE_SECONDS, _RETRY_SECONDS = 3.0, 0.05


@contextmanager
def open_atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; it replaces ``path`` on success and is removed on failure."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}-{os.urandom(4).hex()}{path.suffix}")
    try:
        yield temporary
        replace_path(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_path(source: Path, target: Path) -> None:
    """Give a file or folder its final name; a file that is there already is replaced.

    Windows refuses it while another process, such as a reader of the target or a virus scanner, has one of them open,
    which lasts a moment: it is tried again for some seconds.  A file that this process has open or mapped is refused
    for as long.
    """
    deadline = time.monotonic() + _IN_USE_SECONDS
    while True:
        try:
            return os.replace(source, target)
        except PermissionError:
            if not _refuses_files_in_use() or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _refuses_files_in_use() -> bool:
    """Whether this system removes and renames no file that is open; elsewhere a refusal lasts."""
    return os.name == "nt"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that readers see either the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic_path(path) as temporary:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def compute_sha256(file: Path) -> str:
    """Hash a file of any size."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def describe_file(path: Path) -> FileEntry:
    """Return the size and the SHA-256 of a file."""
    return {"size": path.stat().st_size, "sha256": compute_sha256(path)}


def fsync_file(path: Path) -> None:
    """Flush the content of a file to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def fsync_dir(path: Path) -> None:
    """Flush the names in a directory to disk, where the operating system can."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def find_write_error(directory: Path) -> str | None:
    """Return why no file can be created in ``directory`` (created if missing), or None."""
    probe = directory / f".writable-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None
