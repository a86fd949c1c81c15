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
from ..data.loader import StepWork
from ..distributed.host_copy import HostCopy
from ..optim.optimizers import remember
from .bad_samples import NoMore
from .job import BadStep, Figures, Run

logger = logging.getLogger(__name__)

STEPS_BETWEEN_READINGS = 10


class Health:
    """Knows the run as it was at the last reading, and which steps were left out."""

    def __init__(self, most: int):
        self.most = most
        self.bad: list[BadStep] = []
        self.careful_until = 0
        """Steps before this one are looked at one by one."""
        self.read_at = 0
        self._copy = HostCopy()

    def remember(self, run: Run) -> None:
        """This is how the run was when it was last seen to be well."""
        self.read_at = run.state.step
        average = run.average.values if run.average is not None else []
        parameters = [parameter.detach() for parameter in run.parameters]
        self._copy.take({"parameters": parameters, "average": average, "optimizer": run.optimizer.state_dict()})
        self._state = replace(run.state)

    def is_well(self, run: Run, figures: Sequence[Figures]) -> bool:
        """Read what the device computed; when it is not well, take everything back to the last reading."""
        if all(item.is_left_out or fit(run, item) for item in figures):
            return True
        self.careful_until = run.state.step
        self.take_back(run)
        return False

    def take_back(self, run: Run) -> None:
        """Make ``run`` what it was when it was remembered."""
        kept = self._copy.give()
        for parameter, value in zip(run.parameters, kept["parameters"], strict=True):
            parameter.data.copy_(value)
        run.strategy.adapter_was_written()
        if run.average is not None:
            for mine, value in zip(run.average.values, kept["average"], strict=True):
                mine.copy_(value)
        remember(run.optimizer, kept["optimizer"])
        run.optimizer.zero_grad(set_to_none=True)
        run.state = replace(self._state)

    def may_learn_from(self, run: Run, work: StepWork, figures: Figures) -> bool:
        """Whether this step may change the weights, as far as that is known; a bad one is told and counted."""
        step = run.state.step
        if step >= self.careful_until or fit(run, figures):
            return True
        bad = BadStep(step, float(figures.loss), float(figures.gradient_norm))
        self.bad.append(bad)
        images = ", ".join(name for batch in work.batches for name in batch.ids)
        report = _write_nan_report(run, work, bad)
        what = f"loss {bad.loss:g}, gradient norm {bad.gradient_norm:g}"
        logger.warning("step %d skipped: %s. Images on this rank: %s. Details: %s", step + 1, what, images, report)
        if len(self.bad) >= self.most:
            raise NoMore(f"{len(self.bad)} steps had a loss or gradient that is no number, which is the limit that"
                            f" --max_bad_steps sets.\nThe weights are those before step {step + 1}. Try a lower"
                            " learning_rate, or mixed_precision bf16 in the place of fp16.")  # fmt: skip
        return False


def fit(run: Run, figures: Figures) -> bool:
    """Loss and gradient norm are numbers.  With gradient scaling (fp16) an infinite gradient is how the scaler finds
    its scale; it skips that update itself."""
    return math.isfinite(float(figures.loss)) and (
        run.strategy.scales_gradients or math.isfinite(float(figures.gradient_norm))
    )


def _write_nan_report(run: Run, work: StepWork, bad: BadStep) -> Path:
    """Write the images, captions, timesteps and losses of this rank in a skipped step as JSON.

    Noise is a function of seed, step and place, so this is enough to compute the step again.
    """
    save, rank = run.config.save, run.strategy.rank
    path = Path(save.output_dir) / f"{save.output_name}.nan-step{bad.step + 1:08d}-rank{rank}.json"
    samples: dict[int, tuple[float, float]] = {}
    for seen in run.task.seen:
        samples |= zip(seen.places, zip(seen.t.tolist(), seen.loss.tolist(), strict=True), strict=True)
    images = []
    for batch in work.batches:
        height, width = batch.frame[0, 4:].int().tolist()
        for name, caption, place in zip(batch.ids, batch.captions, batch.places, strict=True):
            timestep, loss = samples.get(place, (math.nan, math.nan))
            image = {"image": name, "caption": caption, "place": place, "bucket": [width, height]}
            images.append({**image, "timestep": _to_json(timestep), "loss": _to_json(loss)})
    report = {
        "step": bad.step + 1,
        "loss": _to_json(bad.loss),
        "gradient_norm": _to_json(bad.gradient_norm),
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
