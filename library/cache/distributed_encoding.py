"""Fill a cache: each rank encodes its part of the missing or damaged entries, where ranks share a disk."""

import atexit
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..config.schema_data import CacheConfig
from ..dataloader.prepare import PreparedData
from ..distributed.communicator import Communicator
from ..distributed.process_group import KeyValueStore
from ..errors import UserError
from ..log import ProgressBar
from ..problems import Problem
from .keys import KeyArray, get_key_bytes
from .paths import check_disk_space, check_writable, format_bytes, get_temporary_cache_dir, resolve_cache_dirs
from .store import CacheStore
from .writer import CacheWriter

logger = logging.getLogger(__name__)
VISIBILITY_TIMEOUT_SECONDS = 60.0
"""A shared file system may take this long to show what another machine wrote."""

REFRESH_INTERVAL_SECONDS = 2.0
POLL_INTERVAL_SECONDS = 0.2
STALL_TIMEOUT_SECONDS = 30 * 60
"""Waiting ranks give up when no rank has made progress for this long."""

MAX_NAMES_SHOWN = 5
EntryIndices = NDArray[np.int64]
"""Positions in ``CacheSpec.keys``."""


@dataclass(frozen=True)
class EncodedEntry:
    """The tensors of one cache entry."""

    index: int
    tensors: dict[str, Tensor]
    name: str  # the name in messages


@dataclass(frozen=True)
class CacheSpec:
    """The entries that a cache has to contain, and the folders that it is in."""

    name: str  # "latents"
    unit: str  # "image"
    option: str  # the option that enables the cache, for messages
    keys: KeyArray
    directories: Sequence[Path]  # the directory of each key
    relative_sizes: Sequence[int]  # the size of each entry, in any unit
    disk_full_hint: str  # what to do when the disk is too small

    @property
    def unique_directories(self) -> list[Path]:
        """Every directory once."""
        return list(dict.fromkeys(self.directories))


class CacheEncoder(Protocol):
    """Encodes entries; loads its model when the first batch is requested."""

    failures: dict[int, Problem]
    """Entries that could not be encoded, with the reason."""

    def make_batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Group entries to batches that are encoded at once."""

    def encode_batches(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[EncodedEntry]]]:
        """Yield the size of each batch and its entries, without those that failed."""


def fill_cache(
    comm: Communicator, spec: CacheSpec, encoder: CacheEncoder, *, verify_existing: bool
) -> tuple[CacheStore, dict[int, Problem]]:
    """Encode what is missing; return the cache, and the entries that could not be encoded with the reason."""
    partition = partition_by_shared_disk(comm, spec.unique_directories)
    store = CacheStore(spec.unique_directories)
    own = np.unique(spec.keys, return_index=True)[1][partition.index :: partition.count]
    rows = store.find_rows(spec.keys[own])
    missing = own[rows < 0]
    with ExitStack() as stack:
        writers = _Writers(stack)
        if verify_existing:
            damaged = store.find_damaged(rows[rows >= 0].tolist())
            missing = np.concatenate([missing, own[np.isin(rows, damaged)]])
            _drop_damaged(store, damaged, spec, writers)
        with track_shared_progress(comm, partition, spec.name, len(missing), spec.unit) as progress:
            if len(missing):
                _encode_missing(
                    store,
                    spec,
                    encoder,
                    missing_indices=missing,
                    writers=writers,
                    progress=progress,
                    partition=partition,
                )
    own_failures = {bytes(spec.keys[index]): reason for index, reason in encoder.failures.items()}
    failed = {key: reason for failures in comm.all_gather_object(own_failures) for key, reason in failures.items()}
    failures = {index: failed[bytes(key)] for index, key in enumerate(spec.keys) if key in failed} if failed else {}
    _wait_until_visible(store, spec, failures)
    return store, failures


class _Writers:
    """One writer for each directory that is written to, closed with ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._writers: dict[Path, CacheWriter] = {}

    def get_writer(self, directory: Path) -> CacheWriter:
        if directory not in self._writers:
            self._writers[directory] = self._stack.enter_context(CacheWriter(directory))
        return self._writers[directory]

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()


