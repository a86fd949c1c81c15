"""Reading a cache: which entries there are, and their bytes straight from the files, as far as they are asked for."""

import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError
from .blobs import Bytes
from .records import DROPPED, ENTRY, RECORD, Keys, Records, is_header, sound
from .writer import index_path, shard_path

Rows = NDArray[np.int64]
"""Positions in ``Store.entries``; -1 where there is no entry."""

MOST_THREADS = 8
_EMPTY = np.zeros(0, RECORD)


@dataclass
class IndexFile:
    """What one writer announced."""

    folder: Path
    read: int = 0  # bytes
    is_ours: bool = True
    entries: int = 0  # that it ever announced
    dropped_from: frozenset[int] = frozenset()  # writers of whose entries it said that they are damaged


class Store:
    """The entries of several cache folders together, as they were at the last ``refresh``."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = tuple(dict.fromkeys(folders))
        self.entries: Records = _EMPTY
        self._announced: list[Records] = []
        self._files: dict[int, IndexFile] = {}  # by writer
        self._maps: dict[tuple[int, int], Bytes] = {}
        self._first: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._order: Rows = np.zeros(0, np.int64)
        self.refresh()

    def __len__(self) -> int:
        return len(self.entries)

    def refresh(self) -> bool:
        """Look for what was announced since the last time; whether there was anything.

        Rows that were found before are not valid any more when there was.
        """
        fresh = [records for writer, path in self._indexes() if len(records := self._news(writer, path))]
        if not fresh:
            return False
        self._announced += fresh
        self.entries = self._usable(np.concatenate(self._announced))
        halves = _halves(self.entries["key"])
        self._order = np.argsort(halves[:, 0], kind="stable")
        self._first = halves[self._order, 0]
        return True

    def find(self, keys: Keys) -> Rows:
        """Where the entries with these keys are."""
        rows = np.full(len(keys), -1, np.int64)
        if not len(self.entries) or not len(keys):
            return rows
        wanted, there = _halves(keys), _halves(self.entries["key"])
        at = np.searchsorted(self._first, wanted[:, 0])
        open_ones = np.flatnonzero(at < len(self._first))
        while len(open_ones):  # once, but for keys whose first halves are alike
            places = at[open_ones]
            candidates = self._order[places]
            alike = self._first[places] == wanted[open_ones, 0]
            hit = alike & (there[candidates, 1] == wanted[open_ones, 1])
            rows[open_ones[hit]] = candidates[hit]
            open_ones = open_ones[alike & ~hit]
            at[open_ones] += 1
            open_ones = open_ones[at[open_ones] < len(self._first)]
        return rows

    def blob(self, row: int) -> Bytes:
        """The tensors of an entry, as bytes that lie in the file."""
        entry = self.entries[row]
        return self._span(entry, int(entry["length"]))

    def name(self, row: int) -> str:
        """What the entry was called when it was written."""
        entry = self.entries[row]
        whole = self._span(entry, int(entry["length"]) + int(entry["name_length"]))
        return whole[int(entry["length"]) :].tobytes().decode(errors="replace")

    def is_right(self, row: int) -> bool:
        """Whether the bytes are those that were written."""
        entry = self.entries[row]
        whole = self._span(entry, int(entry["length"]) + int(entry["name_length"]))
        return zlib.crc32(whole.data) == int(entry["checksum"])

    def damaged(self, rows: Iterable[int]) -> list[int]:
        """Those of the rows whose bytes are not what was written; several at a time."""
        rows = list(rows)
        for row in rows:  # mapped here, so that the threads only read
            self.blob(row)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
            right = list(pool.map(self.is_right, rows, chunksize=64))
        return [row for row, is_right in zip(rows, right, strict=True) if not is_right]

    def open_all(self) -> None:
        """Open the files of all entries, so that they can be read even when the files' names are taken away."""
        for row in np.unique(self.entries[["writer", "part"]], return_index=True)[1].tolist():
            self.blob(row)

    def folder_of(self, row: int) -> Path:
        """The cache folder that an entry is in."""
        return self._files[int(self.entries["writer"][row])].folder

    def writers(self) -> dict[int, IndexFile]:
        """Everybody who announced something, and what."""
        return {writer: file for writer, file in self._files.items() if file.is_ours}

    def _indexes(self) -> Iterable[tuple[int, Path]]:
        for folder in self.folders:
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
                self._files.setdefault(writer, IndexFile(folder))
                yield writer, folder

    def _news(self, writer: int, folder: Path) -> Records:
        """The whole and sound records that an index file got since the last time."""
        file = self._files[writer]
        try:
            with index_path(folder, writer).open("rb") as opened:
                opened.seek(file.read)
                data = opened.read()
        except OSError:  # pruned a moment ago
            return _EMPTY
        records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
        if not len(records):
            return _EMPTY
        if file.read == 0:
            file.is_ours = is_header(records) and int(records["writer"][0]) == writer
        file.read += records.nbytes
        records = records[sound(records)] if file.is_ours else _EMPTY
        file.entries += int((records["kind"] == ENTRY).sum())
        file.dropped_from |= set(records["writer"][records["kind"] == DROPPED].tolist())
        return records

    def _usable(self, records: Records) -> Records:
        """Entries that nobody dropped and whose shards are long enough to hold them."""
        entries: Records = records[records["kind"] == ENTRY]
        dropped = records[records["kind"] == DROPPED]
        if len(dropped):
            gone = np.isin(_places(entries), _places(dropped))
            entries = entries[~gone]
        if not len(entries):
            return entries
        ends = entries["offset"] + entries["length"] + entries["name_length"]
        writers, which = np.unique(entries["writer"], return_inverse=True)
        places = which * (int(entries["part"].max()) + 1) + entries["part"]
        first, shard = np.unique(places, return_index=True, return_inverse=True)[1:]
        sizes = [self._size(int(writers[which[row]]), int(entries["part"][row])) for row in first]
        usable: Records = entries[ends <= np.array(sizes, np.uint64)[shard]]
        return usable

    def _size(self, writer: int, part: int) -> int:
        try:
            return shard_path(self._files[writer].folder, writer, part).stat().st_size
        except OSError:
            return 0

    def _span(self, entry: np.void, length: int) -> Bytes:
        place, first = (int(entry["writer"]), int(entry["part"])), int(entry["offset"])
        mapped = self._maps.get(place)
        if mapped is None or len(mapped) < first + length:  # it has grown since
            mapped = self._maps[place] = self._map(*place)
        if len(mapped) < first + length:
            raise UserError(f"{self._files[place[0]].folder}: a file has become shorter; start again, and what is"
                            " missing is made anew")  # fmt: skip
        return mapped[first : first + length]

    def _map(self, writer: int, part: int) -> Bytes:
        path = shard_path(self._files[writer].folder, writer, part)
        try:
            with path.open("rb") as file:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise UserError(f"{path} cannot be read: {error}") from None


def _halves(keys: Keys) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)


def _places(records: Records) -> NDArray[np.void]:
    """Where entries lie, as one value each."""
    place = np.zeros(len(records), [("writer", "<u8"), ("part", "<u8"), ("offset", "<u8")])
    for name in ("writer", "part", "offset"):
        place[name] = records[name]
    return place.view("V24")
