"""Filling a cache: what is missing or damaged is made, by all processes together, and found by all of them after."""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..data.cache.places import check_disk_space, check_writable, format_bytes
from ..data.cache.records import KeyArray, get_key_bytes
from ..data.cache.store import CacheStore
from ..data.cache.writer import CacheWriter
from ..distributed.strategy import Strategy
from ..errors import UserError
from .sharing import WorkPartition, SharedProgress, partition_by_shared_disk, track_shared_progress

logger = logging.getLogger(__name__)

VISIBILITY_TIMEOUT_SECONDS = 60.0
"""How long a shared disk may take to show what another machine wrote."""
REFRESH_INTERVAL_SECONDS = 2.0
MAX_NAMES_SHOWN = 5

EntryIndices = NDArray[np.int64]
"""Which of the wanted entries."""


@dataclass(frozen=True)
class EncodedEntry:
    """One entry, made."""

    index: int
    tensors: dict[str, Tensor]
    name: str  # in messages


@dataclass(frozen=True)
class CacheSpec:
    """What is to be in a cache, and where."""

    name: str  # "latents"
    unit: str  # "picture"
    option: str  # the option that asks for it, for messages
    keys: KeyArray
    directories: Sequence[Path]  # of each key
    relative_sizes: Sequence[int]  # how much room each takes compared with the others
    disk_full_hint: str  # what to do when there is too little room


class CacheEncoder(Protocol):
    """Makes entries; loads what it needs for that when the first is asked for."""

    failures: dict[int, str]
    """What could not be made, and why."""

    def make_batches(self, indices: Sequence[int]) -> list[list[int]]:
        """The entries with these numbers, in portions that are made at once."""

    def encode_batches(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[EncodedEntry]]]:
        """Portion by portion how many were asked for, and those that could be made."""


def fill_cache(strategy: Strategy, spec: CacheSpec, encoder: CacheEncoder, *, verify_existing: bool) -> tuple[CacheStore, dict[int, str]]:
    """Make what ``shelf`` lacks, in shares; return the cache and why some entries could not be made."""
    folders = list(dict.fromkeys(spec.directories))
    share = partition_by_shared_disk(strategy, folders)
    store = CacheStore(folders)
    mine = np.unique(spec.keys, return_index=True)[1][share.index :: share.count]
    rows = store.find_rows(spec.keys[mine])
    missing = mine[rows < 0]
    with _WriterPool() as writers:
        if verify_existing:
            damaged = store.find_damaged(rows[rows >= 0].tolist())
            missing = np.concatenate([missing, mine[np.isin(rows, damaged)]])
            _drop_damaged(store, damaged, spec, writers)
        with track_shared_progress(strategy, share, spec.name, len(missing), spec.unit) as shared:
            if len(missing):
                _encode_missing(store, spec, encoder, missing, writers, shared, share)
    mine_failed = {bytes(spec.keys[number]): why for number, why in encoder.failures.items()}
    failed = {key: why for part in strategy.all_gather_list([mine_failed]) for key, why in part.items()}
    bad = {number: failed[bytes(key)] for number, key in enumerate(spec.keys) if key in failed} if failed else {}
    _wait_until_visible(store, spec, bad)
    return store, bad


def _drop_damaged(store: CacheStore, damaged_rows: Sequence[int], spec: CacheSpec, writers: "_WriterPool") -> None:
    """Nobody is to use these rows any more."""
    if not damaged_rows:
        return
    names = ", ".join(store.read_name(row) for row in damaged_rows[:MAX_NAMES_SHOWN])
    logger.warning("%s: %d kept entries are damaged and are made anew: %s%s", spec.name, len(damaged_rows), names,
                   ", ..." if len(damaged_rows) > MAX_NAMES_SHOWN else "")  # fmt: skip
    for row in damaged_rows:
        writers.get_writer(store.get_directory(row)).drop(store.entries[[row]])
    store.refresh()


