"""Metrics of a run: the .metrics.jsonl file, the progress bar, and losses by timestep, bucket and dataset.

The average loss is that of the last 100 steps.  Trackers (wandb, TensorBoard) are in ``trackers``, MFU in
``profiler``.
"""

import json
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..adapters.update_norms import compute_layer_update_norms, find_adapter_layers
from ..atomic_files import write_atomic
from ..distributed.device_memory import get_peak_memory
from ..log import ProgressBar
from ..report.metric_series import read_metrics
from ..trackers import Trackers
from .callbacks import combine_norms
from .state import StepMetrics, TrainingRun

logger = logging.getLogger(__name__)


class MetricsFile:
    """One JSON line per step; a run resumed after step n keeps the lines up to n and appends."""

    def __init__(self, path: Path, from_step: int):
        self.path, self.is_writable = path, True
        self.previous_losses: list[float] = []
        """Losses of the steps before, in a resumed run, without skipped steps."""
        self._try_write(lambda: self._start_file(from_step))

    def write_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line; a file that cannot be written is given up with one warning."""
        values = {name: _to_json_value(value) for name, value in metrics.items()}
        line = json.dumps({"step": step, **values}, ensure_ascii=False) + "\n"
        if self.is_writable:
            self._try_write(lambda: self._append_line(line))

    def _start_file(self, from_step: int) -> None:
        kept = [line for line in read_metrics(self.path) if line["step"] <= from_step] if from_step else []
        self.previous_losses = [line["loss/current"] for line in kept if line.get("loss/current") is not None]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
        write_atomic(self.path, text.encode())

    def _append_line(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _try_write(self, function: Any) -> None:
        try:
            function()
        except OSError as error:
            self.is_writable = False
            logger.warning("%s: cannot be written and is given up: %s", self.path, error.strerror)


def _to_json_value(value: Any) -> Any:
    """Return None for NaN and Inf, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


TIMESTEP_BINS = 10


def compute_grouped_losses(run: TrainingRun, metrics: Sequence[StepMetrics]) -> Mapping[str, float]:
    """Compute the mean loss by timestep, bucket and dataset over the images of these steps; collective.

    All ranks know from the plan which image is in which bucket, so only timesteps and losses are gathered.
    """
    strategy = run.strategy
    if strategy.has_loss:
        stats = [stats for item in metrics for stats in item.micro_batches]
        table = torch.cat([torch.stack([each.noise_fractions.float(), each.losses.float()]) for each in stats], dim=1)
        table = table.T.contiguous()
    else:  # a pipeline stage without the loss gathers a table of the same size
        count = sum(len(batch.sample_indices) for item in metrics for batch in run.plan.batch_plan.get_step(item.step))
        table = torch.zeros(count // strategy.data_parallel_size, 2, device=strategy.device)
    rows = strategy.comm.all_gather_tensor(table).tolist()
    loss_ranks, rows_per_rank = strategy.loss_ranks, len(rows) // strategy.comm.world_size
    groups: defaultdict[str, list[float]] = defaultdict(list)
    start = 0
    for item in metrics:
        for batch in run.plan.batch_plan.get_step(item.step):
            bucket = run.plan.batch_plan.buckets[batch.bucket_index]
            shard_size = len(batch.sample_indices) // len(loss_ranks)
            for index, is_real in enumerate(batch.is_real):
                rank, offset = divmod(index, shard_size)
                timestep, loss = rows[loss_ranks[rank] * rows_per_rank + start + offset]
                if is_real and math.isfinite(loss):
                    low = min(int(timestep * TIMESTEP_BINS), TIMESTEP_BINS - 1)
                    groups[f"loss/timestep/{low / TIMESTEP_BINS:.1f}-{(low + 1) / TIMESTEP_BINS:.1f}"].append(loss)
                    groups[f"loss/bucket/{bucket.format_size()}"].append(loss)
                    groups[f"loss/dataset/{bucket.dataset_index_in_file + 1}"].append(loss)
            start += shard_size
    return {name: sum(values) / len(values) for name, values in sorted(groups.items())}


class TrainingLogger:
    """Log metrics to the progress bar, the metrics file and the trackers."""

    def __init__(self, progress: ProgressBar, metrics_file: MetricsFile | None, trackers: Trackers, samples: int = 0):
        self.progress, self.metrics_file, self.trackers = progress, metrics_file, trackers
        self.recent_losses: deque[float] = deque(
            metrics_file.previous_losses if metrics_file is not None else (), maxlen=100
        )
        self.progress_fields: dict[str, str] = {}
        self.adapted_layers: dict[str, nn.Module] = {}
        self.last_logged_at, self.last_logged_samples = time.monotonic(), samples

    @property
    def has_trackers(self) -> bool:
        return self.trackers.has_trackers

    def advance_progress(self, run: TrainingRun) -> None:
        """Advance the progress bar, or move it back after a rollback."""
        self.progress.update(self.progress_fields, run.state.step - self.progress.completed)

    def log_steps(self, run: TrainingRun, metrics: Sequence[StepMetrics]) -> None:
        """Log the metrics of these steps; collective."""
        self.adapted_layers = self.adapted_layers or find_adapter_layers(run.strategy.unwrap_model(run.model))
        straggler = run.strategy.find_straggler()
        latest = {**compute_grouped_losses(run, metrics), **self._measure_throughput(run, metrics)}
        if self.adapted_layers:  # there are none in a full training
            latest["update/norm"] = combine_norms(compute_layer_update_norms(self.adapted_layers).values())
        if straggler is not None:
            latest |= {"speed/slowest_rank": straggler.rank, "speed/lost_to_slowest": straggler.lost_fraction}
        for item in metrics:
            values = self._build_step_values(run, item)
            if item is metrics[-1]:
                values |= latest
            self._write_values(run, values, item.step + 1)
        self.progress_fields = self._format_progress_fields(metrics[-1], latest)
        if straggler is not None:
            host, lost = run.strategy.comm.hostnames[straggler.rank], straggler.lost_fraction
            self.progress_fields["slowest"] = f"rank {straggler.rank} on {host} ({lost:.0%} of the time lost)"

    def log_values(self, run: TrainingRun, values: Mapping[str, float]) -> None:
        """Log finite values at the current step."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._write_values(run, finite, run.state.step)

    def _write_values(self, run: TrainingRun, values: dict[str, Any], step: int) -> None:
        if self.metrics_file is not None:
            self.metrics_file.write_step(step, values)
        self.trackers.log_metrics(values, step)

    def _build_step_values(self, run: TrainingRun, metrics: StepMetrics) -> dict[str, Any]:
        loss = float(metrics.loss)
        if math.isfinite(loss):  # skipped steps are not averaged
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
        rates = {
            "lr" if name == "unet" else f"lr {name}": f"{float(rate):.2e}"
            for name, rate in last_metrics.learning_rates.items()
        }
        return {
            "loss": f"{self._compute_average_loss():.4f}",
            **rates,
            "steps/s": f"{throughput['speed/steps_per_second']:.2f}",
            "samples/s": f"{throughput['speed/samples_per_second']:.1f}",
        }

    def log_previews(self, run: TrainingRun, previews: Mapping[str, Mapping[str, bytes]]) -> None:
        """Log previews to the trackers; their files are on disk anyway."""
        self.trackers.log_previews(previews, run.state.step)
