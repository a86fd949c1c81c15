"""Straggler detection: how long each rank computes in a step before it waits for the others in the all-reduce."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TimeMark = Any
"""The mark of a time: a device event, or the clock of the CPU."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    lost_fraction: float  # the part of the time that the others wait for it on average


class StragglerMonitor:
    """Records events in each step, and reads them when the device is synchronized anyway.

    All ranks leave an all-reduce at the same time; from there until its own gradients are ready, each computes alone.
    """

    def __init__(self, device: torch.device, world_size: int):
        self._device, self._is_single_process = device, world_size == 1
        self._step_start: TimeMark | None = None
        self._gradients_ready: TimeMark | None = None
        self._steps: list[tuple[TimeMark, TimeMark, TimeMark]] = []

    def mark_gradients_ready(self) -> None:
        """Record that this rank's gradients are ready, and the all-reduce starts."""
        if not self._is_single_process:
            self._gradients_ready = self._record_mark()

    def mark_step_end(self) -> None:
        """Record that all ranks have finished the step."""
        if self._is_single_process:
            return
        now = self._record_mark()
        if self._step_start is not None and self._gradients_ready is not None:
            self._steps.append((self._step_start, self._gradients_ready, now))
        self._step_start, self._gradients_ready = now, None

    def pop_times(self) -> tuple[float, float]:
        """Return the seconds computed alone and in total since the last call, and skip the next step.

        Callbacks between the steps contain collectives, which would count as this rank's own work.
        """
        steps, self._steps, self._step_start = self._steps, [], None
        busy = sum(_measure_seconds(start, ready) for start, ready, _ in steps)
        return busy, sum(_measure_seconds(start, end) for start, _, end in steps)

    def _record_mark(self) -> TimeMark:
        if self._device.type == "cpu":
            return time.perf_counter()
        event: Any = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def find_straggler(busy_and_total: Sequence[Sequence[float]]) -> Straggler | None:
    """Find the slowest rank from the seconds of each; ``None`` where nothing was measured."""
    busy = [seconds for seconds, _ in busy_and_total]
    total = max(seconds for _, seconds in busy_and_total)
    if len(busy) < 2 or not total:
        return None
    rank = max(range(len(busy)), key=busy.__getitem__)
    others = (sum(busy) - busy[rank]) / (len(busy) - 1)
    return Straggler(rank, (busy[rank] - others) / total)


def _measure_seconds(start: TimeMark, end: TimeMark) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
