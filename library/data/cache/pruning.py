"""Making a cache smaller: what nobody wants is left behind when the rest of a writer's files moves into new ones."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .records import Keys, as_bytes
from .store import Rows, Store
from .writer import Writer, index_path

SECONDS_OF_REST = 60.0
"""Files that changed later than this long ago may still be written to, and are left alone."""


@dataclass(frozen=True)
class Bulk:
    """The files of one writer, and which of its entries stay."""

    folder: Path
    writer: int
    files: tuple[Path, ...]
    size: int  # of the files
    entries: int  # damaged ones among them
    stay: Rows
    is_busy: bool
    dropped_from: frozenset[int]  # other writers, whose damaged entries would be believed again without this one

    @property
    def is_wasteful(self) -> bool:
        """Whether something in it is not wanted."""
        return len(self.stay) < self.entries or not self.entries


def bulks(store: Store, wanted: Keys) -> list[Bulk]:
    """Each writer's files, with the entries that are found by a wanted key; of several copies one stays."""
    rows = store.find(np.unique(wanted))
    stays = np.zeros(len(store), np.bool_)
    stays[rows[rows >= 0]] = True
    found = []
    for writer, index in store.writers().items():
        mine = np.flatnonzero(store.entries["writer"] == np.uint64(writer))
        files = tuple(sorted(index.folder.glob(f"{writer:016x}*")))
        found.append(Bulk(index.folder, writer, files, _size(files), index.entries, mine[stays[mine]],
                          _is_busy(files), index.dropped_from))  # fmt: skip
    return found


def removable(found: Sequence[Bulk]) -> list[Bulk]:
    """Those that ``prune`` may be given, in this order: damaged entries go before what says that they are damaged."""
    there = {bulk.writer for bulk in found}
    waiting = [bulk for bulk in found if bulk.is_wasteful and not bulk.is_busy]
    ordered: list[Bulk] = []
    while ready := [bulk for bulk in waiting if not (bulk.dropped_from - {bulk.writer}) & there]:
        ordered += ready
        there -= {bulk.writer for bulk in ready}
        waiting = [bulk for bulk in waiting if bulk.writer in there]
    return ordered


def orphans(store: Store) -> list[Path]:
    """Files of writers that were ended before they announced anything, and marks that somebody left behind."""
    known = {f"{writer:016x}" for writer in store.writers()}
    paths = [path for folder in store.folders if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    left = [path for path in paths if path.name.startswith((".here-", ".writable-"))
            or (path.suffix == ".shard" and path.name.partition("-")[0] not in known)]  # fmt: skip
    return [path for path in left if not _is_busy([path])]


def prune(store: Store, bulk: Bulk) -> None:
    """Move the entries that stay, then remove the writer's files; whoever reads them goes on reading."""
    with Writer(bulk.folder) as writer:
        for row in bulk.stay.tolist():
            if store.is_right(row):
                key = as_bytes(store.entries["key"][row])
                writer.put_packed(key, store.blob(row).tobytes(), store.name(row))
    index = index_path(bulk.folder, bulk.writer)
    for path in (index, *(path for path in bulk.files if path != index)):
        path.unlink(missing_ok=True)


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _is_busy(files: Iterable[Path]) -> bool:
    return any(time.time() - path.stat().st_mtime < SECONDS_OF_REST for path in files)
