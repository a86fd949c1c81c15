"""Long work that one process on each machine does first, so that the others find it done.

The others do not wait in one long collective, which would run into the time limit of the process group: as long as
somebody works, all processes give each other a sign of life every few seconds.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..errors import UserError

SECONDS_BETWEEN_SIGNS = 2.0

T = TypeVar("T")
Sign = BaseException | str | None
"""What went wrong, ``WORKING``, or nothing any more."""
WORKING = "working"


def first_here(work: Callable[[], T], is_first: bool, gather: Callable[[Sign], list[Sign]]) -> T:
    """``work()`` on processes that are first, then on the others; when it fails on one, it fails on all.

    ``gather`` brings together what every process has to say, and all have to call it equally often.
    """
    task = _Background(work) if is_first else None
    while True:
        signs = gather(task.sign() if task is not None else None)
        if WORKING not in signs:
            break
    if task is not None and task.failure is not None:
        raise task.failure
    for sign in signs:
        if isinstance(sign, BaseException):
            if isinstance(sign, UserError):
                sign.is_told = True  # by the process that hit it
            raise sign
    return task.result() if task is not None else work()


class _Background(Generic[T]):
    """Work in a thread of its own, while the main thread talks to the other processes."""

    def __init__(self, work: Callable[[], T]):
        self.work = work
        self.failure: BaseException | None = None
        self.outcome: list[T] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.outcome.append(self.work())
        except BaseException as error:
            self.failure = error

    def sign(self) -> Any:
        """How it stands, after a little time."""
        self.thread.join(SECONDS_BETWEEN_SIGNS)
        return WORKING if self.thread.is_alive() else self.failure

    def result(self) -> T:
        return self.outcome[0]
