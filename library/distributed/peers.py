"""The other processes when a run fails: who is gone, and which one tells the user."""

import time
from collections.abc import Sequence

import torch.distributed as dist

from .board import KeyValueStore
from .late import call_with_timeout
from .processes import ProcessIdentity
from .words import format_ranks

EXIT_GRACE_SECONDS = 3.0
"""The connections of a process that is killed close a little before it is gone."""
GLOO_ERRORS = ("/gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class PeerMonitor:
    """All processes of a run by rank, as they were at its beginning."""

    def __init__(self, rank: int, processes: Sequence[ProcessIdentity], key_value_store: KeyValueStore):
        self.rank, self.processes, self.key_value_store = rank, tuple(processes), key_value_store

    def elect_reporter(self) -> bool:
        """Whether this process is the one to tell: the first that asks is.  To be asked once."""
        if len(self.processes) == 1:
            return True
        place = call_with_timeout(lambda: self.key_value_store.add("failed", 1), 0)
        if place:
            return place == 1
        # Whoever kept the board is gone, or the way to it; then one tells on each machine.
        here = {rank for rank, process in enumerate(self.processes) if process.is_on_this_machine}
        return self.rank <= min(here - set(self.find_dead_ranks()), default=0)

    def find_dead_ranks(self) -> list[int]:
        """Ranks whose processes on this machine have ended."""
        return [rank for rank, process in enumerate(self.processes) if process.is_on_this_machine and not process.is_alive()]

    def describe_lost_peer(self, error: BaseException) -> str | None:
        """A sentence, when ``error`` says that another process does not answer any more."""
        if len(self.processes) == 1 or not is_connection_error(error):
            return None
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        while not (gone := self.find_dead_ranks()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if gone:
            names = ", ".join(f"rank {rank} ({self.processes[rank]})" for rank in gone)
            ended = "has ended" if len(gone) == 1 else "have ended"
            return f"{names} {ended} without a word, killed by the system (out of memory?) or by somebody"
        elsewhere = [rank for rank, process in enumerate(self.processes) if not process.is_on_this_machine]
        hosts = [process.host for process in self.processes]
        where = f"; look at {format_ranks(elsewhere, hosts)}, and at the network in between" if elsewhere else ""
        return f"another process does not answer, and all on this machine are there{where}: {_get_reason(error)}"


def is_connection_error(error: BaseException) -> bool:
    """Whether it says that another process, or the way to it, is gone."""
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in GLOO_ERRORS)


def _get_reason(error: BaseException) -> str:
    """The first line, without the place in somebody's source files."""
    return str(error).partition("\n")[0].rpartition("] ")[2]
