"""How processes talk to each other: backend, meeting point and patience."""

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
