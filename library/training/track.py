"""Figures for the person who waits, for a file, and for experiment trackers."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..adapters.update_norms import find_adapter_layers, compute_layer_update_norms
from ..config import RunConfig
from ..config.options import flatten_config, iter_options
from ..config.toml_lines import read_toml_with_lines
from ..distributed.devices import get_peak_memory
from ..distributed.strategy import Strategy
from ..log import ProgressBar
from .job import StepMetrics, TrainingRun
from .learnt import combine_norms
from .metrics import MetricsFile
from .shares import compute_grouped_losses

logger = logging.getLogger(__name__)


class TrainingLogger:
    """Shows each step when it is sent on its way, and tells its figures when they are known."""

    def __init__(self, progress: ProgressBar, metrics_file: MetricsFile | None, samples: int = 0):
        self.progress, self.metrics_file, self.has_working_tracker = progress, metrics_file, True
        self.recent_losses: deque[float] = deque(metrics_file.previous_losses if metrics_file is not None else (), maxlen=100)
        self.progress_fields: dict[str, str] = {}
        self.adapted_layers: dict[str, nn.Module] = {}
        self.last_logged_at, self.last_logged_samples = time.monotonic(), samples

    def advance_progress(self, run: TrainingRun) -> None:
        """The bar goes on, or back where steps were taken back."""
        self.progress.update(self.progress_fields, run.state.step - self.progress.completed)

    def log_steps(self, run: TrainingRun, metrics: Sequence[StepMetrics]) -> None:
        """Tell the figures of these steps; every process has to call this."""
        self.adapted_layers = self.adapted_layers or find_adapter_layers(run.strategy.unwrap_model(run.model))
        length = combine_norms(compute_layer_update_norms(self.adapted_layers).values())
        slowest = run.strategy.find_straggler()
        read = {**compute_grouped_losses(run, metrics), **self._measure_throughput(run, metrics), "update/norm": length}
        if slowest is not None:
            read |= {"speed/slowest_rank": slowest.rank, "speed/lost_to_slowest": slowest.lost_fraction}
        for item in metrics:
            values = self._build_step_values(run, item)
            if item is metrics[-1]:
                values |= read
            self._write_values(run, values, item.step + 1)
        self.progress_fields = self._format_progress_fields(metrics[-1], read)
        if slowest is not None:
            host = run.strategy.hostnames[slowest.rank]
            self.progress_fields["slowest"] = f"rank {slowest.rank} on {host} ({slowest.lost_fraction:.0%} of the time lost)"

    def log_values(self, run: TrainingRun, values: Mapping[str, float]) -> None:
        """Figures that are not of each step; what has no end is left out."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._write_values(run, finite, run.state.step)

    def _write_values(self, run: TrainingRun, values: dict[str, Any], step: int) -> None:
        if self.metrics_file is not None:
            self.metrics_file.write_step(step, values)
        self._call_tracker(lambda: run.strategy.log_metrics(values, step))

    def _build_step_values(self, run: TrainingRun, metrics: StepMetrics) -> dict[str, Any]:
        loss = float(metrics.loss)
        if math.isfinite(loss):  # what was left out is in no mean
            self.recent_losses.append(loss)
        return {
            "loss/current": loss,
            "loss/average": self._compute_average_loss(),
            **{f"lr/{name}": float(rate) for name, rate in metrics.learning_rates.items()},
            "gradient_norm": float(metrics.grad_norm),
            "epoch": run.plan.batch_plan.get_epoch(metrics.step) + 1,
            "data_wait_seconds": metrics.data_wait_seconds,
        }

    def _compute_average_loss(self) -> float:
        return sum(self.recent_losses) / len(self.recent_losses) if self.recent_losses else math.nan

    def _measure_throughput(self, run: TrainingRun, metrics: Sequence[StepMetrics]) -> dict[str, float]:
        now = time.monotonic()
        seconds, samples = max(now - self.last_logged_at, 1e-9), run.state.samples - self.last_logged_samples
        self.last_logged_at, self.last_logged_samples = now, run.state.samples
        return {
            "speed/steps_per_second": len(metrics) / seconds,
            "speed/samples_per_second": samples / seconds,
            "memory/peak_gb": max(map(get_peak_memory, run.strategy.devices)) / 1e9,
        }

    def _format_progress_fields(self, last_metrics: StepMetrics, throughput: dict[str, float]) -> dict[str, str]:
        rates = {"lr" if name == "unet" else f"lr {name}": f"{float(rate):.2e}"
                 for name, rate in last_metrics.learning_rates.items()}  # fmt: skip
        return {
            "loss": f"{self._compute_average_loss():.4f}",
            **rates,
            "steps/s": f"{throughput['speed/steps_per_second']:.2f}",
            "samples/s": f"{throughput['speed/samples_per_second']:.1f}",
        }

    def log_images(self, run: TrainingRun, images: Mapping[str, bytes]) -> None:
        """Previews go to trackers; their files are there anyway."""
        self._call_tracker(lambda: run.strategy.log_images(images, run.state.step))

    def _call_tracker(self, function: Callable[[], None]) -> None:
        """Trackers are company, not crew: one that fails is left behind and the run goes on."""
        if not self.has_working_tracker:
            return
        try:
            function()
        except Exception as error:
            self.has_working_tracker = False
            logger.warning("the tracker failed and is not used any more; training goes on: %s", error)


def start_trackers(config: RunConfig, strategy: Strategy) -> None:
    """Open the trackers that were asked for; settings go to them only when ``log_config`` says so."""
    log = config.log
    settings = collect_shareable_settings(config) if log.log_config else {}
    arguments: dict[str, Any] = read_toml_with_lines(Path(log.log_tracker_config))[0] if log.log_tracker_config else {}
    wandb = arguments.setdefault("wandb", {})
    wandb["settings"] = WANDB_PRIVATE_SETTINGS | wandb.get("settings", {})
    if log.wandb_run_name:
        wandb.setdefault("name", log.wandb_run_name)
    strategy.init_trackers(log.log_tracker_name or "network_train", settings, arguments)


WANDB_PRIVATE_SETTINGS = {"x_disable_meta": True, "disable_git": True, "disable_code": True, "disable_job_creation": True,
           "console": "off"}  # fmt: skip
"""wandb sends the command line, the program's path, the git remote and the terminal unless it is told not to."""

SHAREABLE_TEXT_OPTIONS = {"network_module", "optimizer_type", "optimizer_args"}
"""Texts that hold no path and nothing a person wrote."""


def collect_shareable_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that are numbers, switches and choices, in types that every tracker takes."""
    values = flatten_config(config)
    open_ones = [option.name for option in iter_options(RunConfig)
                 if option.value_type is not str or option.name in SHAREABLE_TEXT_OPTIONS]  # fmt: skip
    plain = (bool, int, float, str)
    return {name: values[name] if isinstance(values[name], plain) else str(values[name])
            for name in open_ones if values[name] is not None}  # fmt: skip
