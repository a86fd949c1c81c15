"""Ends this process when the launcher that started it is gone: nothing else would end a rank whose launcher was killed.

``accelerate launch`` and ``torchrun`` end their processes when they are asked to end, but not when they are killed.
Only a launcher whose command line is recognized is watched, and the supervisor of ``python -m library launch``; shells,
schedulers and ssh sessions above them may end at any time.
"""

import logging
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import psutil

from .launch_command import find_launcher_process
from .signals import StopSignals, find_supervisor_process
from .watchdog import EXIT_CODE, ProcessIdentity

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0
STOP_SECONDS = 300.0
"""The time for the current step and its checkpoint: without the launcher's store, ranks might wait for each other."""


@dataclass(frozen=True)
class Launcher:
    """A process without which this one ends."""

    title: str
    process: ProcessIdentity

    def __str__(self) -> str:
        return f"{self.title} ({self.process})"


class LauncherMonitor:
    """Context in which the death of a launcher stops training as a signal does, or, before training, the process."""

    def __init__(self, signals: StopSignals, launchers: Sequence[Launcher] | None = None):
        self.signals = signals
        self.launchers = tuple(find_launchers() if launchers is None else launchers)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="launcher monitor", daemon=True)

    def __enter__(self) -> "LauncherMonitor":
        if self.launchers:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed.set()

    def _watch(self) -> None:
        while not self._is_closed.wait(POLL_SECONDS):
            if gone := next((each for each in self.launchers if not each.process.is_alive()), None):
                self._stop(f"{gone} has died")
                return

    def _stop(self, reason: str) -> None:
        """Have the run save a checkpoint and end; end the process if it does not train, or does not end."""
        if self.signals.has_begun:
            self.signals.request_stop(signal.SIGTERM, reason)
            logger.error("%s: finishing this step, then saving a checkpoint", reason)
            if self._is_closed.wait(STOP_SECONDS):
                return
        logger.error("%s, so this process ends", reason)
        end_process_with_children()


def end_process_with_children() -> None:
    """End this process and what it has started, such as data workers, at once."""
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    os._exit(EXIT_CODE)


def find_launchers() -> list[Launcher]:
    """Find the launcher that started this process, and the ``python -m library launch`` that started the launcher."""
    found = {"the launcher": find_launcher_process(), "python -m library launch": find_supervisor_process()}
    launchers = []
    for title, process in found.items():
        with suppress(psutil.Error):  # it ended just now, or belongs to another user
            if process is not None:
                launchers.append(Launcher(title, ProcessIdentity.from_process(process)))
    return launchers
