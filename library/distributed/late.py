"""Something that may hang, watched from outside: a message in time, and an end."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from .board import KeyValueStore

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
