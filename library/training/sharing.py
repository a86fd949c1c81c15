"""Long work that processes do side by side, each its share, without any of them waiting in a collective.

Which processes see the same folder is found out by looking, not by asking: on several machines without a common disk
each machine does the whole work for its own, and where there is a common disk they all do a part of it.
"""

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..distributed.board import KeyValueStore
from ..distributed.strategy import Strategy
from ..errors import UserError
from ..log import ProgressBar

logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 0.2
STALL_TIMEOUT_SECONDS = 30 * 60
"""After this long without anything done by anybody, something is wrong that nobody told."""


@dataclass(frozen=True)
class WorkPartition:
    """What a process does of work in pieces: those whose number leaves ``place`` when divided by ``of``."""

    index: int
    count: int
    run_token: str
    """The same on all processes, and another in each run."""


def partition_by_shared_disk(strategy: Strategy, directories: Sequence[Path]) -> WorkPartition:
    """Find the processes with which this one has all ``folders`` in common; a short collective."""
    token = strategy.all_gather_list([secrets.token_hex(4)])[0]
    marks = [folder / f".here-{token}-{strategy.rank}" for folder in directories]
    can_write = all([_create_marker(mark) for mark in marks])
    writes = strategy.all_gather_list([can_write])
    seen = {rank for rank in range(strategy.world_size) if writes[rank]
            and all((folder / f".here-{token}-{rank}").exists() for folder in directories)}  # fmt: skip
    strategy.all_gather_list([None])  # nobody takes a mark away before all have looked
    for mark in marks:
        with suppress(OSError):
            mark.unlink()
    peers = sorted(seen) if strategy.rank in seen else [strategy.rank]
    if found := describe_shared_disks(peers, strategy.hostnames, directories):
        logger.info("%s", found)
    return WorkPartition(peers.index(strategy.rank), len(peers), token)


def describe_shared_disks(peer_ranks: Sequence[int], hostnames: Sequence[str], directories: Sequence[Path]) -> str:
    """What several machines have in common, as one of the ``peers`` on a disk sees it."""
    if len(set(hostnames)) == 1 or not directories:
        return ""
    where = f"{directories[0]}{f' and {len(directories) - 1} more' if len(directories) > 1 else ''}"
    if len(peer_ranks) == len(hostnames):
        return f"all machines see the same disk in {where}: they share the work"
    here = sorted({hostnames[rank] for rank in peer_ranks})
    return (f"{where} is another disk on other machines than {', '.join(here)}: each disk gets all of it, from those"
            " that see it")  # fmt: skip


def _create_marker(marker: Path) -> bool:
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        with marker.open("wb") as file:
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


class SharedProgress:
    """Tells how far all processes are, and waits for them."""

    def __init__(self, strategy: Strategy, key_value_store: KeyValueStore, progress: ProgressBar):
        self.strategy, self.key_value_store, self.progress = strategy, key_value_store, progress

    def add_done(self, count: int) -> None:
        """``count`` more pieces of this process's share are done."""
        self._update_progress(self.key_value_store.add("done", count))
        self._raise_remote_failure()

    def wait_for_all_ranks(self) -> None:
        """Return when every process has done its share; what fails on one fails on all."""
        finished = self.key_value_store.add("finished", 1)
        news, since = (-1, finished), time.monotonic()
        while finished < self.strategy.world_size:
            self._raise_remote_failure()
            time.sleep(POLL_INTERVAL_SECONDS)
            done, finished = self.key_value_store.read_counter("done"), self.key_value_store.read_counter("finished")
            self._update_progress(done)
            if (done, finished) != news:
                news, since = (done, finished), time.monotonic()
            elif time.monotonic() - since > STALL_TIMEOUT_SECONDS:
                raise UserError(
                    f"{self.strategy.world_size - finished} of {self.strategy.world_size} processes have done nothing for"
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


@contextmanager
def track_shared_progress(strategy: Strategy, partition: WorkPartition, name: str, num_entries: int, unit: str) -> Iterator[SharedProgress]:
    """Work of which ``mine`` pieces are this process's share; on leaving, all processes have done theirs."""
    board = strategy.open_key_value_store(f"{partition.run_token}/{name}")
    with ProgressBar(board.add("total", num_entries), 0, name, enabled=strategy.is_main, unit=unit) as progress:
        shared = SharedProgress(strategy, board, progress)
        try:
            yield shared
        except Exception as error:
            if board.get("failed") is None:
                board.set("failed", str(error))
            raise
        shared.wait_for_all_ranks()
