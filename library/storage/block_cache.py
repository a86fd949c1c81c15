"""A folder of bounded size with blocks of remote files, shared by any number of processes.

Each block is one file with its checksum, written under another name first, so that nothing half-written is ever read.
The blocks that were not used for the longest time are deleted.
"""

import hashlib
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..atomic_files import replace_path

logger = logging.getLogger(__name__)
_CHECKSUM_BYTES = 4
_FILL_AFTER_DELETING = 0.9
"""The fraction of the limit that remains in the folder after the oldest files have been deleted."""

_CHECKS_PER_LIMIT = 200
"""The folder is measured again after each writer has added this part of the limit."""

_MIN_FREE_PART, _MIN_FREE_BYTES = 0.02, 10 * 2**30
"""The space of the disk that is left to others: the smaller of the two, as 2 % of a cluster's disk is too much."""

_ABANDONED_SECONDS = 3600
"""Unfinished files of writers that were killed are deleted after this."""


class BlockCache:
    """Blocks of bytes by key, on disk."""

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit = directory, limit
        self._added: int | None = None  # bytes since the folder was measured; None: never
        self.is_failing = False
        self._has_room = True

    def _get_path(self, key: str) -> Path:
        name = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        return self.directory / name[:2] / name[2:]

    def read(self, key: str) -> bytes | None:
        """Return a block, or None if it is missing or damaged."""
        path = self._get_path(key)
        try:
            data = path.read_bytes()
            if len(data) < _CHECKSUM_BYTES or zlib.crc32(data[:-_CHECKSUM_BYTES]) != _read_checksum(data):
                path.unlink(missing_ok=True)
                return None
        except OSError:
            return None
        with suppress(OSError):  # of another user
            os.utime(path)  # the blocks used last are kept
        return data[:-_CHECKSUM_BYTES]

    def contains(self, key: str) -> bool:
        """Whether there is such a block; it may be damaged."""
        return self._get_path(key).exists()

    def write(self, key: str, data: bytes) -> None:
        """Write a block; without space it is not kept, with a warning."""
        if len(data) > self.limit:
            return
        if not self._make_room(len(data)):
            return self._report_failure("the disk is nearly full")
        path = self._get_path(key)
        temporary = path.with_name(f".{path.name}-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(data)
                file.write(zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little"))
            replace_path(temporary, path)
            self.is_failing = False
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._added = None  # measured again, and trimmed to what the disk has
            self._report_failure(error.strerror or str(error))

    def _report_failure(self, reason: str) -> None:
        if not self.is_failing:
            self.is_failing = True
            logger.warning(
                "%s: remote files cannot be kept here (%s) and are read from the server each time; free disk space,"
                " or set another folder with --remote_cache_dir",
                self.directory,
                reason,
            )

    def _make_room(self, num_bytes: int) -> bool:
        """Delete old blocks now and then, in one process at a time; return whether the disk has room."""
        if self._added is not None and self._added + num_bytes < self.limit // _CHECKS_PER_LIMIT:
            self._added += num_bytes
            return self._has_room
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with FileLock(self.directory / ".lock", timeout=0):
                self._has_room = self._delete_oldest(num_bytes)
        except (OSError, Timeout):  # another process is deleting; a folder that cannot be written is reported by write
            pass
        self._added = num_bytes
        return self._has_room

    def _delete_oldest(self, num_bytes: int) -> bool:
        files = [file for file in _iter_files(self.directory) if not _delete_if_abandoned(*file)]
        total = sum(size for _, size, _ in files)
        disk = shutil.disk_usage(self.directory)
        reserved = min(int(_MIN_FREE_PART * disk.total), _MIN_FREE_BYTES)
        allowed = min(self.limit, total + disk.free - reserved)
        if total + num_bytes <= allowed:
            return True
        for _, size, path in sorted(files):
            if total + num_bytes <= max(0, _FILL_AFTER_DELETING * allowed):
                break
            if not os.path.basename(path).startswith("."):
                with suppress(OSError):
                    os.unlink(path)
                total -= size
        return num_bytes <= allowed


def _read_checksum(data: bytes) -> int:
    return int.from_bytes(data[-_CHECKSUM_BYTES:], "little")


def _iter_files(directory: Path) -> Iterator[tuple[float, int, str]]:
    """Yield time of last use, size and path of each file."""
    with os.scandir(directory) as folders:
        names = [entry.path for entry in folders if len(entry.name) == 2]
    for name in names:
        with suppress(OSError), os.scandir(name) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat()
                    yield status.st_mtime, status.st_size, entry.path


def _delete_if_abandoned(used: float, size: int, path: str) -> bool:
    """Delete the unfinished file of a writer that was killed."""
    if not os.path.basename(path).startswith(".") or time.time() - used < _ABANDONED_SECONDS:
        return False
    with suppress(OSError):
        os.unlink(path)
    return True
