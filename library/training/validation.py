"""Does the model learn what it was not shown?  The pictures that are kept for it are measured now and then."""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from ..adapters.switching import switched_off
from ..config.schema import ValidateConfig
from ..data.fixed_batches import FixedBatches, Read
from ..optim.optimizers import weights_as_used
from .evaluation import QUANTILES, Losses, evaluate
from .interval import Mean
from .job import Run
from .plan import is_due

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What an evaluation says; each gain is a mean over the pictures' own gains."""

    loss: Mean
    gain: Mean  # by how much it is below the base model's

    @classmethod
    def of(cls, base: Losses, now: Losses) -> "Verdict":
        both = [number for number in now if number in base]
        means = {number: (_mean(base[number]), _mean(now[number])) for number in both}
        return cls(Mean.of([after for _, after in means.values()]),
                   Mean.of([before - after for before, after in means.values()]))  # fmt: skip

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
        return f"loss {loss}, {Mean(abs(gain.value), gain.interval)} {word} the base model's: {how}"


class Validation:
    """Measures the base model once, and then the adapter when it is due."""

    can_wait = True

    def __init__(self, config: ValidateConfig, batches: FixedBatches, read: Read):
        self.config, self.batches, self.read = config, batches, read
        self.base: Losses = {}
        self.verdicts: list[tuple[int, Verdict]] = []  # after so many steps

    def is_due(self, run: Run) -> bool:
        plan, step, config = run.plan, run.state.step, self.config
        every_epochs = config.validate_every_n_epochs
        if every_epochs is None and config.validate_every_n_steps is None:
            every_epochs = 1
        return (step >= plan.steps or is_due(plan, step, config.validate_every_n_steps, None)
                or (every_epochs is not None and is_due(plan, step, None, every_epochs)))  # fmt: skip

    def begin(self, run: Run) -> None:
        """Measure the model without what is learnt."""
        with switched_off(run.strategy.unwrapped(run.adapter)):
            self.base = evaluate(run, self.batches, self.read)
        if not self.base:
            logger.warning("validation: none of the pictures can be used")
            return
        mean = Mean.of([_mean(values) for values in self.base.values()])
        logger.info("validation: the base model's loss is %s on %d pictures", mean, len(self.base))
        if not run.state.step:
            run.teller.noted(run, {"validation/base": mean.value, **self._apart(self.base, "validation/base")})

    def __call__(self, run: Run) -> None:
        averaged = nullcontext() if run.average is None else run.average.in_place()
        with weights_as_used(run.optimizer), averaged:
            now = evaluate(run, self.batches, self.read)
        if not set(now) & set(self.base):
            return
        verdict = Verdict.of(self.base, now)
        self.verdicts.append((run.state.step, verdict))
        what = "validation" if run.average is None else "validation of the averaged weights"
        logger.info("%s after step %d: %s", what, run.state.step, verdict)
        figures = {
            "validation/loss": verdict.loss.value,
            "validation/interval": verdict.loss.interval,
            "validation/gain": verdict.gain.value,
            "validation/gain_interval": verdict.gain.interval,
            "validation/base": verdict.loss.value + verdict.gain.value,
        }
        run.teller.noted(run, {**figures, **self._apart(now, "validation")})

    def _apart(self, losses: Losses, name: str) -> dict[str, float]:
        """The means at each time and, of several, in each dataset."""
        found = {f"{name}/time/{u:.1f}": _mean([row[place] for row in losses.values()])
                 for place, u in enumerate(QUANTILES)}  # fmt: skip
        by_dataset = self._by_dataset(losses)
        if len(by_dataset) > 1:
            found |= {f"{name}/dataset/{number + 1}": mean for number, mean in by_dataset.items()}
        return found

    def _by_dataset(self, losses: Losses) -> dict[int, float]:
        datasets = self.batches.datasets
        values: defaultdict[int, list[float]] = defaultdict(list)
        for number, row in losses.items():
            values[datasets[number]].append(_mean(row))
        return {dataset: _mean(values[dataset]) for dataset in sorted(values)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
