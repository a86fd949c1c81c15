"""How long each process works in a step before it waits for the others: who is the slowest, and what it costs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TimeMark = Any
"""A mark in the device's order of work, or the time where the device is the processor itself."""


@dataclass(frozen=True)
class Straggler:
    """The process that the others wait for."""

    rank: int
    lost_fraction: float  # of the time, which the others spend on average waiting for it


class StragglerMonitor:
    """Marks in a step, which are read when the device is waited for anyway.

    All processes leave an exchange at the same time; from there to its own gradients each works alone.
    """

    def __init__(self, device: torch.device, world_size: int):
        self._device, self._is_single_process = device, world_size == 1
        self._step_start: TimeMark | None = None
        self._gradients_ready: TimeMark | None = None
        self._steps: list[tuple[TimeMark, TimeMark, TimeMark]] = []

    def mark_gradients_ready(self) -> None:
        """The gradients of this process are on their way."""
        if not self._is_single_process:
            self._gradients_ready = self._record_mark()

    def mark_step_end(self) -> None:
        """All processes have finished the step."""
        if self._is_single_process:
            return
        now = self._record_mark()
        if self._step_start is not None and self._gradients_ready is not None:
            self._steps.append((self._step_start, self._gradients_ready, now))
        self._step_start, self._gradients_ready = now, None

    def pop_times(self) -> tuple[float, float]:
        """Seconds worked alone, and all that passed, since it was read; the next step is left out.

        What is done between steps, with the others, would count as this process's own work.
        """
        steps, self._steps, self._step_start = self._steps, [], None
        return sum(_measure_seconds(began, ready) for began, ready, _ in steps), sum(
            _measure_seconds(one, end) for one, _, end in steps
        )

    def _record_mark(self) -> TimeMark:
        if self._device.type == "cpu":
            return time.perf_counter()
        event: Any = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def find_straggler(busy_and_total: Sequence[Sequence[float]]) -> Straggler | None:
    """By rank; nothing where nothing was measured."""
    worked = [one for one, _ in busy_and_total]
    passed = max(all_of for _, all_of in busy_and_total)
    if len(worked) < 2 or not passed:
        return None
    rank = max(range(len(worked)), key=worked.__getitem__)
    others = (sum(worked) - worked[rank]) / (len(worked) - 1)
    return Straggler(rank, (worked[rank] - others) / passed)


def _measure_seconds(start: TimeMark, end: TimeMark) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
