"""Figures for the person who waits and for experiment trackers."""

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.options import flat
from ..config.toml_lines import read_toml
from ..distributed.strategy import DataParallel
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
        is_late = now - self.read_at >= SECONDS_BETWEEN_READINGS
        if is_late or not self.shown or run.state.step >= run.plan.steps:
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


def start_trackers(config: RunConfig, strategy: DataParallel) -> None:
    """Open the trackers that were asked for; settings go to them only when ``log_config`` says so."""
    log = config.log
    settings = shareable(config) if log.log_config else {}
    arguments: dict[str, Any] = read_toml(Path(log.log_tracker_config))[0] if log.log_tracker_config else {}
    if log.wandb_run_name:
        arguments.setdefault("wandb", {}).setdefault("name", log.wandb_run_name)
    strategy.start_trackers(log.log_tracker_name or "network_train", settings, arguments)


def shareable(config: RunConfig) -> dict[str, Any]:
    """The settings without paths and free text, in types that every tracker takes."""
    private = {"pretrained_model_name_or_path", "dataset_config", "output_dir", "logging_dir", "sample_prompts",
               "log_tracker_config", "console_log_file", "training_comment"}  # fmt: skip
    plain = (bool, int, float, str)
    return {name: value if isinstance(value, plain) else str(value)
            for name, value in flat(config).items() if name not in private and value is not None}  # fmt: skip
