"""torch before 2.8 waits for the last of several messages between stages, and loses the others where a backend does
not make one of all of them, as gloo does not: stages hang, or compute with what has not come."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from .world import torch_version


def wait_for_every_message() -> None:
    """From now on pipelines do."""
    if torch_version() < (2, 8):
        torchs: Any = schedules
        torchs._batch_p2p = _sent


def _sent(messages: list[dist.P2POp], desc: str | None = None) -> "_All | None":
    return _All(dist.batch_isend_irecv(messages)) if messages else None


class _All:
    """Of several messages."""

    def __init__(self, works: Sequence[Any]):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
