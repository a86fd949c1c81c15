"""Filling a cache: what is missing or damaged is made, by all processes together, and found by all of them after."""

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..distributed.communicator import Communicator
from ..distributed.process_group import KeyValueStore
from ..errors import UserError
from ..log import ProgressBar
from .keys import KeyArray, get_key_bytes
from .paths import check_disk_space, check_writable, format_bytes
from .store import CacheStore
from .writer import CacheWriter

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


def fill_cache(
    comm: Communicator, spec: CacheSpec, encoder: CacheEncoder, *, verify_existing: bool
) -> tuple[CacheStore, dict[int, str]]:
    """Make what ``shelf`` lacks, in shares; return the cache and why some entries could not be made."""
    folders = list(dict.fromkeys(spec.directories))
    share = partition_by_shared_disk(comm, folders)
    store = CacheStore(folders)
    mine = np.unique(spec.keys, return_index=True)[1][share.index :: share.count]
    rows = store.find_rows(spec.keys[mine])
    missing = mine[rows < 0]
    with _WriterPool() as writers:
        if verify_existing:
            damaged = store.find_damaged(rows[rows >= 0].tolist())
            missing = np.concatenate([missing, mine[np.isin(rows, damaged)]])
            _drop_damaged(store, damaged, spec, writers)
        with track_shared_progress(comm, share, spec.name, len(missing), spec.unit) as shared:
            if len(missing):
                _encode_missing(store, spec, encoder, missing, writers, shared, share)
    mine_failed = {bytes(spec.keys[number]): why for number, why in encoder.failures.items()}
    failed = {key: why for part in comm.all_gather_object(mine_failed) for key, why in part.items()}
    bad = {number: failed[bytes(key)] for number, key in enumerate(spec.keys) if key in failed} if failed else {}
    _wait_until_visible(store, spec, bad)
    return store, bad


class _WriterPool:
    """A writer for each folder that something is put into."""

    def __init__(self) -> None:
        self._writers: dict[Path, CacheWriter] = {}

    def __enter__(self) -> "_WriterPool":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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


def _drop_damaged(store: CacheStore, damaged_rows: Sequence[int], spec: CacheSpec, writers: "_WriterPool") -> None:
    """Nobody is to use these rows any more."""
    if not damaged_rows:
        return
    names = ", ".join(store.read_name(row) for row in damaged_rows[:MAX_NAMES_SHOWN])
    logger.warning(
        "%s: %d kept entries are damaged and are made anew: %s%s",
        spec.name,
        len(damaged_rows),
        names,
        ", ..." if len(damaged_rows) > MAX_NAMES_SHOWN else "",
    )
    for row in damaged_rows:
        writers.get_writer(store.get_directory(row)).drop(store.entries[[row]])
    store.refresh()


class SharedProgress:
    """Tells how far all processes are, and waits for them."""

    def __init__(self, comm: Communicator, key_value_store: KeyValueStore, progress: ProgressBar):
        self.comm, self.key_value_store, self.progress = comm, key_value_store, progress

    def add_done(self, count: int) -> None:
        """``count`` more pieces of this process's share are done."""
        self._update_progress(self.key_value_store.add("done", count))
        self._raise_remote_failure()

    def wait_for_all_ranks(self) -> None:
        """Return when every process has done its share; what fails on one fails on all."""
        finished = self.key_value_store.add("finished", 1)
        news, since = (-1, finished), time.monotonic()
        while finished < self.comm.world_size:
            self._raise_remote_failure()
            time.sleep(POLL_INTERVAL_SECONDS)
            done, finished = self.key_value_store.read_counter("done"), self.key_value_store.read_counter("finished")
            self._update_progress(done)
            if (done, finished) != news:
                news, since = (done, finished), time.monotonic()
            elif time.monotonic() - since > STALL_TIMEOUT_SECONDS:
                raise UserError(
                    f"{self.comm.world_size - finished} of {self.comm.world_size} processes have done nothing for"
                    f" {STALL_TIMEOUT_SECONDS // 60} minutes, while this one waited for their share"
                )

    def _update_progress(self, num_done: int) -> None:
        self.progress.set_total(self.key_value_store.read_counter("total"))
        self.progress.update({}, num_done - self.progress.completed)

    def _raise_remote_failure(self) -> None:
        failure = self.key_value_store.get("failed")
        if failure is not None:
            error = UserError(failure)
            error.is_reported = True
            raise error


