"""A process, known so well that another one with the same number is not taken for it."""

import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

CLOCK_TOLERANCE_SECONDS = 2.0
"""Clocks of the system count in whole seconds, and two of them are read."""
BOOT_ID_FILE, PID_NAMESPACE_LINK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
DEAD_STATUSES = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


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
            return abs(_compute_start_time(found) - self.began) < CLOCK_TOLERANCE_SECONDS and found.status() not in DEAD_STATUSES
        return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _read_boot_id() -> str:
    """The start of the system that this process runs on, and where its number counts; nothing where none says so."""
    with suppress(OSError):
        return f"{BOOT_ID_FILE.read_text('ascii').strip()} {PID_NAMESPACE_LINK.readlink()}"
    return ""


def _compute_start_time(process: psutil.Process) -> float:
    # In this order, because some versions add what they knew of the system's beginning until then.
    boot = psutil.boot_time()
    return float(process.create_time() - boot)
