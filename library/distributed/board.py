"""Words and counts that processes leave for each other and read without waiting.

Nothing here is a collective, so no time limit of the process group applies: while one process works for an hour, the
others may look at the board now and then.
"""

from typing import Any

import torch.distributed as dist


class Board:
    """What stands under one topic, the same on every process."""

    def __init__(self, topic: str, store: Any = None):
        # The store through which the processes found each other, which lives as long as their group.
        torch_dist: Any = dist
        if store is None:
            joined = dist.is_initialized()
            store = torch_dist.distributed_c10d._get_default_store() if joined else torch_dist.HashStore()
        self._store = torch_dist.PrefixStore(topic, store)

    def add(self, name: str, amount: int) -> int:
        """Raise a count that begins at 0; return what it is now."""
        return int(self._store.add(name, amount))

    def count(self, name: str) -> int:
        """What a count is now."""
        return self.add(name, 0)

    def tell(self, name: str, word: str) -> None:
        """Leave a word for all."""
        self._store.set(name, word)

    def told(self, name: str) -> str | None:
        """The word that somebody left, if any."""
        return str(self._store.get(name).decode()) if self._store.check([name]) else None
