"""Words and counts that processes leave for each other and read without waiting.

Nothing here is a collective, so no time limit of the process group applies: while one process works for an hour, the
others may look at the board now and then.
"""

from typing import Any

import torch.distributed as dist


class KeyValueStore:
    """What stands under one topic, the same on every process."""

    def __init__(self, prefix: str, store: Any = None):
        # The store through which the processes found each other, which lives as long as their group.
        torch_dist: Any = dist
        if store is None:
            joined = dist.is_initialized()
            store = torch_dist.distributed_c10d._get_default_store() if joined else torch_dist.HashStore()
        self._store = torch_dist.PrefixStore(prefix, store)

    def add(self, key: str, amount: int) -> int:
        """Raise a count that begins at 0; return what it is now."""
        return int(self._store.add(key, amount))

    def read_counter(self, key: str) -> int:
        """What a count is now."""
        return self.add(key, 0)

    def set(self, key: str, value: str) -> None:
        """Leave a word for all."""
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """The word that somebody left, if any."""
        return str(self._store.get(key).decode()) if self._store.check([key]) else None
