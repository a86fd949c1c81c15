"""Long work that one process on each machine does first, so that the others find it done.

The others do not wait in one long collective, which would run into the time limit of the process group: as long as
somebody works, all processes give each other a sign of life every few seconds.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..errors import UserError

HEARTBEAT_SECONDS = 2.0

T = TypeVar("T")
WorkStatus = BaseException | str | None
"""What went wrong, ``WORKING``, or nothing any more."""
WORKING = "working"


def run_local_first(function: Callable[[], T], is_first: bool, gather: Callable[[WorkStatus], list[WorkStatus]]) -> T:
    """``work()`` on processes that are first, then on the others; when it fails on one, it fails on all.

    ``gather`` brings together what every process has to say, and all have to call it equally often.
    """
    task = _BackgroundTask(function) if is_first else None
    while True:
        signs = gather(task.poll_status() if task is not None else None)
        if WORKING not in signs:
            break
    if task is not None and task.failure is not None:
        raise task.failure
    for sign in signs:
        if isinstance(sign, BaseException):
            if isinstance(sign, UserError):
                sign.is_reported = True  # by the process that hit it
            raise sign
    return task.get_result() if task is not None else function()


class _BackgroundTask(Generic[T]):
    """Work in a thread of its own, while the main thread talks to the other processes."""

    def __init__(self, function: Callable[[], T]):
        self.work = function
        self.failure: BaseException | None = None
        self.results: list[T] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.results.append(self.work())
        except BaseException as error:
            self.failure = error

    def poll_status(self) -> Any:
        """How it stands, after a little time."""
        self.thread.join(HEARTBEAT_SECONDS)
        return WORKING if self.thread.is_alive() else self.failure

    def get_result(self) -> T:
        return self.results[0]
