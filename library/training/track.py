"""Figures for the person who waits and for experiment trackers."""

import logging
import time
from collections import deque
from typing import Any

from ..log import Progress
from .loop import Figures, Run

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_READINGS = 0.5
"""Reading a figure makes the device finish its work first, so figures are read together."""


class Track:
    """Collects the figures of each step and tells them, all of them, a little later."""

    def __init__(self, progress: Progress):
        self.progress, self.tracker_works = progress, True
        self.waiting: list[tuple[int, Figures]] = []
        self.recent: deque[float] = deque(maxlen=100)
        self.shown: dict[str, str] = {}
        self.read_at = time.monotonic()
        self.samples_at = 0

    def __call__(self, run: Run, figures: Figures) -> None:
        self.waiting.append((run.state.step, figures))
        now = time.monotonic()
        if now - self.read_at >= SECONDS_BETWEEN_READINGS or run.state.step >= run.plan.steps:
            self._read(run, now)
        self.progress.advance(self.shown)

    def _read(self, run: Run, now: float) -> None:
        seconds = max(now - self.read_at, 1e-9)
        rates = {
            "speed/steps_per_second": len(self.waiting) / seconds,
            "speed/samples_per_second": (run.state.samples - self.samples_at) / seconds,
        }
        for step, figures in self.waiting:
            loss = float(figures.loss)
            self.recent.append(loss)
            values = {
                "loss/current": loss,
                "loss/average": sum(self.recent) / len(self.recent),
                "lr/unet": figures.learning_rate,
                "gradient_norm": float(figures.gradient_norm),
                "epoch": run.plan.batches.epoch_of(step - 1) + 1,
            }
            self._send(run, {**values, **rates}, step)
        self.shown = {
            "loss": f"{sum(self.recent) / len(self.recent):.4f}",
            "lr": f"{self.waiting[-1][1].learning_rate:.2e}",
            "steps/s": f"{rates['speed/steps_per_second']:.2f}",
            "samples/s": f"{rates['speed/samples_per_second']:.1f}",
        }
        self.waiting.clear()
        self.read_at, self.samples_at = now, run.state.samples

    def _send(self, run: Run, values: dict[str, Any], step: int) -> None:
        """Trackers are company, not crew: one that fails is left behind and the run goes on."""
        if not self.tracker_works:
            return
        try:
            run.strategy.log(values, step)
        except Exception as error:
            self.tracker_works = False
            logger.warning("the tracker failed and is not used any more; training goes on: %s", error)
