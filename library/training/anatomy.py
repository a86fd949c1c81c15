"""``--profile_steps``: where the time of a step goes, how much of the device it uses, and a trace of one step.

The steps are cut in three: in the first the run is left alone and only its pace is taken, in the second each part of a
step is waited for and timed, and the last one is traced.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config.values import Steps
from ..distributed.devices import device_title, wait_for
from ..distributed.peaks import peak_flops
from .flops import Calls
from .job import Action, Run
from .stopwatch import OTHER, Stopwatch

logger = logging.getLogger(__name__)

PARTS = {"data": "data", "encode": "encode", "forward": "forward", "backward": "backward",
         "exchange": "communication", "optimizer": "optimizer", OTHER: OTHER}  # fmt: skip
"""Phases of a step, and what they are called here."""


@dataclass
class _Between:
    """Done between steps, before or after all else that is done there."""

    is_wanted: Callable[[Run], bool]
    work: Callable[[Run], None]
    can_wait: bool = False

    def is_due(self, run: Run) -> bool:
        return self.is_wanted(run)

    def __call__(self, run: Run) -> None:
        self.work(run)


class Anatomy:
    """Its actions stand around all others, so that nothing that happens between steps is taken for a step."""

    def __init__(self, steps: Steps, trace: Path):
        self.steps, self.trace = steps, trace
        timed = (steps.last - steps.first) // 2
        self.paced = steps.last - steps.first - timed
        start = steps.first - 1
        self.edges = (start, start + self.paced, steps.last - 1, steps.last)
        self.calls = Calls()
        self.pace = self.communication = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stage = ExitStack()
        self._reached = -1

    def around(self, run: Run) -> list[Action]:
        """The actions of a run with these."""
        if run.state.step >= self.edges[0]:
            logger.warning("--profile_steps %s: nothing is told of them, for the run begins after step %d",
                           self.steps, run.state.step)  # fmt: skip
        elif self.steps.last > run.plan.steps:
            logger.warning("--profile_steps %s: not all is told of them, for the run ends with step %d",
                           self.steps, run.plan.steps)  # fmt: skip
        others = run.actions

        def is_wanted(run: Run) -> bool:
            step = run.state.step
            is_inside = self.edges[0] < step < self.edges[-1]
            return step in self.edges or (is_inside and any(action.is_due(run) for action in others))

        return [_Between(is_wanted, lambda run: self._stage.close()), *others, _Between(is_wanted, self._next)]

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step."""
        count = self.edges[2] - self.edges[1]
        return {part: self.seconds[phase] / count for phase, part in PARTS.items()}

    def _next(self, run: Run) -> None:
        if run.state.step in self.edges:
            place = self.edges.index(run.state.step)
            if place != self._reached + 1:  # a run that goes on behind the first of these steps
                return
            self._reached = place
        stages = self._pacing, self._timing, self._tracing
        if 0 <= self._reached < len(stages):
            self._stage.enter_context(stages[self._reached](run))
        elif self._reached == len(stages):
            self._tell(run)

    @contextmanager
    def _pacing(self, run: Run) -> Iterator[None]:
        with self.calls.of(_denoiser(run)):
            wait_for(run.strategy.device)
            started = time.perf_counter()
            yield
            wait_for(run.strategy.device)
        self.pace += (time.perf_counter() - started) / self.paced

    @contextmanager
    def _timing(self, run: Run) -> Iterator[None]:
        stopwatch = Stopwatch(lambda: wait_for(run.strategy.device))
        stopwatch.start()
        yield
        stopwatch.stop()
        for phase, seconds in stopwatch.seconds.items():
            self.seconds[phase] += seconds

    @contextmanager
    def _tracing(self, run: Run) -> Iterator[None]:
        if not run.strategy.is_main:
            yield
            return
        with torch.profiler.profile() as profile:
            yield
            wait_for(run.strategy.device)
        self.communication = _together(_exchanges(profile.events())) / 1e6
        try:
            profile.export_chrome_trace(str(self.trace))
        except (OSError, RuntimeError) as error:  # what is only looked at does not spoil the run
            logger.warning("%s: cannot be written: %s", self.trace, error)

    def _tell(self, run: Run) -> None:
        figures = {f"profile/{part}_seconds": seconds for part, seconds in self.parts.items()}
        figures |= {"profile/step_seconds": self.pace, "profile/communication_in_trace_seconds": self.communication}
        flops = self.calls.flops(_denoiser(run)) / self.paced / run.strategy.together
        peak = peak_flops(run.strategy.device, run.strategy.precision)
        if flops:
            figures["profile/step_teraflop"] = flops / 1e12
        if flops and peak is not None:
            figures["profile/mfu"] = flops / self.pace / peak
        run.teller.noted(run, figures)
        for line in self._lines(run, flops, peak):
            logger.info("%s", line)

    def _lines(self, run: Run, flops: float, peak: float | None) -> Iterator[str]:
        yield f"steps {self.edges[1] + 1} to {self.edges[2]}, each part waited for:"
        yield from _table(self.parts)
        yield (f"steps {self.steps.first} to {self.edges[1]}, left alone: {1e3 * self.pace:.4g} ms a step; in step"
               f" {self.steps.last}, which is traced and slower, messages are on their way for"
               f" {1e3 * self.communication:.4g} ms")  # fmt: skip
        yield from self._share_of_peak(run, flops, peak)
        if self.trace.exists():
            yield f"trace of step {self.steps.last}: {self.trace}"

    def _share_of_peak(self, run: Run, flops: float, peak: float | None) -> Iterator[str]:
        if not flops:
            yield "no process calls the denoiser as a whole, so its operations are not counted"
            return
        pace = f"the denoiser computes {flops / 1e12:.4g} TFLOP a step, {flops / self.pace / 1e12:.4g} a second"
        title = device_title(run.strategy.device) or "this processor"
        if peak is None:
            yield f"{pace}; what {title} can at most in precision {run.strategy.precision} is not known, so no MFU"
        else:
            yield f"{pace}: MFU {100 * flops / self.pace / peak:.1f} % of the {peak / 1e12:g} of {title}"


def _denoiser(run: Run) -> torch.nn.Module:
    model: torch.nn.Module = getattr(run.task.pipe, run.task.family.denoiser)
    return model


def _table(parts: Mapping[str, float]) -> Iterator[str]:
    whole = sum(parts.values())
    for part, seconds in {**parts, "together": whole}.items():
        yield f"  {part:<14}{1e3 * seconds:>10.4g} ms {100 * seconds / whole:>6.1f} %"


def _exchanges(events: Iterable[object]) -> Iterator[tuple[float, float]]:
    """From when to when, in microseconds, messages between processes were on their way."""
    for event in events:
        name, span = str(getattr(event, "name", "")), getattr(event, "time_range", None)
        if span is not None and (name.startswith("gloo:") or name.startswith("ncclDev")):
            yield span.start, span.end


def _together(spans: Iterable[tuple[float, float]]) -> float:
    """The length of all, where they overlap counted once."""
    length, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length
