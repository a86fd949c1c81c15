"""The process group of torch.distributed: backend, timeouts, teardown, and its key-value store.

It is created in rendezvous.py.
"""

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

from .world import World

DEFAULT_TIMEOUT_MINUTES = 30
"""The default of ``--ddp_timeout``, for all backends; torch's is 10 minutes for nccl and 30 for gloo."""

GLOO_DRAIN_SECONDS = 0.2


def select_backend(device_type: str, is_windows: bool) -> str | None:
    """Select gloo, or nccl for CUDA, which Windows lacks; ``None`` lets accelerate choose for other devices."""
    if is_windows or device_type == "cpu":
        return "gloo"
    return "nccl" if device_type == "cuda" else None


def build_process_group_kwargs(world: World, timeout_minutes: int | None) -> InitProcessGroupKwargs | None:
    """Build accelerate's process-group handler; ``None`` for a single process without a launcher."""
    if not world.needs_process_group:
        return None
    return InitProcessGroupKwargs(
        backend=select_backend(world.device_type, world.is_windows),
        # torch for Windows is built without libuv, but its TCPStore asks for it by default.
        init_method="env://?use_libuv=False" if world.is_windows else None,
        timeout=timedelta(minutes=timeout_minutes or DEFAULT_TIMEOUT_MINUTES),
    )


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of all existing groups; torch gives new subgroups its own default."""
    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        if dist.get_backend(group) in ("gloo", "nccl"):  # the backends that torch can set it for
            c10d._set_pg_timeout(timeout, group)


def can_destroy_group_alone() -> bool:
    """Whether one rank may destroy its group while others wait in a collective.

    gloo closes its connections.  nccl first finishes pending collectives, and waits until all ranks destroy the group.
    """
    return not dist.is_initialized() or dist.get_backend() == "gloo"


def drain_gloo_threads() -> None:
    """Let gloo's threads release their last message before the process group is destroyed.

    A gloo thread needs the GIL to release a message that holds a tensor, and destroying the group joins that thread
    with the GIL held: a rank that destroys its group right after its last collective can deadlock.
    """
    time.sleep(GLOO_DRAIN_SECONDS)


class KeyValueStore:
    """The rendezvous store under a prefix; in a single process, a store of its own."""

    def __init__(self, prefix: str, store: Any = None):
        torch_dist: Any = dist
        if store is None:
            is_initialized = dist.is_initialized()
            store = torch_dist.distributed_c10d._get_default_store() if is_initialized else torch_dist.HashStore()
        self._store = torch_dist.PrefixStore(prefix, store)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; return its new value."""
        return int(self._store.add(key, amount))

    def read_counter(self, key: str) -> int:
        return self.add(key, 0)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """Return the value, or ``None`` if no rank has set it."""
        return str(self._store.get(key).decode()) if self._store.check([key]) else None