def _drop_damaged(store: CacheStore, damaged_rows: Sequence[int], spec: CacheSpec, writers: _Writers) -> None:
    """Mark damaged entries as unusable for every reader."""
    if not damaged_rows:
        return
    names = ", ".join(store.read_name(row) for row in damaged_rows[:MAX_NAMES_SHOWN])
    more = ", ..." if len(damaged_rows) > MAX_NAMES_SHOWN else ""
    logger.warning("%s: encoding %d damaged entries again: %s%s", spec.name, len(damaged_rows), names, more)
    for row in damaged_rows:
        writers.get_writer(store.get_directory(row)).drop(store.entries[[row]])
    store.refresh()


class SharedProgress:
    """The progress of all ranks, through a key-value store: no collective, so that no rank times out while waiting."""

    def __init__(self, comm: Communicator, key_value_store: KeyValueStore, progress_bar: ProgressBar):
        self.comm, self.key_value_store, self.progress_bar = comm, key_value_store, progress_bar

    def add_done(self, count: int) -> None:
        """Report ``count`` more entries of this rank as done."""
        self._update_progress(self.key_value_store.add("done", count))
        self._raise_remote_failure()

    def wait_for_all_ranks(self) -> None:
        """Wait until every rank is done; raise if one has failed."""
        finished = self.key_value_store.add("finished", 1)
        last_state, changed_at = (-1, finished), time.monotonic()
        while finished < self.comm.world_size:
            self._raise_remote_failure()
            time.sleep(POLL_INTERVAL_SECONDS)
            done, finished = self.key_value_store.read_counter("done"), self.key_value_store.read_counter("finished")
            self._update_progress(done)
            if (done, finished) != last_state:
                last_state, changed_at = (done, finished), time.monotonic()
            elif time.monotonic() - changed_at > STALL_TIMEOUT_SECONDS:
                raise UserError(
                    f"no progress for {STALL_TIMEOUT_SECONDS // 60} minutes on {self.comm.world_size - finished} of"
                    f" {self.comm.world_size} processes, while this one waited for their part of the cache"
                )

    def _update_progress(self, num_done: int) -> None:
        self.progress_bar.set_total(self.key_value_store.read_counter("total"))
        self.progress_bar.update({}, num_done - self.progress_bar.completed)

    def _raise_remote_failure(self) -> None:
        failure = self.key_value_store.get("failed")
        if failure is not None:
            error = UserError(failure)
            error.is_reported = True
            raise error


@dataclass(frozen=True)
class WorkPartition:
    """The entries that this rank encodes: every ``count``-th, from ``index`` on."""

    index: int
    count: int
    run_token: str
    """A text that is equal on all ranks and different in every run."""


def _encode_missing(
    store: CacheStore,
    spec: CacheSpec,
    encoder: CacheEncoder,
    missing_indices: EntryIndices,
    writers: _Writers,
    progress: SharedProgress,
    partition: WorkPartition,
) -> None:
    """Encode entries and write each into its directory."""
    for directory in dict.fromkeys(spec.directories[index] for index in missing_indices):
        check_writable(directory, spec.option)
    batches = encoder.make_batches(missing_indices.tolist())
    # an unrelated program that fills the same directory starts elsewhere, so that both meet halfway
    start = secrets.randbelow(len(batches))
    remaining = _skip_finished(store, spec.keys, [*batches[start:], *batches[:start]], progress)
    is_first = True
    for count, entries in encoder.encode_batches(remaining):
        if entries and is_first:
            _check_required_space(spec, missing_indices, entries[0], partition)
            is_first = False
        for entry in entries:
            writer = writers.get_writer(spec.directories[entry.index])
            writer.put(get_key_bytes(spec.keys[entry.index]), entry.tensors, entry.name)
        progress.add_done(count)
    writers.flush()


def _skip_finished(
    store: CacheStore, keys: KeyArray, batches: Sequence[list[int]], progress: SharedProgress
) -> Iterator[list[int]]:
    """Yield the batches without the entries that another program has written in the meantime."""
    refreshed_at = time.monotonic()
    for batch in batches:
        if time.monotonic() - refreshed_at > REFRESH_INTERVAL_SECONDS:
            store.refresh()
            refreshed_at = time.monotonic()
        missing = [index for index, row in zip(batch, store.find_rows(keys[batch]), strict=True) if row < 0]
        if len(missing) < len(batch):
            progress.add_done(len(batch) - len(missing))
        if missing:
            yield missing


