"""Does the model learn what it was not shown?  The pictures that are kept for it are measured now and then."""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from ..adapters.switching import disable_adapters
from ..config.schema import ValidateConfig
from ..data.fixed_batches import ValidationBatches, ReadBatch
from ..optim.optimizers import use_eval_weights
from .evaluation import TIMESTEP_QUANTILES, SampleLosses, compute_validation_losses
from .interval import MeanEstimate
from .job import TrainingRun
from .plan import is_interval_reached

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidationResult:
    """What an evaluation says; each gain is a mean over the pictures' own gains."""

    loss: MeanEstimate
    gain: MeanEstimate  # by how much it is below the base model's

    @classmethod
    def compare(cls, base_losses: SampleLosses, losses: SampleLosses) -> "ValidationResult":
        both = [number for number in losses if number in base_losses]
        means = {number: (_compute_mean(base_losses[number]), _compute_mean(losses[number])) for number in both}
        return cls(MeanEstimate.from_values([after for _, after in means.values()]),
                   MeanEstimate.from_values([before - after for before, after in means.values()]))  # fmt: skip

    @property
    def is_better(self) -> bool:
        """Than the base model, by more than chance explains."""
        return self.gain.value > self.gain.interval

    def __str__(self) -> str:
        loss, gain = self.loss, self.gain
        if not math.isfinite(loss.value):
            return "the loss is no number"
        if math.isinf(gain.interval):
            how = "one picture tells nothing of chance"
        elif self.is_better:
            how = "better than the base model by more than the interval"
        elif gain.value < -gain.interval:
            how = "worse than the base model by more than the interval"
        else:
            how = "not to be told from the base model"
        word = "above" if gain.value < 0 else "below"
        return f"loss {loss}, {MeanEstimate(abs(gain.value), gain.interval)} {word} the base model's: {how}"


class Validation:
    """Measures the base model once, and then the adapter when it is due."""

    is_deferrable = True

    def __init__(self, config: ValidateConfig, batches: ValidationBatches, read_batch: ReadBatch):
        self.config, self.batches, self.read_batch = config, batches, read_batch
        self.base_losses: SampleLosses = {}
        self.results: list[tuple[int, ValidationResult]] = []  # after so many steps

    def should_run(self, run: TrainingRun) -> bool:
        plan, step, config = run.plan, run.state.step, self.config
        every_epochs = config.validate_every_n_epochs
        if every_epochs is None and config.validate_every_n_steps is None:
            every_epochs = 1
        return (step >= plan.steps or is_interval_reached(plan, step, config.validate_every_n_steps, None)
                or (every_epochs is not None and is_interval_reached(plan, step, None, every_epochs)))  # fmt: skip

    def on_train_begin(self, run: TrainingRun) -> None:
        """Measure the model without what is learnt."""
        with disable_adapters(run.strategy.unwrap_model(run.model)):
            self.base_losses = compute_validation_losses(run, self.batches, self.read_batch)
        if not self.base_losses:
            logger.warning("validation: none of the pictures can be used")
            return
        mean = MeanEstimate.from_values([_compute_mean(values) for values in self.base_losses.values()])
        logger.info("validation: the base model's loss is %s on %d pictures", mean, len(self.base_losses))
        if not run.state.step:
            run.metric_logger.log_values(run, {"validation/base": mean.value, **self._break_down_losses(self.base_losses, "validation/base")})

    def __call__(self, run: TrainingRun) -> None:
        averaged = nullcontext() if run.ema is None else run.ema.swap_parameters()
        with use_eval_weights(run.optimizer), averaged:
            now = compute_validation_losses(run, self.batches, self.read_batch)
        if not set(now) & set(self.base_losses):
            return
        verdict = ValidationResult.compare(self.base_losses, now)
        self.results.append((run.state.step, verdict))
        what = "validation" if run.ema is None else "validation of the averaged weights"
        logger.info("%s after step %d: %s", what, run.state.step, verdict)
        figures = {
            "validation/loss": verdict.loss.value,
            "validation/interval": verdict.loss.interval,
            "validation/gain": verdict.gain.value,
            "validation/gain_interval": verdict.gain.interval,
            "validation/base": verdict.loss.value + verdict.gain.value,
        }
        run.metric_logger.log_values(run, {**figures, **self._break_down_losses(now, "validation")})

    def _break_down_losses(self, losses: SampleLosses, name: str) -> dict[str, float]:
        """The means at each time and, of several, in each dataset."""
        found = {f"{name}/time/{u:.1f}": _compute_mean([row[place] for row in losses.values()])
                 for place, u in enumerate(TIMESTEP_QUANTILES)}  # fmt: skip
        by_dataset = self._average_by_dataset(losses)
        if len(by_dataset) > 1:
            found |= {f"{name}/dataset/{number + 1}": mean for number, mean in by_dataset.items()}
        return found

    def _average_by_dataset(self, losses: SampleLosses) -> dict[int, float]:
        datasets = self.batches.dataset_numbers
        values: defaultdict[int, list[float]] = defaultdict(list)
        for number, row in losses.items():
            values[datasets[number]].append(_compute_mean(row))
        return {dataset: _compute_mean(values[dataset]) for dataset in sorted(values)}


def _compute_mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
