"""Sending and receiving over gloo for tensors on a device, which gloo does for tensors in host memory alone.

Its collectives copy through host memory by themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import schedules


class StagedReceive:
    """A receive whose tensor is filled when it is waited for."""

    def __init__(self, work: Any, staged: torch.Tensor, tensor: torch.Tensor) -> None:
        self.work, self.staged, self.tensor = work, staged, tensor

    def wait(self) -> bool:
        self.work.wait()
        with torch.no_grad():
            self.tensor.copy_(self.staged)
        return True


def send_and_receive(operations: Sequence[dist.P2POp]) -> list[Any]:
    """Do what ``torch.distributed.batch_isend_irecv`` does, through host memory."""
    works: list[Any] = []
    for each in operations:
        if each.op is dist.isend:
            staged = each.tensor.detach().cpu().contiguous()
            works.append(dist.isend(staged, group=each.group, tag=each.tag, group_dst=each.group_peer))
        else:
            staged = torch.empty(each.tensor.shape, dtype=each.tensor.dtype)
            work = dist.irecv(staged, group=each.group, tag=each.tag, group_src=each.group_peer)
            works.append(StagedReceive(work, staged, each.tensor))
    return works


def stage_point_to_point() -> None:
    """Replace torch's function wherever a pipeline calls it, or what calls the operations one by one."""
    modules: tuple[Any, ...] = (dist, distributed_c10d)
    for module in modules:
        module.batch_isend_irecv = send_and_receive
    pipelining: Any = schedules
    pipelining._batch_p2p = lambda operations, desc=None: send_and_receive(operations)
