"""Figures for the person who waits, for a file, and for experiment trackers."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..adapters.update_norms import adapted_layers, norms_of
from ..config import RunConfig
from ..config.options import flat, options_of
from ..config.toml_lines import read_toml
from ..distributed.devices import peak_memory
from ..distributed.strategy import DataParallel
from ..log import Progress
from .job import Figures, Run
from .learnt import together
from .metrics import MetricsFile
from .shares import losses_by_kind

logger = logging.getLogger(__name__)


class Track:
    """Shows each step when it is sent on its way, and tells its figures when they are known."""

    def __init__(self, progress: Progress, file: MetricsFile | None, samples: int = 0):
        self.progress, self.file, self.tracker_works = progress, file, True
        self.recent: deque[float] = deque(file.losses if file is not None else (), maxlen=100)
        self.shown: dict[str, str] = {}
        self.layers: dict[str, nn.Module] = {}
        self.told_at, self.samples_then = time.monotonic(), samples

    def stepped(self, run: Run) -> None:
        """The bar goes on, or back where steps were taken back."""
        self.progress.advance(self.shown, run.state.step - self.progress.done)

    def told(self, run: Run, figures: Sequence[Figures]) -> None:
        """Tell the figures of these steps; every process has to call this."""
        self.layers = self.layers or adapted_layers(run.strategy.unwrapped(run.adapter))
        length = together(norms_of(self.layers).values())
        slowest = run.strategy.slowest()
        read = {**losses_by_kind(run, figures), **self._pace(run, figures), "update/norm": length}
        if slowest is not None:
            read |= {"speed/slowest_rank": slowest.rank, "speed/lost_to_slowest": slowest.share}
        for item in figures:
            values = self._of_step(run, item)
            if item is figures[-1]:
                values |= read
            self._hand_on(run, values, item.step + 1)
        self.shown = self._beside_the_bar(figures[-1], read)
        if slowest is not None:
            host = run.strategy.hosts[slowest.rank]
            self.shown["slowest"] = f"rank {slowest.rank} on {host} ({slowest.share:.0%} of the time lost)"

    def noted(self, run: Run, values: Mapping[str, float]) -> None:
        """Figures that are not of each step; what has no end is left out."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._hand_on(run, finite, run.state.step)

    def _hand_on(self, run: Run, values: dict[str, Any], step: int) -> None:
        if self.file is not None:
            self.file.add(step, values)
        self._company(lambda: run.strategy.log(values, step))

    def _of_step(self, run: Run, item: Figures) -> dict[str, Any]:
        loss = float(item.loss)
        if math.isfinite(loss):  # what was left out is in no mean
            self.recent.append(loss)
        return {
            "loss/current": loss,
            "loss/average": self._average(),
            **{f"lr/{name}": float(rate) for name, rate in item.learning_rates.items()},
            "gradient_norm": float(item.gradient_norm),
            "epoch": run.plan.batches.epoch_of(item.step) + 1,
            "data_wait_seconds": item.waited,
        }

    def _average(self) -> float:
        return sum(self.recent) / len(self.recent) if self.recent else math.nan

    def _pace(self, run: Run, figures: Sequence[Figures]) -> dict[str, float]:
        now = time.monotonic()
        seconds, samples = max(now - self.told_at, 1e-9), run.state.samples - self.samples_then
        self.told_at, self.samples_then = now, run.state.samples
        return {
            "speed/steps_per_second": len(figures) / seconds,
            "speed/samples_per_second": samples / seconds,
            "memory/peak_gb": max(map(peak_memory, run.strategy.devices)) / 1e9,
        }

    def _beside_the_bar(self, last: Figures, together: dict[str, float]) -> dict[str, str]:
        rates = {"lr" if name == "unet" else f"lr {name}": f"{float(rate):.2e}"
                 for name, rate in last.learning_rates.items()}  # fmt: skip
        return {
            "loss": f"{self._average():.4f}",
            **rates,
            "steps/s": f"{together['speed/steps_per_second']:.2f}",
            "samples/s": f"{together['speed/samples_per_second']:.1f}",
        }

    def pictured(self, run: Run, pictures: Mapping[str, bytes]) -> None:
        """Previews go to trackers; their files are there anyway."""
        self._company(lambda: run.strategy.log_pictures(pictures, run.state.step))

    def _company(self, work: Callable[[], None]) -> None:
        """Trackers are company, not crew: one that fails is left behind and the run goes on."""
        if not self.tracker_works:
            return
        try:
            work()
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
