"""Stop signals (SIGTERM, SIGINT, SIGUSR1): the current step is finished and a checkpoint saved before the run ends.

Under ``python -m library launch`` (``tools/launch.py``), training processes register in a directory to get signals
directly, and leave their exit code there.  ``Strategy.should_stop`` asks for them, ``training.resume`` saves the
checkpoint (``Resume.save_and_exit``).

Windows has no signals that one process sends to another: what is called so there ends it at once.  There the files of
that directory are watched instead, and the one that ``STOP_FILE`` names.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from ..atomic_files import replace_path

SUPERVISOR_DIR = "LORIKEET_SUPERVISOR"
"""The environment variable with the directory that ``python -m library launch`` shares with training processes."""

SIGNAL_FILE, EXIT_CODE_FILE, SUPERVISOR_FILE, PROCESS_PREFIX = "signal", "exit_code", "supervisor", "process-"
STOP_FILE = "LORIKEET_STOP_FILE"
"""The environment variable with the path of a file whose existence asks the run to stop; the web page makes it."""

WATCH_SECONDS = 0.5
DUPLICATE_SIGNAL_SECONDS = 3.0
"""Launchers forward signals that the process also gets itself; one that comes later is a second request."""


class StopSignals:
    """Context in which the first signal is stored in ``received``, and a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.reason = ""
        """Why the run stops, if not by a signal."""
        self.has_begun = False
        """Whether there is, or was, training that can be stopped after a step."""
        self._received_at = 0.0
        self._previous_handlers: dict[int, Any] = {}
        self._has_ended = threading.Event()

    def __enter__(self) -> "StopSignals":
        self.has_begun = True
        if threading.current_thread() is threading.main_thread():  # Python sets handlers in no other thread
            self._previous_handlers = {
                number: signal.signal(number, self._handle_signal) for number in list_stop_signals()
            }
            if (number := register_process()) is not None and self.received is None:
                self._handle_signal(number, None)
        if not can_send_signals():
            threading.Thread(target=self._watch_files, name="stop files", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended.set()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def request_stop(self, number: int, reason: str) -> None:
        """Stop the run as this signal does, from any thread."""
        if self.received is None:
            self.reason = reason
            self.received, self._received_at = number, time.monotonic()

    def _watch_files(self) -> None:
        """Wait for a file that asks to stop, where no signal can."""
        while self.received is None:
            if (number := find_stop_request()) is not None:
                self.request_stop(number, "")
                _announce_stop(number)
            if self._has_ended.wait(WATCH_SECONDS):
                return

    def ignore_sigterm(self) -> None:
        """Ignore SIGTERM, which launchers send when another rank has failed, while the error is reported."""
        if self._previous_handlers.pop(signal.SIGTERM, None) is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
            _announce_stop(number)
        elif time.monotonic() - self._received_at > DUPLICATE_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _announce_stop(number: int) -> None:
    """Say what happens now; not through logging, whose lock the interrupted code may hold."""
    name, seconds = signal.Signals(number).name, f"{DUPLICATE_SIGNAL_SECONDS:g} s"
    text = f"{name}: finishing this step, then saving a checkpoint; a second {name} after {seconds} stops at once"
    os.write(2, f"\n{text}\n".encode())


def can_send_signals() -> bool:
    """Whether a process can ask another one to stop by a signal; on Windows all but the console's end it at once."""
    return os.name != "nt"


def find_stop_request() -> int | None:
    """Return the signal for which a file stands that asks this run to stop: of the supervisor, or of the web page."""
    if (folder := os.environ.get(SUPERVISOR_DIR)) and (number := read_number(Path(folder) / SIGNAL_FILE)) is not None:
        return number
    path = os.environ.get(STOP_FILE)
    return int(signal.SIGTERM) if path and Path(path).exists() else None


def list_stop_signals() -> list[int]:
    """Return the stop signals that this operating system has."""
    return [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


def register_process() -> int | None:
    """Have ``python -m library launch`` forward signals to this process; return the one that it got already, if any."""
    if SUPERVISOR_DIR not in os.environ:
        return None
    folder = Path(os.environ[SUPERVISOR_DIR])
    write_number(folder / f"{PROCESS_PREFIX}{os.getpid()}", 0)
    return read_number(folder / SIGNAL_FILE)


def find_supervisor_process() -> psutil.Process | None:
    """Return the ``python -m library launch`` above this process."""
    if SUPERVISOR_DIR not in os.environ:
        return None
    number = read_number(Path(os.environ[SUPERVISOR_DIR]) / SUPERVISOR_FILE)
    with suppress(psutil.Error):
        return next((parent for parent in psutil.Process().parents() if parent.pid == number), None)
    return None


def report_exit_code(code: int) -> int:
    """Leave the exit code of a stopped run for ``python -m library launch``; return the code for the launcher.

    That is 0: accelerate launch and torchrun turn every other code into 1, and torchrun may restart the process.
    """
    if SUPERVISOR_DIR not in os.environ:
        return code
    write_number(Path(os.environ[SUPERVISOR_DIR]) / EXIT_CODE_FILE, code)
    return 0


def write_number(path: Path, number: int) -> None:
    """Write a number to a file of the directory that the supervisor shares, so that nobody reads half of it."""
    with suppress(OSError):  # the supervisor and its directory are gone
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        temporary.write_text(str(number), "ascii")
        replace_path(temporary, path)


def read_number(path: Path) -> int | None:
    """Read a file that ``write_number`` wrote; return ``None`` if it does not exist."""
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None
