"""Something that may hang, watched from outside: a message in time, and an end."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from .process_group import KeyValueStore
from .world import format_ranks

logger = logging.getLogger(__name__)


EXIT_CODE = 2
"""As for mistakes of the user's: something outside of the program has to change."""


STORE_ANSWER_SECONDS = 3.0


REPORTER_GRACE_SECONDS = 2.0


T = TypeVar("T")


@contextmanager
def timeout(seconds: float, on_timeout: Callable[[], None]) -> Iterator[None]:
    """Call ``late`` in a thread of its own when the inside takes longer than this."""
    timer = threading.Timer(seconds, on_timeout)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def elect_reporter(key_value_store: KeyValueStore, *, is_local_main: bool) -> bool:
    """Whether this process is the one to tell; to be asked once.

    The store may not answer either.  Then one process of each machine tells.
    """
    return call_with_timeout(lambda: key_value_store.add("late", 1), 1 if is_local_main else 2) == 1


def abort_process(key_value_store: KeyValueStore, message: str, *, is_local_main: bool) -> None:
    """Tell why, on one of the processes that come here, and end: what hangs in a library cannot be called back."""
    if elect_reporter(key_value_store, is_local_main=is_local_main):
        logger.error("%s", message)
    else:
        threading.Event().wait(REPORTER_GRACE_SECONDS)  # whoever ends first takes the launcher along
    os._exit(EXIT_CODE)


def call_with_timeout(function: Callable[[], T], default: T) -> T:
    """What ``ask`` gives, if it does within seconds."""
    found: list[T] = []

    def call_in_thread() -> None:
        with suppress(Exception):  # of whatever kind: then there is no answer
            found.append(function())

    thread = threading.Thread(target=call_in_thread, daemon=True)
    thread.start()
    thread.join(STORE_ANSWER_SECONDS)
    return found[0] if found else default


EXIT_GRACE_SECONDS = 3.0
"""The connections of a process that is killed close a little before it is gone."""


GLOO_ERRORS = ("/gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class ProcessIdentity:
    """Where and what it is."""

    host: str
    system: str  # machines may have one name, and containers on one machine numbers of their own
    pid: int
    began: float  # seconds after the machine did, which stays the same when somebody sets the clock

    @classmethod
    def get_current(cls) -> "ProcessIdentity":
        """This one."""
        return cls(socket.gethostname(), _read_boot_id(), os.getpid(), _compute_start_time(psutil.Process()))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ProcessIdentity | None":
        """What ``as_json`` gave, or nothing where it does not stand."""
        try:
            return cls(str(data["host"]), str(data["system"]), int(data["pid"]), float(data["began"]))
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @property
    def is_on_this_machine(self) -> bool:
        """On this machine and in this container, so that it can be asked."""
        return (self.host, self.system) == (socket.gethostname(), _read_boot_id())

    def is_alive(self) -> bool:
        """Whether it does; only to be asked on its own machine."""
        with suppress(psutil.Error):
            found = psutil.Process(self.pid)
            return (
                abs(_compute_start_time(found) - self.began) < CLOCK_TOLERANCE_SECONDS
                and found.status() not in DEAD_STATUSES
            )
        return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


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
        return [
            rank for rank, process in enumerate(self.processes) if process.is_on_this_machine and not process.is_alive()
        ]

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


CLOCK_TOLERANCE_SECONDS = 2.0
"""Clocks of the system count in whole seconds, and two of them are read."""


BOOT_ID_FILE, PID_NAMESPACE_LINK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


DEAD_STATUSES = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _read_boot_id() -> str:
    """The start of the system that this process runs on, and where its number counts; nothing where none says so."""
    with suppress(OSError):
        return f"{BOOT_ID_FILE.read_text('ascii').strip()} {PID_NAMESPACE_LINK.readlink()}"
    return ""


def _compute_start_time(process: psutil.Process) -> float:
    # In this order, because some versions add what they knew of the system's beginning until then.
    boot = psutil.boot_time()
    return float(process.create_time() - boot)
