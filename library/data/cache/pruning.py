"""Making a cache smaller: what nobody wants is left behind when the rest of a writer's files moves into new ones."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .records import KeyArray, get_key_bytes
from .store import RowIndices, CacheStore
from .writer import CacheWriter, get_index_path

MIN_IDLE_SECONDS = 60.0
"""Files that changed later than this long ago may still be written to, and are left alone."""


@dataclass(frozen=True)
class WriterFiles:
    """The files of one writer, and which of its entries stay."""

    directory: Path
    writer_id: int
    files: tuple[Path, ...]
    num_bytes: int  # of the files
    num_entries: int  # damaged ones among them
    needed_rows: RowIndices
    is_busy: bool
    tombstoned_writers: frozenset[int]  # other writers, whose damaged entries would be believed again without this one

    @property
    def has_unneeded_entries(self) -> bool:
        """Whether something in it is not wanted."""
        return len(self.needed_rows) < self.num_entries or not self.num_entries


def list_writer_files(store: CacheStore, needed_keys: KeyArray) -> list[WriterFiles]:
    """Each writer's files, with the entries that are found by a wanted key; of several copies one stays."""
    rows = store.find_rows(np.unique(needed_keys))
    stays = np.zeros(len(store), np.bool_)
    stays[rows[rows >= 0]] = True
    found = []
    for writer, index in store.get_index_files().items():
        mine = np.flatnonzero(store.entries["writer"] == np.uint64(writer))
        files = tuple(sorted(index.directory.glob(f"{writer:016x}*")))
        found.append(WriterFiles(index.directory, writer, files, _sum_file_sizes(files), index.num_entries, mine[stays[mine]],
                          _is_recently_modified(files), index.tombstoned_writers))  # fmt: skip
    return found


def select_prunable_files(writer_files: Sequence[WriterFiles]) -> list[WriterFiles]:
    """Those that ``prune`` may be given, in this order: damaged entries go before what says that they are damaged."""
    there = {bulk.writer_id for bulk in writer_files}
    waiting = [bulk for bulk in writer_files if bulk.has_unneeded_entries and not bulk.is_busy]
    ordered: list[WriterFiles] = []
    while ready := [bulk for bulk in waiting if not (bulk.tombstoned_writers - {bulk.writer_id}) & there]:
        ordered += ready
        there -= {bulk.writer_id for bulk in ready}
        waiting = [bulk for bulk in waiting if bulk.writer_id in there]
    return ordered


def find_orphan_files(store: CacheStore) -> list[Path]:
    """Files of writers that were ended before they announced anything, and marks that somebody left behind."""
    known = {f"{writer:016x}" for writer in store.get_index_files()}
    paths = [path for folder in store.directories if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    left = [path for path in paths if path.name.startswith((".here-", ".writable-"))
            or (path.suffix == ".shard" and path.name.partition("-")[0] not in known)]  # fmt: skip
    return [path for path in left if not _is_recently_modified([path])]


def prune_writer_files(store: CacheStore, files: WriterFiles) -> None:
    """Move the entries that stay, then remove the writer's files; whoever reads them goes on reading."""
    with CacheWriter(files.directory) as writer:
        for row in files.needed_rows.tolist():
            if store.is_intact(row):
                key = get_key_bytes(store.entries["key"][row])
                writer.put_serialized(key, store.read_blob(row).tobytes(), store.read_name(row))
    index = get_index_path(files.directory, files.writer_id)
    for path in (index, *(path for path in files.files if path != index)):
        path.unlink(missing_ok=True)


def _sum_file_sizes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _is_recently_modified(files: Iterable[Path]) -> bool:
    return any(time.time() - path.stat().st_mtime < MIN_IDLE_SECONDS for path in files)
