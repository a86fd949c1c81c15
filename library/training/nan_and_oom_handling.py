"""NaN and out-of-memory handling: roll back and skip NaN steps, recover from out of memory; report bad images.

Reading a loss waits for the device, so losses and gradient norms are read only every few steps and before anything is
written.  If one is NaN or Inf, adapter, optimizer and EMA roll back to a snapshot in host memory, and the steps run
again one by one to find the one to skip.

The message of a run that ends out of memory is written by ``failure_handling``, with the advice of ``oom_advice``.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..dataloader.batch import PixelBatch
from ..dataloader.images import BadSample
from ..dataloader.loader import StepBatches
from ..distributed.step_phases import OutOfMemory
from ..errors import UserError
from ..optim.optimizers import load_optimizer_state
from ..parallel.async_copy import HostSnapshot
from ..parallel.strategy import Strategy
from .state import SkippedStep, StepMetrics, TrainingRun
from .task import DiffusionTask

logger = logging.getLogger(__name__)


class TooManyFailures(UserError):
    """Too many images could not be read, or too many steps were NaN; the weights are those of the last good step."""


@dataclass
class BadSamples:
    """Images that became unreadable during the run, by name; too many of them end it."""

    max_invalid_images: int  # --max_invalid_images
    num_images: int
    problems: dict[str, str] = field(default_factory=dict)
    unreported: list[BadSample] = field(default_factory=list)  # images of this rank since the last synchronization

    def add(self, problems: Sequence[BadSample]) -> None:
        """Add the unreadable images of this rank."""
        self.unreported += problems

    def sync_across_ranks(self, strategy: Strategy) -> None:
        """Share unreadable images across ranks; all warn of the same ones and stop at the same step. Collective."""
        mine, self.unreported = self.unreported, []
        if not strategy.comm.all_reduce_sum(len(mine)):
            return
        by_rank = strategy.comm.all_gather_object(mine)
        if (message := _find_partial_failure(by_rank, strategy.model_parallel_size)) is not None:
            error = UserError(message)
            error.is_reported = not strategy.comm.is_main
            raise error
        for bad in chain(*by_rank):
            if bad.name not in self.problems:
                self.problems[bad.name] = bad.problem
                logger.warning("%s: %s; excluded from the loss", bad.name, bad.problem)
        if len(self.problems) > self.max_invalid_images or 2 * len(self.problems) >= self.num_images:
            error = TooManyFailures(self._format_limit_error())
            error.is_reported = not strategy.comm.is_main
            raise error

    def log_summary(self) -> None:
        if self.problems:
            message = "%d images became unreadable during the run and were no longer trained: %s"
            logger.warning(message, len(self.problems), ", ".join(self.problems))

    def _format_limit_error(self) -> str:
        lines = "".join(f"\n{name}: {problem}" for name, problem in self.problems.items())
        limit = (
            f"max_invalid_images is {self.max_invalid_images}"
            if len(self.problems) > self.max_invalid_images
            else "at least half of the dataset"
        )
        return f"{len(self.problems)} of {self.num_images} images can no longer be read; {limit}:{lines}"


def _find_partial_failure(by_rank: Sequence[Sequence[BadSample]], model_parallel_size: int) -> str | None:
    """Find an image that only some ranks of a model-parallel group could read: their data differs."""
    for first in range(0, len(by_rank), model_parallel_size):
        # Machines may have the images in different directories.
        group = [
            {Path(bad.name).parts[-2:]: bad for bad in problems}
            for problems in by_rank[first : first + model_parallel_size]
        ]
        for number, missed in enumerate(group):
            for name, bad in missed.items():
                if not all(name in others for others in group):
                    return (
                        f"{bad.name}: {bad.problem}: only on rank {first + number}; other ranks of its model-parallel"
                        " group could read it. The step was rolled back; check that machine's disk, then resume"
                    )
    return None


CHECK_INTERVAL_STEPS = 10
CHECK_INTERVAL_SECONDS = 30.0
"""The longest time between two checks, unless a step takes longer; work since a check is lost if the run is killed."""


class NanGuard:
    """Snapshot the run at every check; roll back when a loss or gradient was NaN or Inf, and skip that step."""

    def __init__(self, max_nan_steps: int, has_snapshots: bool = True):
        """Set ``has_snapshots`` to False where copies of all weights are too large; each step is then checked."""
        self.max_nan_steps, self.has_snapshots = max_nan_steps, has_snapshots
        self.check_interval = CHECK_INTERVAL_STEPS
        """Steps between two checks; the same on all ranks, and kept in checkpoints."""
        self._started_at = time.perf_counter()
        self.skipped_steps: list[SkippedStep] = []
        self.check_each_step_until = 0
        """The step up to which every step is checked after a rollback, to find the bad one."""
        self._snapshot = HostSnapshot()
        self._scaler_state: dict[str, Any] | None = None

    def take_snapshot(self, run: TrainingRun) -> None:
        """Copy adapter, EMA and optimizer state to host memory; only fp16 waits for the device, to read its scale."""
        if not self.has_snapshots:
            return
        ema_params = run.ema.shadow_params if run.ema is not None else []
        parameters = [parameter.detach() for parameter in run.parameters]
        self._snapshot.capture({"parameters": parameters, "ema": ema_params, "optimizer": run.optimizer.state_dict()})
        self._snapshot_state = replace(run.state)
        scaler = run.strategy.accelerator.scaler
        self._scaler_state = None if scaler is None else scaler.state_dict()

    def count_snapshot_bytes(self, run: TrainingRun) -> int:
        """Count the bytes of all trained weights, EMA and optimizer state, of which each rank may hold a part."""
        if self.has_snapshots:
            return self._snapshot.count_bytes()
        ema_params = run.ema.shadow_params if run.ema is not None else []
        averages, total = dict(zip(run.parameters, ema_params, strict=False)), 0
        for parameter in run.parameters:
            state = run.optimizer.state.get(parameter, {}).values()
            held = [parameter, averages.get(parameter), *state]
            num_bytes = sum(each.nbytes for each in held if isinstance(each, Tensor))
            total += num_bytes * run.strategy.get_stand_in(parameter).numel() // max(1, parameter.numel())
        return total

    def restart_timer(self) -> None:
        """Restart the timer, so that warm-up and callbacks do not shorten the next check interval."""
        self._started_at = time.perf_counter()

    def choose_check_interval(self, run: TrainingRun, num_steps: int) -> None:
        """Choose how many steps to take until the next check from the time of the last ones. Collective."""
        milliseconds = int(1e3 * (time.perf_counter() - self._started_at)) if run.strategy.comm.is_main else 0
        seconds_per_step = run.strategy.comm.all_reduce_sum(milliseconds) / 1e3 / num_steps
        self.check_interval = CHECK_INTERVAL_STEPS
        if seconds_per_step * CHECK_INTERVAL_STEPS > CHECK_INTERVAL_SECONDS:
            self.check_interval = max(1, int(CHECK_INTERVAL_SECONDS / seconds_per_step))
        self.restart_timer()

    def check_or_roll_back(self, run: TrainingRun, metrics: Sequence[StepMetrics]) -> bool:
        """Wait for the metrics of the steps since the snapshot; roll back and return False if any is NaN or Inf."""
        if all(item.is_skipped or is_finite(run, item) for item in metrics):
            return True
        self.check_each_step_until = last_step = run.state.step
        self.roll_back(run)
        logger.warning(
            "loss or gradient is NaN or Inf in steps %d to %d: rolled back to step %d; these steps are trained again,"
            " one by one, without the bad one",
            *(run.state.step + 1, last_step, run.state.step),
        )
        return False

    def roll_back(self, run: TrainingRun) -> None:
        """Restore the snapshot; without one, the weights are those after the last step, each of which is checked."""
        if not self.has_snapshots:
            run.optimizer.zero_grad(set_to_none=True)
            return
        snapshot = self._snapshot.wait()
        for parameter, value in zip(run.parameters, snapshot["parameters"], strict=True):
            parameter.data.copy_(value)
        run.strategy.sync_master_weights()
        if run.ema is not None:
            for mine, value in zip(run.ema.shadow_params, snapshot["ema"], strict=True):
                mine.copy_(value)
        load_optimizer_state(run.optimizer, snapshot["optimizer"])
        run.optimizer.zero_grad(set_to_none=True)
        if self._scaler_state is not None:
            run.strategy.accelerator.scaler.load_state_dict(self._scaler_state)
        run.state = replace(self._snapshot_state)

    def should_step(self, run: TrainingRun, step_batches: StepBatches, metrics: StepMetrics) -> bool:
        """Whether to apply the update; after a rollback, skip and report the steps that are NaN or Inf."""
        step = run.state.step
        if (self.has_snapshots and step >= self.check_each_step_until) or is_finite(run, metrics):
            return True
        bad = SkippedStep(step, float(metrics.loss), float(metrics.grad_norm))
        self.skipped_steps.append(bad)
        images = ", ".join(name for batch in step_batches.micro_batches for name in batch.sample_keys)
        report = _write_nan_report(run, step_batches, bad)
        what = f"loss {bad.loss:g}, gradient norm {bad.grad_norm:g}{_describe_partial_update(run)}"
        logger.warning("step %d skipped: %s. Images on this rank: %s. Details: %s", step + 1, what, images, report)
        if len(self.skipped_steps) >= self.max_nan_steps:
            raise TooManyFailures(
                f"{len(self.skipped_steps)} steps had a NaN or Inf loss or gradient, which reaches --max_nan_steps.\n"
                f"{_describe_weights_left(run, step)} Try a lower learning_rate, or mixed_precision bf16"
                " instead of fp16."
            )
        return False


def _describe_weights_left(run: TrainingRun, step: int) -> str:
    fused = run.strategy.fused_backward
    if fused is not None and fused.is_updating:
        return "A part of the weights was updated in that step: go on from the last checkpoint."
    return f"The weights are those before step {step + 1}."


def _describe_partial_update(run: TrainingRun) -> str:
    """Say how many weights a fused backward pass had updated before it came to a gradient that is NaN or Inf."""
    fused = run.strategy.fused_backward
    if fused is None or not fused.num_updated:
        return ""
    return f" ({fused.num_updated} of {len(run.parameters)} weights were updated before the first such gradient)"


def is_finite(run: TrainingRun, metrics: StepMetrics) -> bool:
    """Whether loss and gradient norm are finite.

    With a gradient scaler (fp16) only the loss counts: the scaler finds its scale by overflowing, and skips those
    updates itself.
    """
    return math.isfinite(float(metrics.loss)) and (
        run.strategy.has_grad_scaler or math.isfinite(float(metrics.grad_norm))
    )


def _write_nan_report(run: TrainingRun, step_batches: StepBatches, bad: SkippedStep) -> Path:
    """Write the images, captions, timesteps and losses of this rank in a skipped step as JSON.

    Noise is a function of seed, step and position, so this is enough to compute the step again.
    """
    save, rank = run.config.save, run.strategy.comm.rank
    path = Path(save.output_dir) / f"{save.output_name}.nan-step{bad.step + 1:08d}-rank{rank}.json"
    samples: dict[int, tuple[float, float]] = {}
    for stats in run.task.micro_batch_stats:
        samples |= zip(
            stats.global_positions, zip(stats.noise_fractions.tolist(), stats.losses.tolist(), strict=True), strict=True
        )
    images = []
    for batch in step_batches.micro_batches:
        height, width = batch.size_conditioning[0, 4:].int().tolist()
        for name, caption, position in zip(batch.sample_keys, batch.captions, batch.global_positions, strict=True):
            timestep, loss = samples.get(position, (math.nan, math.nan))
            image = {"image": name, "caption": caption, "position": position, "bucket": [width, height]}
            images.append({**image, "timestep": _to_json(timestep), "loss": _to_json(loss)})
    report = {
        "step": bad.step + 1,
        "loss": _to_json(bad.loss),
        "gradient_norm": _to_json(bad.grad_norm),
        "images": images,
        "seed": run.config.train.seed,
        "versions": {"lorikeet": __version__, "torch": torch.__version__},
    }
    try:
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False), "utf-8")
    except OSError as error:  # a missing report is no reason to end a run
        logger.warning("%s: cannot be written: %s", path, error.strerror or error)
    return path


def _to_json(number: float) -> Any:
    """Return a number that JSON has, and NaN or Inf as text."""
    return number if math.isfinite(number) else str(number)


class OomRecovery:
    """``--on_oom recover``: split micro-batches, then enable gradient checkpointing, until a step fits into memory.

    All ranks do the same, since all have batches of the same shapes.  A step first computes all gradients without
    collectives, asks whether every rank has its own, and only then all-reduces them: a rank that fails inside a
    collective would leave the others waiting.
    """

    def __init__(self, is_enabled: bool, enable_checkpointing: Callable[[], None] | None):
        self.is_enabled, self._enable_checkpointing = is_enabled, enable_checkpointing
        self.num_splits = 1
        """The number of parts that each micro-batch is split into."""

    def compute_gradients(
        self, strategy: Strategy, task: DiffusionTask, step_batches: StepBatches, step: int
    ) -> Tensor:
        """Compute the gradients of a step with as many splits as it needs, and return its loss."""
        while True:
            result = strategy.compute_gradients_catching_oom(
                task, self._split_batches(step_batches.micro_batches), step_batches.num_global_samples, step
            )
            if not isinstance(result, OutOfMemory):
                return result
            task.reset_stats()
            self._reduce_memory(result, step_batches.micro_batches, step)

    def run_until_fits(
        self, strategy: Strategy, batch: PixelBatch, step: int, function: Callable[[PixelBatch], Any]
    ) -> None:
        """Call ``function`` with ``batch``, or with as many of its images as fit."""
        if not self.is_enabled:
            function(batch)
            return
        while (
            error := strategy.run_catching_oom(lambda: _run_and_discard(self._split_batches([batch])[0], function))
        ) is not None:
            self._reduce_memory(error, [batch], step)

    def _split_batches(self, batches: Sequence[PixelBatch]) -> list[PixelBatch]:
        return [part for batch in batches for part in batch.split(-(-len(batch) // self.num_splits))]

    def _reduce_memory(self, error: OutOfMemory, batches: Sequence[PixelBatch], step: int) -> None:
        if self.num_splits < max(len(batch) for batch in batches):
            self.num_splits *= 2
            change = f"splitting micro-batches into {self.num_splits} parts from now on (same result)"
        elif self._enable_checkpointing is not None:
            self._enable_checkpointing()
            self._enable_checkpointing = None
            change = "enabling gradient_checkpointing (slower, same result)"
        else:
            raise error
        logger.warning("step %d: out of memory (%s); %s, then retrying the step", step + 1, error.phase, change)


def _run_and_discard(batch: PixelBatch, function: Callable[[PixelBatch], Any]) -> None:
    function(batch)
