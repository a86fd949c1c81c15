"""The other processes when a run fails: who is gone, and which one tells the user."""

import time
from collections.abc import Sequence

import torch.distributed as dist

from .board import Board
from .late import answer
from .processes import Process
from .words import ranks_in_words

SECONDS_TO_BE_GONE = 3.0
"""The connections of a process that is killed close a little before it is gone."""
MARKS_OF_GLOO = ("/gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class Peers:
    """All processes of a run by rank, as they were at its beginning."""

    def __init__(self, rank: int, processes: Sequence[Process], board: Board):
        self.rank, self.processes, self.board = rank, tuple(processes), board

    def tells(self) -> bool:
        """Whether this process is the one to tell: the first that asks is.  To be asked once."""
        if len(self.processes) == 1:
            return True
        place = answer(lambda: self.board.add("failed", 1), 0)
        if place:
            return place == 1
        # Whoever kept the board is gone, or the way to it; then one tells on each machine.
        here = {rank for rank, process in enumerate(self.processes) if process.is_here}
        return self.rank <= min(here - set(self.gone()), default=0)

    def gone(self) -> list[int]:
        """Ranks whose processes on this machine have ended."""
        return [rank for rank, process in enumerate(self.processes) if process.is_here and not process.lives()]

    def what_was_lost(self, error: BaseException) -> str | None:
        """A sentence, when ``error`` says that another process does not answer any more."""
        if len(self.processes) == 1 or not is_of_transport(error):
            return None
        deadline = time.monotonic() + SECONDS_TO_BE_GONE
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if gone:
            names = ", ".join(f"rank {rank} ({self.processes[rank]})" for rank in gone)
            ended = "has ended" if len(gone) == 1 else "have ended"
            return f"{names} {ended} without a word, killed by the system (out of memory?) or by somebody"
        elsewhere = [rank for rank, process in enumerate(self.processes) if not process.is_here]
        hosts = [process.host for process in self.processes]
        where = f"; look at {ranks_in_words(elsewhere, hosts)}, and at the network in between" if elsewhere else ""
        return f"another process does not answer, and all on this machine are there{where}: {_reason(error)}"


def is_of_transport(error: BaseException) -> bool:
    """Whether it says that another process, or the way to it, is gone."""
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS_OF_GLOO)


def _reason(error: BaseException) -> str:
    """The first line, without the place in somebody's source files."""
    return str(error).partition("\n")[0].rpartition("] ")[2]
