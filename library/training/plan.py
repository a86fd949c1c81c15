"""How many steps and epochs a run has, and how this is said."""

from dataclasses import dataclass

from ..config.schema import OptimConfig, TrainConfig
from ..data.stage_rules import validate_run_length
from ..data.staged_plan import AnyBatchPlan, get_planned_stages
from ..errors import ConfigError


@dataclass(frozen=True)
class RunPlan:
    """The length of a run in optimizer steps, and where its epochs end."""

    batch_plan: AnyBatchPlan
    steps: int

    @classmethod
    def from_config(cls, batch_plan: AnyBatchPlan, train: TrainConfig, optim: OptimConfig) -> "RunPlan":
        steps = train.max_train_steps
        if train.max_train_epochs is not None:
            steps = batch_plan.count_steps_for_epochs(train.max_train_epochs)
        last = get_planned_stages(batch_plan)[-1]
        where = ("steps of datasets" if train.max_train_epochs is None else
                 f"--max_train_epochs {train.max_train_epochs}, which is {steps} steps")  # fmt: skip
        if problems := list(validate_run_length(last.first_step, last.end_step, steps, where)):
            raise ConfigError(problems)
        if (warmup := optim.lr_warmup_steps).to_steps(steps) >= steps and not warmup.is_ratio and warmup.value:
            raise ConfigError([f"--lr_warmup_steps: {warmup} steps of warm-up do not fit into a run of {steps} steps"])
        if (decay := optim.lr_decay_steps).to_steps(steps) + warmup.to_steps(steps) > steps:
            raise ConfigError([f"--lr_decay_steps: warm-up ({warmup}) and decay ({decay}) do not fit into a run of"
                               f" {steps} steps"])  # fmt: skip
        return cls(batch_plan, steps)

    @property
    def num_epochs(self) -> int:
        """Epochs that the run touches."""
        return self.batch_plan.get_epoch(self.steps - 1) + 1

    def count_completed_epochs(self, step: int) -> int:
        """Whole epochs after ``step`` optimizer steps."""
        return self.batch_plan.count_completed_epochs(step)

    def get_epoch_ended_at(self, step: int) -> int | None:
        """The number, from 1, of the epoch that step ``step`` (counted from 1) completed."""
        done = self.count_completed_epochs(step)
        return done if done > self.count_completed_epochs(step - 1) else None


def is_interval_reached(plan: RunPlan, step: int, every_steps: int | None, every_epochs: int | None) -> bool:
    """Whether something that happens every n epochs, or else every n steps, happens after ``step`` steps."""
    if every_epochs is not None:
        return plan.count_completed_epochs(step) // every_epochs > plan.count_completed_epochs(step - 1) // every_epochs
    return every_steps is not None and step % every_steps == 0
