"""Signals that ask a run to end: noted, not obeyed at once, so that the step can be finished and kept."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from . import supervised

SECONDS_OF_ONE = 3.0
"""A launcher passes on what it got itself, so that one request arrives twice; what comes later is a second one."""


class Signals:
    """Inside, the first signal is noted in ``asked``, and a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # no other thread may set them
            self._before = {number: signal.signal(number, self._note) for number in supervised.numbers()}
            if (number := supervised.listen()) is not None and self.asked is None:
                self._note(number, None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def ignore(self) -> None:
        """A launcher ends all processes as soon as one of them ended; what is still to be said takes seconds only."""
        if self._before.pop(signal.SIGTERM, None) is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked, self._asked_at = number, time.monotonic()
            name = signal.Signals(number).name
            # Not through logging: it may be just writing a line when the signal comes.
            os.write(2, f"\n{name}: the step is finished and the state saved; a second {name} ends at once\n".encode())
        elif time.monotonic() - self._asked_at > SECONDS_OF_ONE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
