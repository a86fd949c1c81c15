"""How long the parts of steps take, each waited for until the device has done it."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..distributed.memory import STOPWATCH

OTHER = "other"


class Stopwatch:
    """Seconds by part; a part inside of another counts for itself alone."""

    def __init__(self, wait: Callable[[], None]):
        """``wait`` lasts until the device has done everything."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._wait, self._open = wait, [OTHER]

    def start(self) -> None:
        """From now on, whatever ``phase`` names is timed."""
        self._wait()
        self._since, self._token = time.perf_counter(), STOPWATCH.set(self.part)

    def stop(self) -> None:
        """Until now."""
        self._turn()
        STOPWATCH.reset(self._token)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside is of this part."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        self._wait()
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now