def _encode_missing(store: CacheStore, spec: CacheSpec, encoder: CacheEncoder, missing_indices: EntryIndices, writers: "_WriterPool", progress: SharedProgress,
          partition: WorkPartition) -> None:  # fmt: skip
    """Make entries and put them where they belong."""
    for folder in dict.fromkeys(spec.directories[number] for number in missing_indices):
        check_writable(folder, spec.option)
    groups = encoder.make_batches(missing_indices.tolist())
    # Who works on the same folder and knows nothing of us begins somewhere else, and we meet in the middle.
    start = secrets.randbelow(len(groups))
    still = _skip_finished(store, spec.keys, [*groups[start:], *groups[:start]], progress)
    is_first = True
    for count, entries in encoder.encode_batches(still):
        if entries and is_first:
            _check_required_space(spec, missing_indices, entries[0], partition)
            is_first = False
        for entry in entries:
            writers.get_writer(spec.directories[entry.index]).put(get_key_bytes(spec.keys[entry.index]), entry.tensors, entry.name)
        progress.add_done(count)
    writers.flush()


def _skip_finished(store: CacheStore, keys: KeyArray, batches: Sequence[list[int]], progress: SharedProgress) -> Iterator[list[int]]:
    """The groups without what somebody else has made in the meantime."""
    looked_at = time.monotonic()
    for group in batches:
        now = time.monotonic()
        if now - looked_at > REFRESH_INTERVAL_SECONDS:
            store.refresh()
            looked_at = time.monotonic()
        rest = [number for number, row in zip(group, store.find_rows(keys[group]), strict=True) if row < 0]
        if len(rest) < len(group):
            progress.add_done(len(group) - len(rest))
        if rest:
            yield rest


def _check_required_space(spec: CacheSpec, missing_indices: EntryIndices, first_entry: EncodedEntry, partition: WorkPartition) -> None:
    """What all of it will take, told by the first; stop now if there is too little room."""
    unit = sum(tensor.nbytes for tensor in first_entry.tensors.values()) / spec.relative_sizes[first_entry.index]
    for folder in dict.fromkeys(spec.directories[number] for number in missing_indices):
        costs = [spec.relative_sizes[number] for number in missing_indices if spec.directories[number] == folder]
        wanted = round(unit * sum(costs) * partition.count)
        count = len(costs) * partition.count
        logger.info("%s of about %d %ss are made: %s in %s", spec.name, count, spec.unit, format_bytes(wanted), folder)
        check_disk_space(folder, wanted, f"{spec.name} of {count} {spec.unit}s", spec.disk_full_hint)


def _wait_until_visible(store: CacheStore, spec: CacheSpec, failures: dict[int, str]) -> None:
    """Everything that was made, by whom ever, is there; disks of several machines may take a while to show it."""
    wanted = np.setdiff1d(np.arange(len(spec.keys)), list(failures))
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_SECONDS
    store.refresh()
    while (absent := wanted[store.find_rows(spec.keys[wanted]) < 0]).size:
        if time.monotonic() > deadline:
            raise UserError(f"{spec.name}: {len(absent)} entries were made and cannot be found in"
                            f" {spec.directories[absent[0]]}; do all machines see the same disk?")  # fmt: skip
        time.sleep(1)
        store.refresh()


class _WriterPool:
    """A writer for each folder that something is put into."""

    def __init__(self) -> None:
        self._writers: dict[Path, CacheWriter] = {}

    def __enter__(self) -> "_WriterPool":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for writer in self._writers.values():
            writer.close()

    def get_writer(self, directory: Path) -> CacheWriter:
        """The one for ``folder``."""
        if directory not in self._writers:
            self._writers[directory] = CacheWriter(directory)
        return self._writers[directory]

    def flush(self) -> None:
        """Announce everything, in all folders."""
        for writer in self._writers.values():
            writer.flush()
