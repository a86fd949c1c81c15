"""Adding entries to a cache: files of one's own, append only, so that any number of processes write at once.

Nothing is locked and nobody waits.  An entry is announced in the index only after its bytes were handed to the disk
(fsync), which happens every ``SYNC_BYTES`` or ``SYNC_SECONDS``; whatever ends the program or the machine in between
leaves entries that nobody announced, and those are no entries.  A writer whose disk is full stops at once and for good:
nothing is ever written behind a torn record.
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

from ...errors import UserError
from .blobs import packed
from .records import DROPPED, ENTRY, RECORD, Records, header, sealed

SHARD_BYTES = 2**32
SYNC_BYTES = 2**26
SYNC_SECONDS = 2.0
ALIGNMENT = 64


def index_path(folder: Path, writer: int) -> Path:
    """Where a writer announces its entries."""
    return folder / f"{writer:016x}.index"


def shard_path(folder: Path, writer: int, part: int) -> Path:
    """Where a writer keeps the entries themselves."""
    return folder / f"{writer:016x}-{part:04d}.shard"


class Writer:
    """One process's own files in a cache folder, made when there is something to write."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES, sync_bytes: int = SYNC_BYTES,
                 sync_seconds: float = SYNC_SECONDS):  # fmt: skip
        self.folder = folder
        self.shard_bytes, self.sync_bytes, self.sync_seconds = shard_bytes, sync_bytes, sync_seconds
        self.writer = secrets.randbits(64)
        self._index: IO[bytes] | None = None
        self._shard: IO[bytes] | None = None
        self._part, self._offset = -1, 0
        self._waiting: list[Records] = []
        self._unsynced, self._synced_at = 0, time.monotonic()
        self._is_broken = False

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def put(self, key: bytes, tensors: Mapping[str, Tensor], name: str) -> None:
        """Keep ``tensors`` under ``key``; ``name`` is what messages call the entry."""
        self.put_packed(key, packed(tensors), name)

    def put_packed(self, key: bytes, blob: bytes, name: str) -> None:
        """The same for tensors that are in one piece already."""
        self._act(lambda: self._append(key, blob, name.encode()))

    def drop(self, entries: Records) -> None:
        """Say of entries, whoever wrote them, that they are not to be used any more."""
        records = entries.copy()
        records["kind"] = DROPPED
        self._act(lambda: self._announce(records))

    def flush(self) -> None:
        """Hand everything to the disk, and announce it."""
        self._act(self._sync)

    def close(self) -> None:
        """Flush, and close the files."""
        try:
            if not self._is_broken:
                self.flush()
        finally:
            for file in (self._shard, self._index):
                if file is not None:
                    file.close()
            self._shard = self._index = None

    def _act(self, work: Callable[[], None]) -> None:
        if self._is_broken:
            raise UserError(f"{self.folder}: could not be written to before, and is not tried again")
        try:
            work()
        except OSError as error:
            self._is_broken = True
            raise UserError(
                f"{self.folder} cannot be written to: {error.strerror}; the entries that are there already stay and"
                " will be used; make room, or name another folder with --cache_dir"
            ) from None

    def _append(self, key: bytes, blob: bytes, label: bytes) -> None:
        shard = self._room_for(len(blob) + len(label))
        _write(shard, blob)
        _write(shard, label)
        record = np.zeros(1, RECORD)
        record["key"], record["kind"], record["part"], record["writer"] = key, ENTRY, self._part, self.writer
        record["offset"], record["length"], record["name_length"] = self._offset, len(blob), len(label)
        record["checksum"] = zlib.crc32(label, zlib.crc32(blob))
        self._waiting.append(record)
        self._offset += len(blob) + len(label)
        self._unsynced += len(blob) + len(label)
        if self._unsynced >= self.sync_bytes or time.monotonic() - self._synced_at >= self.sync_seconds:
            self._sync()

    def _room_for(self, length: int) -> IO[bytes]:
        """The shard, at a place where an entry may begin."""
        if self._shard is None or (self._offset and self._offset + length > self.shard_bytes):
            self._sync()
            if self._shard is not None:
                self._shard.close()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._part, self._offset = self._part + 1, 0
            self._shard = shard_path(self.folder, self.writer, self._part).open("xb", buffering=0)
        gap = -self._offset % ALIGNMENT
        _write(self._shard, bytes(gap))
        self._offset += gap
        return self._shard

    def _sync(self) -> None:
        if self._shard is not None and self._unsynced:
            os.fsync(self._shard.fileno())
        if self._waiting:
            self._announce(np.concatenate(self._waiting))
        self._waiting = []
        self._unsynced, self._synced_at = 0, time.monotonic()

    def _announce(self, records: Records) -> None:
        if self._index is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._index = index_path(self.folder, self.writer).open("xb", buffering=0)
            _write(self._index, header(self.writer).tobytes())
            _sync_names(self.folder)
        _write(self._index, sealed(records).tobytes())
        os.fsync(self._index.fileno())


def _write(file: IO[bytes], data: bytes) -> None:
    """All of it: a system may take a part and say so."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_names(folder: Path) -> None:
    """That the files are there survives a power cut, too, where a system can promise it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
