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

from ..distributed.board import Board
from ..distributed.strategy import DataParallel
from ..errors import UserError
from ..log import Progress

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_WITHOUT_NEWS = 30 * 60
"""After this long without anything done by anybody, something is wrong that nobody told."""


@dataclass(frozen=True)
class Share:
    """What a process does of work in pieces: those whose number leaves ``place`` when divided by ``of``."""

    place: int
    of: int
    token: str
    """The same on all processes, and another in each run."""


def meet(strategy: DataParallel, folders: Sequence[Path]) -> Share:
    """Find the processes with which this one has all ``folders`` in common; a short collective."""
    token = strategy.from_all([secrets.token_hex(4)])[0]
    marks = [folder / f".here-{token}-{strategy.rank}" for folder in folders]
    can_write = all([_made(mark) for mark in marks])
    writes = strategy.from_all([can_write])
    seen = {rank for rank in range(strategy.size) if writes[rank]
            and all((folder / f".here-{token}-{rank}").exists() for folder in folders)}  # fmt: skip
    strategy.from_all([None])  # nobody takes a mark away before all have looked
    for mark in marks:
        with suppress(OSError):
            mark.unlink()
    peers = sorted(seen) if strategy.rank in seen else [strategy.rank]
    if found := what_is_shared(peers, strategy.hosts, folders):
        logger.info("%s", found)
    return Share(peers.index(strategy.rank), len(peers), token)


def what_is_shared(peers: Sequence[int], hosts: Sequence[str], folders: Sequence[Path]) -> str:
    """What several machines have in common, as one of the ``peers`` on a disk sees it."""
    if len(set(hosts)) == 1 or not folders:
        return ""
    where = f"{folders[0]}{f' and {len(folders) - 1} more' if len(folders) > 1 else ''}"
    if len(peers) == len(hosts):
        return f"all machines see the same disk in {where}: they share the work"
    here = sorted({hosts[rank] for rank in peers})
    return (f"{where} is another disk on other machines than {', '.join(here)}: each disk gets all of it, from those"
            " that see it")  # fmt: skip


def _made(mark: Path) -> bool:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        with mark.open("wb") as file:
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


class Together:
    """Tells how far all processes are, and waits for them."""

    def __init__(self, strategy: DataParallel, board: Board, progress: Progress):
        self.strategy, self.board, self.progress = strategy, board, progress

    def done(self, count: int) -> None:
        """``count`` more pieces of this process's share are done."""
        self._show(self.board.add("done", count))
        self._fail_with_others()

    def wait(self) -> None:
        """Return when every process has done its share; what fails on one fails on all."""
        finished = self.board.add("finished", 1)
        news, since = (-1, finished), time.monotonic()
        while finished < self.strategy.size:
            self._fail_with_others()
            time.sleep(SECONDS_BETWEEN_LOOKS)
            done, finished = self.board.count("done"), self.board.count("finished")
            self._show(done)
            if (done, finished) != news:
                news, since = (done, finished), time.monotonic()
            elif time.monotonic() - since > SECONDS_WITHOUT_NEWS:
                raise UserError(
                    f"{self.strategy.size - finished} of {self.strategy.size} processes have done nothing for"
                    f" {SECONDS_WITHOUT_NEWS // 60} minutes, while this one waited for their share"
                )

    def _show(self, done: int) -> None:
        self.progress.expect(self.board.count("total"))
        self.progress.advance({}, done - self.progress.done)

    def _fail_with_others(self) -> None:
        failure = self.board.told("failed")
        if failure is not None:
            error = UserError(failure)
            error.is_told = True
            raise error


@contextmanager
def together(strategy: DataParallel, share: Share, what: str, mine: int, unit: str) -> Iterator[Together]:
    """Work of which ``mine`` pieces are this process's share; on leaving, all processes have done theirs."""
    board = strategy.board(f"{share.token}/{what}")
    with Progress(board.add("total", mine), 0, what, wanted=strategy.is_main, unit=unit) as progress:
        shared = Together(strategy, board, progress)
        try:
            yield shared
        except Exception as error:
            if board.told("failed") is None:
                board.tell("failed", str(error))
            raise
        shared.wait()
