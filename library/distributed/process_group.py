"""How processes talk to each other: backend, meeting point and patience."""

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

from .world import World

DEFAULT_TIMEOUT_MINUTES = 30
"""Minutes that one process waits for the others where nobody says how long; torch has 10 for nccl, and 30 for gloo."""


def select_backend(device: str, is_windows: bool) -> str | None:
    """gloo works everywhere, nccl with CUDA but not on Windows; ``None``: accelerate knows what the device needs."""
    if is_windows or device == "cpu":
        return "gloo"
    return "nccl" if device == "cuda" else None


def build_process_group_kwargs(world: World, timeout_minutes: int | None) -> InitProcessGroupKwargs | None:
    """How this process joins the others; ``None`` when the launcher started it alone."""
    if not world.needs_process_group:
        return None
    return InitProcessGroupKwargs(
        backend=select_backend(world.device_type, world.is_windows),
        # torch for Windows is built without libuv, and its store asks for libuv all the same.
        init_method="env://?use_libuv=False" if world.is_windows else None,
        timeout=timedelta(minutes=timeout_minutes or DEFAULT_TIMEOUT_MINUTES),
    )


def set_group_timeouts(timeout: timedelta) -> None:
    """Let no group of some processes have less patience than the group of all, which torch does not do by itself."""
    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        if dist.get_backend(group) in ("gloo", "nccl"):  # torch knows how to tell these
            c10d._set_pg_timeout(timeout, group)


def can_destroy_group_alone() -> bool:
    """Whether a process may end its group while others wait in it.

    gloo closes its connections.  nccl finishes first what is on its way, and waits until the others end the group, too.
    """
    return not dist.is_initialized() or dist.get_backend() == "gloo"


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


GLOO_DRAIN_SECONDS = 0.2


def drain_gloo_threads() -> None:
    """Give the threads that carry messages the time to drop the last one; call it before the process group ends.

    A gloo thread needs Python's lock to drop a message that holds a tensor, and the end of the group waits for the
    thread while it holds that lock: a process that ends too soon after its last message can wait forever.
    """
    time.sleep(GLOO_DRAIN_SECONDS)
