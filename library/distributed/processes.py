"""A process, known so well that another one with the same number is not taken for it."""

import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

SECONDS_OF_DOUBT = 2.0
"""Clocks of the system count in whole seconds, and two of them are read."""
BOOT, NUMBERS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
NOT_ALIVE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True)
class Process:
    """Where and what it is."""

    host: str
    system: str  # machines may have one name, and containers on one machine numbers of their own
    pid: int
    began: float  # seconds after the machine did, which stays the same when somebody sets the clock

    @classmethod
    def own(cls) -> "Process":
        """This one."""
        return cls(socket.gethostname(), _system(), os.getpid(), _began(psutil.Process()))

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Process | None":
        """What ``as_json`` gave, or nothing where it does not stand."""
        try:
            return cls(str(found["host"]), str(found["system"]), int(found["pid"]), float(found["began"]))
        except (KeyError, TypeError, ValueError):
            return None

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """On this machine and in this container, so that it can be asked."""
        return (self.host, self.system) == (socket.gethostname(), _system())

    def lives(self) -> bool:
        """Whether it does; only to be asked on its own machine."""
        with suppress(psutil.Error):
            found = psutil.Process(self.pid)
            return abs(_began(found) - self.began) < SECONDS_OF_DOUBT and found.status() not in NOT_ALIVE
        return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _system() -> str:
    """The start of the system that this process runs on, and where its number counts; nothing where none says so."""
    with suppress(OSError):
        return f"{BOOT.read_text('ascii').strip()} {NUMBERS.readlink()}"
    return ""


def _began(process: psutil.Process) -> float:
    # In this order, because some versions add what they knew of the system's beginning until then.
    boot = psutil.boot_time()
    return float(process.create_time() - boot)
