"""Pictures that became unreadable during a run: told once each, the same on all ranks, and too many of them end it."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..data.batch import PixelBatch
from ..data.images import BadSample
from ..data.loader import StepBatches
from ..distributed.async_copy import HostSnapshot
from ..distributed.memory import OutOfMemory
from ..errors import UserError
from ..optim.optimizers import load_optimizer_state
from ..parallel.strategy import Strategy
from .state import SkippedStep, StepMetrics, TrainingRun
from .task import DiffusionTask

logger = logging.getLogger(__name__)


class TooManyFailures(UserError):
    """Too many pictures or steps went wrong; the weights are still those of the last good step."""


@dataclass
class BadSamples:
    """What could not be read so far, by name."""

    max_invalid_images: int  # --max_invalid_images
    num_images: int  # that the run has
    problems: dict[str, str] = field(default_factory=dict)
    unreported: list[BadSample] = field(default_factory=list)  # of this rank, since the last time all talked about it

    def add(self, problems: Sequence[BadSample]) -> None:
        """Take in what this rank met with in a step."""
        self.unreported += problems

    def sync_across_ranks(self, strategy: Strategy) -> None:
        """Every rank calls this at the same steps: all learn what any of them met with, and all stop together."""
        mine, self.unreported = self.unreported, []
        if not strategy.comm.all_reduce_sum(len(mine)):
            return
        by_rank = strategy.comm.all_gather_object(mine)
        if (half := _find_partial_failure(by_rank, strategy.model_parallel_size)) is not None:
            error = UserError(half)
            error.is_reported = not strategy.comm.is_main
            raise error
        for bad in chain(*by_rank):
            if bad.name not in self.problems:
                self.problems[bad.name] = bad.problem
                logger.warning("%s: %s; what stands in its place weighs nothing", bad.name, bad.problem)
        if len(self.problems) > self.max_invalid_images or 2 * len(self.problems) >= self.num_images:
            error = TooManyFailures(self._format_limit_error())
            error.is_reported = not strategy.comm.is_main
            raise error

    def log_summary(self) -> None:
        """At the end of a run, once more."""
        if self.problems:
            said = "%d pictures became unreadable and were not trained from then on: %s"
            logger.warning(said, len(self.problems), ", ".join(self.problems))

    def _format_limit_error(self) -> str:
        lines = "".join(f"\n{name}: {problem}" for name, problem in self.problems.items())
        limit = (
            f"max_invalid_images is {self.max_invalid_images}"
            if len(self.problems) > self.max_invalid_images
            else "that is half of them or more"
        )
        return f"{len(self.problems)} of {self.num_images} pictures cannot be read any more; {limit}:{lines}"


def _find_partial_failure(by_rank: Sequence[Sequence[BadSample]], model_parallel_size: int) -> str | None:
    """What is to be told when not all processes that work on a picture missed it: each saw another one."""
    for first in range(0, len(by_rank), model_parallel_size):
        # Machines may have their pictures under other folders.
        group = [
            {Path(bad.name).parts[-2:]: bad for bad in problems}
            for problems in by_rank[first : first + model_parallel_size]
        ]
        for number, missed in enumerate(group):
            for name, bad in missed.items():
                if not all(name in others for others in group):
                    return (
                        f"{bad.name}: {bad.problem}. That is so for rank {first + number}, while others that work"
                        " on the same picture could read it. What was learnt of it is taken back; look at that"
                        " machine's disk, and go on"
                    )
    return None


CHECK_INTERVAL_STEPS = 10


class NanGuard:
    """Knows the run as it was at the last reading, and which steps were left out."""

    def __init__(self, max_nan_steps: int):
        self.max_nan_steps = max_nan_steps
        self.skipped_steps: list[SkippedStep] = []
        self.check_each_step_until = 0
        """Steps before this one are looked at one by one."""
        self.snapshot_step = 0
        self._snapshot = HostSnapshot()

    def take_snapshot(self, run: TrainingRun) -> None:
        """This is how the run was when it was last seen to be well."""
        self.snapshot_step = run.state.step
        average = run.ema.shadow_params if run.ema is not None else []
        parameters = [parameter.detach() for parameter in run.parameters]
        self._snapshot.capture({"parameters": parameters, "average": average, "optimizer": run.optimizer.state_dict()})
        self._snapshot_state = replace(run.state)

    def check_or_roll_back(self, run: TrainingRun, metrics: Sequence[StepMetrics]) -> bool:
        """Read what the device computed; when it is not well, take everything back to the last reading."""
        if all(item.is_skipped or is_finite(run, item) for item in metrics):
            return True
        self.check_each_step_until = run.state.step
        self.roll_back(run)
        return False

    def roll_back(self, run: TrainingRun) -> None:
        """Make ``run`` what it was when it was remembered."""
        kept = self._snapshot.wait()
        for parameter, value in zip(run.parameters, kept["parameters"], strict=True):
            parameter.data.copy_(value)
        run.strategy.sync_optimizer_copies()
        if run.ema is not None:
            for mine, value in zip(run.ema.shadow_params, kept["average"], strict=True):
                mine.copy_(value)
        load_optimizer_state(run.optimizer, kept["optimizer"])
        run.optimizer.zero_grad(set_to_none=True)
        run.state = replace(self._snapshot_state)

    def should_step(self, run: TrainingRun, step_batches: StepBatches, metrics: StepMetrics) -> bool:
        """Whether this step may change the weights, as far as that is known; a bad one is told and counted."""
        step = run.state.step
        if step >= self.check_each_step_until or is_finite(run, metrics):
            return True
        bad = SkippedStep(step, float(metrics.loss), float(metrics.grad_norm))
        self.skipped_steps.append(bad)
        images = ", ".join(name for batch in step_batches.micro_batches for name in batch.sample_keys)
        report = _write_nan_report(run, step_batches, bad)
        what = f"loss {bad.loss:g}, gradient norm {bad.grad_norm:g}"
        logger.warning("step %d skipped: %s. Images on this rank: %s. Details: %s", step + 1, what, images, report)
        if len(self.skipped_steps) >= self.max_nan_steps:
            raise TooManyFailures(
                f"{len(self.skipped_steps)} steps had a loss or gradient that is no number, which is the limit that"
                f" --max_nan_steps sets.\nThe weights are those before step {step + 1}. Try a lower"
                " learning_rate, or mixed_precision bf16 in the place of fp16."
            )
        return False


def is_finite(run: TrainingRun, metrics: StepMetrics) -> bool:
    """Loss and gradient norm are numbers.  With gradient scaling (fp16) an infinite gradient is how the scaler finds
    its scale; it skips that update itself."""
    return math.isfinite(float(metrics.loss)) and (
        run.strategy.has_grad_scaler or math.isfinite(float(metrics.grad_norm))
    )


def _write_nan_report(run: TrainingRun, work: StepBatches, bad: SkippedStep) -> Path:
    """Write the images, captions, timesteps and losses of this rank in a skipped step as JSON.

    Noise is a function of seed, step and place, so this is enough to compute the step again.
    """
    save, rank = run.config.save, run.strategy.comm.rank
    path = Path(save.output_dir) / f"{save.output_name}.nan-step{bad.step + 1:08d}-rank{rank}.json"
    samples: dict[int, tuple[float, float]] = {}
    for seen in run.task.micro_batch_stats:
        samples |= zip(
            seen.global_positions, zip(seen.timesteps.tolist(), seen.losses.tolist(), strict=True), strict=True
        )
    images = []
    for batch in work.micro_batches:
        height, width = batch.size_conditioning[0, 4:].int().tolist()
        for name, caption, place in zip(batch.sample_keys, batch.captions, batch.global_positions, strict=True):
            timestep, loss = samples.get(place, (math.nan, math.nan))
            image = {"image": name, "caption": caption, "place": place, "bucket": [width, height]}
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
    except OSError as error:  # a report that cannot be written ends no run
        logger.warning("%s: cannot be written: %s", path, error.strerror or error)
    return path


def _to_json(number: float) -> Any:
    """Return a number that JSON has, and NaN or Inf as text."""
    return number if math.isfinite(number) else str(number)


class OomRecovery:
    """How far a run went down to fit; all processes go down together, since all have batches of the same sizes."""

    def __init__(self, is_enabled: bool, enable_checkpointing: Callable[[], None] | None):
        """``compute_twice`` switches gradient checkpointing on; without it, it is on already."""
        self.is_enabled, self._enable_checkpointing = is_enabled, enable_checkpointing
        self.num_splits = 1
        """So many make up a micro-batch."""

    def compute_gradients(
        self, strategy: Strategy, task: DiffusionTask, step_batches: StepBatches, step: int
    ) -> Tensor:
        """Those of one step; return its loss."""
        if not self.is_enabled:
            return strategy.compute_gradients(task, step_batches.micro_batches, step_batches.num_global_samples, step)
        while True:
            found = strategy.compute_gradients_catching_oom(
                task, self._split_batches(step_batches.micro_batches), step_batches.num_global_samples, step
            )
            if not isinstance(found, OutOfMemory):
                return found
            task.reset_stats()
            self._reduce_memory(found, step_batches.micro_batches, step)

    def run_until_fits(
        self, strategy: Strategy, batch: PixelBatch, step: int, function: Callable[[PixelBatch], Any]
    ) -> None:
        """``work`` with as many of the pictures as fit."""
        if not self.is_enabled:
            function(batch)
            return
        while (
            found := strategy.run_catching_oom(lambda: _run_and_discard(self._split_batches([batch])[0], function))
        ) is not None:
            self._reduce_memory(found, [batch], step)

    def _split_batches(self, batches: Sequence[PixelBatch]) -> list[PixelBatch]:
        return [part for batch in batches for part in batch.split(-(-len(batch) // self.num_splits))]

    def _reduce_memory(self, error: OutOfMemory, batches: Sequence[PixelBatch], step: int) -> None:
        if self.num_splits < max(len(batch) for batch in batches):
            self.num_splits *= 2
            change = (
                f"micro-batches are cut in {self.num_splits} parts from now on, which changes nothing in the result"
            )
        elif self._enable_checkpointing is not None:
            self._enable_checkpointing()
            self._enable_checkpointing = None
            change = "gradient_checkpointing is switched on, which takes more time and changes nothing in the result"
        else:
            raise error
        logger.warning(
            "step %d ran out of memory (%s); --on_oom recover: %s, and the step comes again",
            step + 1,
            error.phase,
            change,
        )


def _run_and_discard(batch: PixelBatch, function: Callable[[PixelBatch], Any]) -> None:
    function(batch)
