"""Something that may hang, watched from outside: a message in time, and an end."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from .board import Board

logger = logging.getLogger(__name__)

EXIT_CODE = 2
"""As for mistakes of the user's: something outside of the program has to change."""
SECONDS_FOR_AN_ANSWER = 3.0
SECONDS_AFTER_ANOTHER = 2.0
T = TypeVar("T")


@contextmanager
def watched(seconds: float, late: Callable[[], None]) -> Iterator[None]:
    """Call ``late`` in a thread of its own when the inside takes longer than this."""
    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tells(board: Board, *, is_first_here: bool) -> bool:
    """Whether this process is the one to tell; to be asked once.

    The store may not answer either.  Then one process of each machine tells.
    """
    return answer(lambda: board.add("late", 1), 1 if is_first_here else 2) == 1


def end_this_process(board: Board, message: str, *, is_first_here: bool) -> None:
    """Tell why, on one of the processes that come here, and end: what hangs in a library cannot be called back."""
    if tells(board, is_first_here=is_first_here):
        logger.error("%s", message)
    else:
        threading.Event().wait(SECONDS_AFTER_ANOTHER)  # whoever ends first takes the launcher along
    os._exit(EXIT_CODE)


def answer(ask: Callable[[], T], otherwise: T) -> T:
    """What ``ask`` gives, if it does within seconds."""
    found: list[T] = []

    def in_a_thread() -> None:
        with suppress(Exception):  # of whatever kind: then there is no answer
            found.append(ask())

    thread = threading.Thread(target=in_a_thread, daemon=True)
    thread.start()
    thread.join(SECONDS_FOR_AN_ANSWER)
    return found[0] if found else otherwise
