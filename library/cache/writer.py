"""Append entries to a cache; every process writes its own files, so that any number of them can write without locks.

An entry is added to the index only after its bytes are on disk (fsync every ``SYNC_BYTES`` or ``SYNC_SECONDS``), so a
crash leaves unindexed bytes and no broken entries.  After a write error a writer refuses further entries: nothing is
written behind a torn record.
"""

import os
import secrets
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from torch import Tensor

from ..atomic_files import fsync_dir
from ..errors import UserError
from ..problems import report_file
from .format import (
    ENTRY_RECORD,
    RECORD_DTYPE,
    TOMBSTONE_RECORD,
    RecordArray,
    add_checksums,
    build_header,
    serialize_tensors,
)

MAX_SHARD_BYTES = 2**32
SYNC_BYTES = 2**26
SYNC_SECONDS = 2.0
ALIGNMENT = 64


def get_index_path(directory: Path, writer_id: int) -> Path:
    """Return the index file of a writer."""
    return directory / f"{writer_id:016x}.index"


def get_shard_path(directory: Path, writer_id: int, shard_number: int) -> Path:
    """Return a shard of a writer, which holds entries."""
    return directory / f"{writer_id:016x}-{shard_number:04d}.shard"


class CacheWriter:
    """Writes the index and shards of one process in a cache directory; creates them with the first entry."""

    def __init__(
        self,
        directory: Path,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        sync_bytes: int = SYNC_BYTES,
        sync_seconds: float = SYNC_SECONDS,
    ):
        self.directory = directory
        self.max_shard_bytes, self.sync_bytes, self.sync_seconds = max_shard_bytes, sync_bytes, sync_seconds
        self.writer_id = secrets.randbits(64)
        self._index_file: IO[bytes] | None = None
        self._shard_file: IO[bytes] | None = None
        self._shard_number, self._offset = -1, 0
        self._pending_records: list[RecordArray] = []
        self._num_unsynced_bytes, self._last_sync_time = 0, time.monotonic()
        self._has_failed = False

    def __enter__(self) -> "CacheWriter":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def put(self, key: bytes, tensors: Mapping[str, Tensor], name: str) -> None:
        """Add an entry; ``name`` is for messages."""
        self.put_serialized(key, serialize_tensors(tensors), name)

    def put_serialized(self, key: bytes, blob: bytes, name: str) -> None:
        """Add an entry that is serialized already."""
        self._run_or_fail(lambda: self._append_entry(key, blob, name.encode()))

    def drop(self, entries: RecordArray) -> None:
        """Write tombstones for entries of any writer."""
        records = entries.copy()
        records["kind"] = TOMBSTONE_RECORD
        self._run_or_fail(lambda: self._write_index(records))

    def flush(self) -> None:
        """Sync the shard, and add its entries to the index."""
        self._run_or_fail(self._sync)

    def close(self) -> None:
        """Flush, and close the files."""
        try:
            if not self._has_failed:
                self.flush()
        finally:
            for file in (self._shard_file, self._index_file):
                if file is not None:
                    file.close()
            self._shard_file = self._index_file = None

    def _run_or_fail(self, operation: Callable[[], None]) -> None:
        if self._has_failed:
            raise UserError(report_file(self.directory, "not written to after an earlier write error"))
        try:
            operation()
        except OSError as error:
            self._has_failed = True
            raise UserError(
                report_file(
                    self.directory,
                    f"write error: {error.strerror}",
                    "existing entries stay valid; free disk space, or set another directory with --cache_dir",
                )
            ) from None

    def _append_entry(self, key: bytes, blob: bytes, label: bytes) -> None:
        shard = self._open_shard_for(len(blob) + len(label))
        _write_all(shard, blob)
        _write_all(shard, label)
        record = np.zeros(1, RECORD_DTYPE)
        record["key"], record["kind"] = key, ENTRY_RECORD
        record["part"], record["writer"] = self._shard_number, self.writer_id
        record["offset"], record["length"], record["name_length"] = self._offset, len(blob), len(label)
        record["checksum"] = zlib.crc32(label, zlib.crc32(blob))
        self._pending_records.append(record)
        self._offset += len(blob) + len(label)
        self._num_unsynced_bytes += len(blob) + len(label)
        if self._num_unsynced_bytes >= self.sync_bytes or time.monotonic() - self._last_sync_time >= self.sync_seconds:
            self._sync()

    def _open_shard_for(self, length: int) -> IO[bytes]:
        """Return the shard file, at an aligned offset, or a new one if the entry does not fit."""
        if self._shard_file is None or (self._offset and self._offset + length > self.max_shard_bytes):
            self._sync()
            if self._shard_file is not None:
                self._shard_file.close()
            self.directory.mkdir(parents=True, exist_ok=True)
            self._shard_number, self._offset = self._shard_number + 1, 0
            path = get_shard_path(self.directory, self.writer_id, self._shard_number)
            self._shard_file = path.open("xb", buffering=0)
        gap = -self._offset % ALIGNMENT
        _write_all(self._shard_file, bytes(gap))
        self._offset += gap
        return self._shard_file

    def _sync(self) -> None:
        if self._shard_file is not None and self._num_unsynced_bytes:
            os.fsync(self._shard_file.fileno())
        if self._pending_records:
            self._write_index(np.concatenate(self._pending_records))
        self._pending_records = []
        self._num_unsynced_bytes, self._last_sync_time = 0, time.monotonic()

    def _write_index(self, records: RecordArray) -> None:
        if self._index_file is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._index_file = get_index_path(self.directory, self.writer_id).open("xb", buffering=0)
            _write_all(self._index_file, build_header(self.writer_id).tobytes())
            fsync_dir(self.directory)
        _write_all(self._index_file, add_checksums(records).tobytes())
        os.fsync(self._index_file.fileno())


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write all bytes: an unbuffered file may take only some of them."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[file.write(remaining) :]
