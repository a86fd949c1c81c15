"""Read a cache: find entries by key through the index files, and map their bytes from the shards."""

import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..problems import report_file
from .format import (
    ENTRY_RECORD,
    RECORD_DTYPE,
    TOMBSTONE_RECORD,
    ByteArray,
    RecordArray,
    is_valid_header,
    verify_checksums,
)
from .keys import KeyArray
from .writer import get_index_path, get_shard_path

RowIndices = NDArray[np.int64]
"""Positions in ``CacheStore.entries``; -1 where there is no entry."""

MAX_THREADS = 8
_NO_RECORDS = np.zeros(0, RECORD_DTYPE)


@dataclass
class IndexFile:
    """The part of one writer's index that has been read."""

    directory: Path
    num_bytes_read: int = 0
    is_valid: bool = True
    num_entries: int = 0  # ever written, damaged ones included
    tombstoned_writers: frozenset[int] = frozenset()  # writers of entries it marked as damaged


class CacheStore:
    """The entries of several cache directories, as of the last ``refresh``."""

    def __init__(self, directories: Sequence[Path]):
        self.directories = tuple(dict.fromkeys(directories))
        self.entries: RecordArray = _NO_RECORDS
        self._records: list[RecordArray] = []
        self._index_files: dict[int, IndexFile] = {}  # the index file of each writer
        self._mmaps: dict[tuple[int, int], ByteArray] = {}
        self._sorted_key_prefixes: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._sort_order: RowIndices = np.zeros(0, np.int64)
        self.refresh()

    def __len__(self) -> int:
        return len(self.entries)

    def refresh(self) -> bool:
        """Read new index records; return whether there were any, in which case earlier rows are invalid."""
        fresh = [
            records for writer, path in self._iter_index_files() if len(records := self._read_new_records(writer, path))
        ]
        if not fresh:
            return False
        self._records += fresh
        self.entries = self._filter_usable(np.concatenate(self._records))
        halves = _split_keys(self.entries["key"])
        self._sort_order = np.argsort(halves[:, 0], kind="stable")
        self._sorted_key_prefixes = halves[self._sort_order, 0]
        return True

    def find_rows(self, keys: KeyArray) -> RowIndices:
        """Find the entries with these keys."""
        rows = np.full(len(keys), -1, np.int64)
        if not len(self.entries) or not len(keys):
            return rows
        halves, entry_halves = _split_keys(keys), _split_keys(self.entries["key"])
        positions = np.searchsorted(self._sorted_key_prefixes, halves[:, 0])
        pending = np.flatnonzero(positions < len(self._sorted_key_prefixes))
        while len(pending):  # one pass, unless keys share their first half
            candidates = self._sort_order[positions[pending]]
            same_prefix = self._sorted_key_prefixes[positions[pending]] == halves[pending, 0]
            hit = same_prefix & (entry_halves[candidates, 1] == halves[pending, 1])
            rows[pending[hit]] = candidates[hit]
            pending = pending[same_prefix & ~hit]
            positions[pending] += 1
            pending = pending[positions[pending] < len(self._sorted_key_prefixes)]
        return rows

    def read_blob(self, row: int) -> ByteArray:
        """Return the tensors of an entry as bytes mapped from the file."""
        entry = self.entries[row]
        return self._read_span(entry, int(entry["length"]))

    def read_name(self, row: int) -> str:
        """Return the name the entry was written with."""
        return self._read_blob_and_name(row)[int(self.entries[row]["length"]) :].tobytes().decode(errors="replace")

    def is_intact(self, row: int) -> bool:
        """Whether the checksum of the entry is right."""
        return zlib.crc32(self._read_blob_and_name(row).data) == int(self.entries[row]["checksum"])

    def _read_blob_and_name(self, row: int) -> ByteArray:
        entry = self.entries[row]
        return self._read_span(entry, int(entry["length"]) + int(entry["name_length"]))

    def find_damaged(self, rows: Iterable[int]) -> list[int]:
        """Return the rows whose checksum is wrong; several threads read."""
        rows = list(rows)
        for row in rows:  # mapped here, so that the threads only read
            self.read_blob(row)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
            intact = list(pool.map(self.is_intact, rows, chunksize=64))
        return [row for row, is_intact in zip(rows, intact, strict=True) if not is_intact]

    def open_all_shards(self) -> None:
        """Map all shards, so that they stay readable after the files are deleted."""
        for row in np.unique(self.entries[["writer", "part"]], return_index=True)[1].tolist():
            self.read_blob(row)

    def close_shards(self, writer: int) -> None:
        """Unmap the shards of a writer, which Windows does not delete otherwise; blobs of them must not be used."""
        self._mmaps = {shard: mapped for shard, mapped in self._mmaps.items() if shard[0] != writer}

    def get_directory(self, row: int) -> Path:
        """Return the cache directory of an entry."""
        return self._index_files[int(self.entries["writer"][row])].directory

    def get_index_files(self) -> dict[int, IndexFile]:
        """Return the valid index files by writer."""
        return {writer: file for writer, file in self._index_files.items() if file.is_valid}

    def _iter_index_files(self) -> Iterable[tuple[int, Path]]:
        for folder in self.directories:
            try:
                names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".index"))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise UserError(f"{folder} cannot be read: {error.strerror}") from None
            for name in names:
                try:
                    writer = int(name.removesuffix(".index"), 16)
                except ValueError:
                    continue
                self._index_files.setdefault(writer, IndexFile(folder))
                yield writer, folder

    def _read_new_records(self, writer_id: int, directory: Path) -> RecordArray:
        """Read the complete and intact records that were appended since the last time."""
        file = self._index_files[writer_id]
        try:
            with get_index_path(directory, writer_id).open("rb") as opened:
                opened.seek(file.num_bytes_read)
                data = opened.read()
        except OSError:  # pruned a moment ago
            return _NO_RECORDS
        records = np.frombuffer(data[: len(data) // RECORD_DTYPE.itemsize * RECORD_DTYPE.itemsize], RECORD_DTYPE)
        if not len(records):
            return _NO_RECORDS
        if file.num_bytes_read == 0:
            file.is_valid = is_valid_header(records) and int(records["writer"][0]) == writer_id
        file.num_bytes_read += records.nbytes
        records = records[verify_checksums(records)] if file.is_valid else _NO_RECORDS
        file.num_entries += int((records["kind"] == ENTRY_RECORD).sum())
        file.tombstoned_writers |= set(records["writer"][records["kind"] == TOMBSTONE_RECORD].tolist())
        return records

    def _filter_usable(self, records: RecordArray) -> RecordArray:
        """Keep entries without a tombstone whose shards are long enough."""
        entries: RecordArray = records[records["kind"] == ENTRY_RECORD]
        dropped = records[records["kind"] == TOMBSTONE_RECORD]
        if len(dropped):
            entries = entries[~np.isin(_compute_locations(entries), _compute_locations(dropped))]
        if not len(entries):
            return entries
        ends = entries["offset"] + entries["length"] + entries["name_length"]
        writers, which = np.unique(entries["writer"], return_inverse=True)
        shards = which * (int(entries["part"].max()) + 1) + entries["part"]
        first, shard = np.unique(shards, return_index=True, return_inverse=True)[1:]
        sizes = [self._get_shard_size(int(writers[which[row]]), int(entries["part"][row])) for row in first]
        usable: RecordArray = entries[ends <= np.array(sizes, np.uint64)[shard]]
        return usable

    def _get_shard_size(self, writer_id: int, shard_number: int) -> int:
        try:
            return get_shard_path(self._index_files[writer_id].directory, writer_id, shard_number).stat().st_size
        except OSError:
            return 0

    def _read_span(self, entry: np.void, length: int) -> ByteArray:
        shard, start = (int(entry["writer"]), int(entry["part"])), int(entry["offset"])
        mapped = self._mmaps.get(shard)
        if mapped is None or len(mapped) < start + length:  # the shard has grown since
            mapped = self._mmaps[shard] = self._map_shard(*shard)
        if len(mapped) < start + length:
            raise UserError(
                report_file(
                    self._index_files[shard[0]].directory,
                    "a cache file was truncated",
                    "start again to encode the missing entries",
                )
            )
        return mapped[start : start + length]

    def _map_shard(self, writer_id: int, shard_number: int) -> ByteArray:
        path = get_shard_path(self._index_files[writer_id].directory, writer_id, shard_number)
        try:
            with path.open("rb") as file:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise UserError(f"{path} cannot be read: {error}") from None


def _split_keys(keys: KeyArray) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)


def _compute_locations(records: RecordArray) -> NDArray[np.void]:
    """Pack writer, shard and offset of each entry into one comparable value."""
    locations = np.zeros(len(records), [("writer", "<u8"), ("part", "<u8"), ("offset", "<u8")])
    for name in ("writer", "part", "offset"):
        locations[name] = records[name]
    return locations.view("V24")
