"""Watchdog: abort a connection that hangs, and detect ranks that died; the error is reported once.

Collectives that hang in training end by ``--ddp_timeout``, which ``process_group`` sets.
"""

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
"""The exit code of a process that the watchdog ends: that of user errors, since the cause is outside of the program."""

STORE_ANSWER_SECONDS = 3.0
REPORTER_GRACE_SECONDS = 2.0
T = TypeVar("T")


@contextmanager
def timeout(seconds: float, on_timeout: Callable[[], None]) -> Iterator[None]:
    """Call ``on_timeout`` in a thread if the inside takes longer than ``seconds``."""
    timer = threading.Timer(seconds, on_timeout)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def elect_reporter(key_value_store: KeyValueStore, *, is_local_main: bool) -> bool:
    """Return whether this rank reports the error; call it once per error.

    If the store does not answer either, one rank of each machine reports it.
    """
    return call_with_timeout(lambda: key_value_store.add("late", 1), 1 if is_local_main else 2) == 1


def abort_process(key_value_store: KeyValueStore, message: str, *, is_local_main: bool) -> None:
    """Log the error on one rank and exit at once: a collective that hangs cannot be interrupted."""
    if elect_reporter(key_value_store, is_local_main=is_local_main):
        logger.error("%s", message)
    else:
        threading.Event().wait(REPORTER_GRACE_SECONDS)  # the launcher stops the others when the first one exits
    os._exit(EXIT_CODE)


def call_with_timeout(function: Callable[[], T], default: T) -> T:
    """Return the result of ``function``, or ``default`` if it fails or takes longer than a few seconds."""
    results: list[T] = []

    def call_in_thread() -> None:
        with suppress(Exception):
            results.append(function())

    thread = threading.Thread(target=call_in_thread, daemon=True)
    thread.start()
    thread.join(STORE_ANSWER_SECONDS)
    return results[0] if results else default


EXIT_GRACE_SECONDS = 3.0
"""Connections of a killed process close a little before the process disappears."""

GLOO_ERRORS = ("/gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process across machines, containers and reused process ids."""

    host: str
    system: str  # boot id and pid namespace: host names may be equal, and containers have pids of their own
    pid: int
    began: float  # seconds since boot, which does not change with the clock

    @classmethod
    def get_current(cls) -> "ProcessIdentity":
        """Identify this process."""
        return cls.from_process(psutil.Process())

    @classmethod
    def from_process(cls, process: psutil.Process) -> "ProcessIdentity":
        """Identify a process of this machine."""
        return cls(socket.gethostname(), _read_boot_id(), process.pid, _compute_start_time(process))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ProcessIdentity | None":
        """Parse ``to_json``'s result; ``None`` if it is incomplete."""
        try:
            return cls(str(data["host"]), str(data["system"]), int(data["pid"]), float(data["began"]))
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @property
    def is_on_this_machine(self) -> bool:
        """Whether it is in this machine and container, so that ``is_alive`` can tell."""
        return (self.host, self.system) == (socket.gethostname(), _read_boot_id())

    def is_alive(self) -> bool:
        """Whether it still runs; call it on its own machine only."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            is_same = abs(_compute_start_time(process) - self.began) < CLOCK_TOLERANCE_SECONDS
            return is_same and process.status() not in DEAD_STATUSES
        return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class PeerMonitor:
    """Detects which processes of a run have died; ``processes`` are by rank."""

    def __init__(self, rank: int, processes: Sequence[ProcessIdentity], key_value_store: KeyValueStore):
        self.rank, self.processes, self.key_value_store = rank, tuple(processes), key_value_store

    def elect_reporter(self) -> bool:
        """Return whether this rank reports the error: the first to ask does.  Call it once."""
        if len(self.processes) == 1:
            return True
        place = call_with_timeout(lambda: self.key_value_store.add("failed", 1), 0)
        if place:
            return place == 1
        # The store's host or the connection is gone: one rank of each machine reports.
        here = {rank for rank, process in enumerate(self.processes) if process.is_on_this_machine}
        return self.rank <= min(here - set(self.find_dead_ranks()), default=0)

    def find_dead_ranks(self) -> list[int]:
        """Return the ranks on this machine whose processes have ended."""
        return [
            rank for rank, process in enumerate(self.processes) if process.is_on_this_machine and not process.is_alive()
        ]

    def describe_lost_peer(self, error: BaseException) -> str | None:
        """Format a message if ``error`` means that another rank is gone."""
        if len(self.processes) == 1 or not is_connection_error(error):
            return None
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        while not (gone := self.find_dead_ranks()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if gone:
            names = ", ".join(f"rank {rank} ({self.processes[rank]})" for rank in gone)
            return f"{names} died without an error message: killed by the system (out of memory?) or by a user"
        elsewhere = [rank for rank, process in enumerate(self.processes) if not process.is_on_this_machine]
        hosts = [process.host for process in self.processes]
        where = f"; check {format_ranks(elsewhere, hosts)} and the network" if elsewhere else ""
        return f"lost the connection to another rank, while all ranks on this machine run{where}: {_get_reason(error)}"


def is_connection_error(error: BaseException) -> bool:
    """Whether another rank or the network to it failed."""
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in GLOO_ERRORS)


def _get_reason(error: BaseException) -> str:
    """Return the first line without gloo's source location."""
    return str(error).partition("\n")[0].rpartition("] ")[2]


CLOCK_TOLERANCE_SECONDS = 2.0
"""The system counts some clocks in whole seconds, and two of them are read."""

BOOT_ID_FILE, PID_NAMESPACE_LINK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
DEAD_STATUSES = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _read_boot_id() -> str:
    """Return the boot id and the pid namespace; empty where the system has none."""
    with suppress(OSError):
        return f"{BOOT_ID_FILE.read_text('ascii').strip()} {PID_NAMESPACE_LINK.readlink()}"
    return ""


def _compute_start_time(process: psutil.Process) -> float:
    # In this order: some versions of psutil compute create_time from the boot time that they read last.
    boot = psutil.boot_time()
    return float(process.create_time() - boot)