def _check_required_space(
    spec: CacheSpec, missing_indices: EntryIndices, first_entry: EncodedEntry, partition: WorkPartition
) -> None:
    """Estimate the size of all entries from the first one; raise ``UserError`` if a disk is too small."""
    unit = sum(tensor.nbytes for tensor in first_entry.tensors.values()) / spec.relative_sizes[first_entry.index]
    for directory in dict.fromkeys(spec.directories[index] for index in missing_indices):
        sizes = [spec.relative_sizes[index] for index in missing_indices if spec.directories[index] == directory]
        num_bytes, count = round(unit * sum(sizes) * partition.count), len(sizes) * partition.count
        entries = f"{spec.name} of {count} {spec.unit}{'s' * (count != 1)}"
        logger.info("caching %s (%s) in %s", entries, format_bytes(num_bytes), directory)
        check_disk_space(directory, num_bytes, entries, spec.disk_full_hint)


def _wait_until_visible(store: CacheStore, spec: CacheSpec, failures: dict[int, Problem]) -> None:
    """Wait until this machine sees all entries, whichever machine wrote them."""
    expected = np.setdiff1d(np.arange(len(spec.keys)), list(failures))
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_SECONDS
    store.refresh()
    while (absent := expected[store.find_rows(spec.keys[expected]) < 0]).size:
        if time.monotonic() > deadline:
            raise UserError(
                f"{spec.name}: {len(absent)} entries were written, but are not in {spec.directories[absent[0]]};"
                " do all machines see the same disk there?"
            )
        time.sleep(1)
        store.refresh()


def partition_by_shared_disk(comm: Communicator, directories: Sequence[Path]) -> WorkPartition:
    """Find the ranks that share all ``directories`` with this one, and divide the work among them; a collective."""
    token = comm.all_gather_object(secrets.token_hex(4))[0]
    markers = [directory / f".here-{token}-{comm.rank}" for directory in directories]
    can_write = comm.all_gather_object(all([_create_marker(marker) for marker in markers]))
    seen = {
        rank
        for rank in range(comm.world_size)
        if can_write[rank] and all((directory / f".here-{token}-{rank}").exists() for directory in directories)
    }
    comm.barrier()  # markers stay until all ranks have looked
    for marker in markers:
        with suppress(OSError):
            marker.unlink()
    peers = sorted(seen) if comm.rank in seen else [comm.rank]
    if message := describe_shared_disks(peers, comm.hostnames, directories):
        logger.info("%s", message)
    return WorkPartition(peers.index(comm.rank), len(peers), token)


def describe_shared_disks(peer_ranks: Sequence[int], hostnames: Sequence[str], directories: Sequence[Path]) -> str:
    """Say which machines share the disk of the cache; empty on a single machine."""
    if len(set(hostnames)) == 1 or not directories:
        return ""
    where = f"{directories[0]}{f' and {len(directories) - 1} more' if len(directories) > 1 else ''}"
    if len(peer_ranks) == len(hostnames):
        return f"all machines share the disk of {where}: the work is divided among them"
    here = ", ".join(sorted({hostnames[rank] for rank in peer_ranks}))
    return f"{where} is not shared between {here} and the other machines: each disk gets a full cache"


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
    """Show the progress of all ranks; on leaving, wait until all of them have encoded their entries."""
    board = comm.open_key_value_store(f"{partition.run_token}/{name}")
    with ProgressBar(board.add("total", num_entries), 0, name, enabled=comm.is_main, unit=unit) as progress_bar:
        progress = SharedProgress(comm, board, progress_bar)
        try:
            yield progress
        except Exception as error:
            if board.get("failed") is None:
                board.set("failed", str(error))
            raise
        progress.wait_for_all_ranks()


@contextmanager
def open_cache_dirs(
    cache: CacheConfig, comm: Communicator, prepared: PreparedData, *, to_disk: bool
) -> Iterator[list[Path]]:
    """Yield the cache directory of each sample; a temporary one is deleted at the end, its open files stay readable."""
    manifest = prepared.merge_validation().manifest
    if to_disk:
        yield resolve_cache_dirs(manifest, cache)
        return
    directory = get_temporary_cache_dir(cache, comm.all_gather_object(secrets.token_hex(4))[0])
    try:
        yield [directory] * len(manifest.samples)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():  # Windows does not delete files that are open
            atexit.register(shutil.rmtree, directory, ignore_errors=True)


def open_shards(store: CacheStore, comm: Communicator, *, to_disk: bool) -> None:
    store.open_all_shards()
    if not to_disk:
        comm.barrier()  # the files are deleted after this


def split_into_batches(indices: Sequence[int], batch_size: int) -> list[list[int]]:
    return [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]
