"""Figures for the person who waits and for experiment trackers."""

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.options import flat, options_of
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
                **{f"lr/{name}": float(rate) for name, rate in figures.learning_rates.items()},
                "gradient_norm": float(figures.gradient_norm),
                "epoch": run.plan.batches.epoch_of(step - 1) + 1,
            }
            self._send(run, {**values, **rates}, step)
        self.shown = {
            "loss": f"{sum(self.recent) / len(self.recent):.4f}",
            **{
                "lr" if name == "unet" else f"lr {name}": f"{float(rate):.2e}"
                for name, rate in self.waiting[-1][1].learning_rates.items()
            },
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
    wandb = arguments.setdefault("wandb", {})
    wandb["settings"] = PRIVATE | wandb.get("settings", {})
    if log.wandb_run_name:
        wandb.setdefault("name", log.wandb_run_name)
    strategy.start_trackers(log.log_tracker_name or "network_train", settings, arguments)


PRIVATE = {"x_disable_meta": True, "disable_git": True, "disable_code": True, "disable_job_creation": True,
           "console": "off"}  # fmt: skip
"""wandb sends the command line, the program's path, the git remote and the terminal unless it is told not to."""

SHAREABLE_TEXTS = {"network_module", "optimizer_type", "optimizer_args"}
"""Texts that hold no path and nothing a person wrote."""


def shareable(config: RunConfig) -> dict[str, Any]:
    """The settings that are numbers, switches and choices, in types that every tracker takes."""
    values = flat(config)
    open_ones = [option.name for option in options_of(RunConfig)
                 if option.kind is not str or option.name in SHAREABLE_TEXTS]  # fmt: skip
    plain = (bool, int, float, str)
    return {name: values[name] if isinstance(values[name], plain) else str(values[name])
            for name in open_ones if values[name] is not None}  # fmt: skip
