"""How long each process works in a step before it waits for the others: who is the slowest, and what it costs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

Moment = Any
"""A mark in the device's order of work, or the time where the device is the processor itself."""


@dataclass(frozen=True)
class Slowest:
    """The process that the others wait for."""

    rank: int
    share: float  # of the time, which the others spend on average waiting for it


class Pace:
    """Marks in a step, which are read when the device is waited for anyway.

    All processes leave an exchange at the same time; from there to its own gradients each works alone.
    """

    def __init__(self, device: torch.device, processes: int):
        self._device, self._is_alone = device, processes == 1
        self._began: Moment | None = None
        self._ready: Moment | None = None
        self._steps: list[tuple[Moment, Moment, Moment]] = []

    def ready(self) -> None:
        """The gradients of this process are on their way."""
        if not self._is_alone:
            self._ready = self._now()

    def together(self) -> None:
        """All processes have finished the step."""
        if self._is_alone:
            return
        now = self._now()
        if self._began is not None and self._ready is not None:
            self._steps.append((self._began, self._ready, now))
        self._began, self._ready = now, None

    def read(self) -> tuple[float, float]:
        """Seconds worked alone, and all that passed, since it was read; the next step is left out.

        What is done between steps, with the others, would count as this process's own work.
        """
        steps, self._steps, self._began = self._steps, [], None
        return sum(_seconds(began, ready) for began, ready, _ in steps), sum(
            _seconds(one, end) for one, _, end in steps
        )

    def watch(self, model: nn.Module) -> None:
        """Know when the last gradients of ``model`` are on their way, if DDP exchanges them."""
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                module.register_comm_hook(None, self._exchanged)

    def _exchanged(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined, unused-ignore]
        if bucket.is_last():
            self.ready()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    def _now(self) -> Moment:
        if self._device.type == "cpu":
            return time.perf_counter()
        event: Any = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def slowest(worked_and_passed: Sequence[Sequence[float]]) -> Slowest | None:
    """By rank; nothing where nothing was measured."""
    worked = [one for one, _ in worked_and_passed]
    passed = max(all_of for _, all_of in worked_and_passed)
    if len(worked) < 2 or not passed:
        return None
    rank = max(range(len(worked)), key=worked.__getitem__)
    others = (sum(worked) - worked[rank]) / (len(worked) - 1)
    return Slowest(rank, (worked[rank] - others) / passed)


def _seconds(one: Moment, other: Moment) -> float:
    if isinstance(one, float):
        return float(other - one)
    other.synchronize()
    return float(one.elapsed_time(other)) / 1000