@dataclass(frozen=True)
class WorkPartition:
    """What a process does of work in pieces: those whose number leaves ``place`` when divided by ``of``."""

    index: int
    count: int
    run_token: str
    """The same on all processes, and another in each run."""


def _encode_missing(
    store: CacheStore,
    spec: CacheSpec,
    encoder: CacheEncoder,
    missing_indices: EntryIndices,
    writers: "_WriterPool",
    progress: SharedProgress,
    partition: WorkPartition,
) -> None:
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
            writers.get_writer(spec.directories[entry.index]).put(
                get_key_bytes(spec.keys[entry.index]), entry.tensors, entry.name
            )
        progress.add_done(count)
    writers.flush()


def _skip_finished(
    store: CacheStore, keys: KeyArray, batches: Sequence[list[int]], progress: SharedProgress
) -> Iterator[list[int]]:
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


def _check_required_space(
    spec: CacheSpec, missing_indices: EntryIndices, first_entry: EncodedEntry, partition: WorkPartition
) -> None:
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
            raise UserError(
                f"{spec.name}: {len(absent)} entries were made and cannot be found in"
                f" {spec.directories[absent[0]]}; do all machines see the same disk?"
            )
        time.sleep(1)
        store.refresh()


POLL_INTERVAL_SECONDS = 0.2


STALL_TIMEOUT_SECONDS = 30 * 60
"""After this long without anything done by anybody, something is wrong that nobody told."""


def partition_by_shared_disk(comm: Communicator, directories: Sequence[Path]) -> WorkPartition:
    """Find the processes with which this one has all ``folders`` in common; a short collective."""
    token = comm.all_gather_object(secrets.token_hex(4))[0]
    marks = [folder / f".here-{token}-{comm.rank}" for folder in directories]
    can_write = all([_create_marker(mark) for mark in marks])
    writes = comm.all_gather_object(can_write)
    seen = {
        rank
        for rank in range(comm.world_size)
        if writes[rank] and all((folder / f".here-{token}-{rank}").exists() for folder in directories)
    }
    comm.barrier()  # nobody takes a mark away before all have looked
    for mark in marks:
        with suppress(OSError):
            mark.unlink()
    peers = sorted(seen) if comm.rank in seen else [comm.rank]
    if found := describe_shared_disks(peers, comm.hostnames, directories):
        logger.info("%s", found)
    return WorkPartition(peers.index(comm.rank), len(peers), token)


def describe_shared_disks(peer_ranks: Sequence[int], hostnames: Sequence[str], directories: Sequence[Path]) -> str:
    """What several machines have in common, as one of the ``peers`` on a disk sees it."""
    if len(set(hostnames)) == 1 or not directories:
        return ""
    where = f"{directories[0]}{f' and {len(directories) - 1} more' if len(directories) > 1 else ''}"
    if len(peer_ranks) == len(hostnames):
        return f"all machines see the same disk in {where}: they share the work"
    here = sorted({hostnames[rank] for rank in peer_ranks})
    return (
        f"{where} is another disk on other machines than {', '.join(here)}: each disk gets all of it, from those"
        " that see it"
    )


def _create_marker(marker: Path) -> bool:
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        with marker.open("wb") as file:
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


@contextmanager
def track_shared_progress(
    comm: Communicator, partition: WorkPartition, name: str, num_entries: int, unit: str
) -> Iterator[SharedProgress]:
    """Work of which ``mine`` pieces are this process's share; on leaving, all processes have done theirs."""
    board = comm.open_key_value_store(f"{partition.run_token}/{name}")
    with ProgressBar(board.add("total", num_entries), 0, name, enabled=comm.is_main, unit=unit) as progress:
        shared = SharedProgress(comm, board, progress)
        try:
            yield shared
        except Exception as error:
            if board.get("failed") is None:
                board.set("failed", str(error))
            raise
        shared.wait_for_all_ranks()
