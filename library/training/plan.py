"""How many steps and epochs a run has, and how this is said."""

from dataclasses import dataclass

from ..config.schema import OptimConfig, TrainConfig
from ..data.stage_rules import misfits
from ..data.staged_plan import Plan, stages_in
from ..errors import ConfigError


@dataclass(frozen=True)
class RunPlan:
    """The length of a run in optimizer steps, and where its epochs end."""

    batches: Plan
    steps: int

    @classmethod
    def of(cls, batches: Plan, train: TrainConfig, optim: OptimConfig) -> "RunPlan":
        steps = train.max_train_steps
        if train.max_train_epochs is not None:
            steps = batches.steps_for_epochs(train.max_train_epochs)
        last = stages_in(batches)[-1]
        where = ("steps of datasets" if train.max_train_epochs is None else
                 f"--max_train_epochs {train.max_train_epochs}, which is {steps} steps")  # fmt: skip
        if problems := list(misfits(last.first, last.end, steps, where)):
            raise ConfigError(problems)
        if (warmup := optim.lr_warmup_steps).steps(steps) >= steps and not warmup.of_whole and warmup.amount:
            raise ConfigError([f"--lr_warmup_steps: {warmup} steps of warm-up do not fit into a run of {steps} steps"])
        if (decay := optim.lr_decay_steps).steps(steps) + warmup.steps(steps) > steps:
            raise ConfigError([f"--lr_decay_steps: warm-up ({warmup}) and decay ({decay}) do not fit into a run of"
                               f" {steps} steps"])  # fmt: skip
        return cls(batches, steps)

    @property
    def epochs(self) -> int:
        """Epochs that the run touches."""
        return self.batches.epoch_of(self.steps - 1) + 1

    def epochs_done(self, step: int) -> int:
        """Whole epochs after ``step`` optimizer steps."""
        return self.batches.epochs_done(step)

    def epoch_just_ended(self, step: int) -> int | None:
        """The number, from 1, of the epoch that step ``step`` (counted from 1) completed."""
        done = self.epochs_done(step)
        return done if done > self.epochs_done(step - 1) else None


def is_due(plan: RunPlan, step: int, every_steps: int | None, every_epochs: int | None) -> bool:
    """Whether something that happens every n epochs, or else every n steps, happens after ``step`` steps."""
    if every_epochs is not None:
        return plan.epochs_done(step) // every_epochs > plan.epochs_done(step - 1) // every_epochs
    return every_steps is not None and step % every_steps == 0
