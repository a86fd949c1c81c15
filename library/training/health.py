"""Is the run well?  A number that is none must not stay in the weights, and nobody waits for the device to learn it.

The steps run on without anybody looking.  At a reading all figures since the one before are looked at together; if one
of them is no number, everything goes back to the reading before and comes again step by step, and the step at fault
changes nothing.  All processes do the same, because loss and gradient norm are the same on all of them.
"""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data.loader import StepBatches
from ..distributed.host_copy import HostSnapshot
from ..optim.optimizers import load_optimizer_state
from .bad_samples import TooManyFailures
from .job import SkippedStep, StepMetrics, TrainingRun

logger = logging.getLogger(__name__)

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
            raise TooManyFailures(f"{len(self.skipped_steps)} steps had a loss or gradient that is no number, which is the limit that"
                            f" --max_bad_steps sets.\nThe weights are those before step {step + 1}. Try a lower"
                            " learning_rate, or mixed_precision bf16 in the place of fp16.")  # fmt: skip
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
    save, rank = run.config.save, run.strategy.rank
    path = Path(save.output_dir) / f"{save.output_name}.nan-step{bad.step + 1:08d}-rank{rank}.json"
    samples: dict[int, tuple[float, float]] = {}
    for seen in run.task.micro_batch_stats:
        samples |= zip(seen.global_positions, zip(seen.timesteps.tolist(), seen.losses.tolist(), strict=True), strict=True)
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
