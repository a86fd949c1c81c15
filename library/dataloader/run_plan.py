"""The length of a run in optimizer steps, and at which steps its epochs end."""

import logging
from dataclasses import dataclass

from ..config.schema import TrainConfig
from ..config.schema_optim import OptimConfig
from ..config.validate_optim import find_schedule_overflow
from ..dataset.validate import validate_run_length
from ..errors import ConfigError
from ..problems import Problem
from .batch_plan import AnyBatchPlan, get_planned_stages


@dataclass(frozen=True)
class RunPlan:
    """A batch plan and the number of optimizer steps trained of it."""

    batch_plan: AnyBatchPlan
    steps: int
    first_step: int = 0
    """The number of steps that a new run leaves out."""

    @classmethod
    def from_config(cls, batch_plan: AnyBatchPlan, train: TrainConfig, optim: OptimConfig) -> "RunPlan":
        """Resolve ``max_train_epochs`` to steps; ``ConfigError`` if stages do not fit the run."""
        steps, key, value = train.max_train_steps, "", ""
        if train.max_train_epochs is not None:  # otherwise preflight has checked this
            steps = batch_plan.count_steps_for_epochs(train.max_train_epochs)
            key, value = "max_train_epochs", f"{train.max_train_epochs}, which is {steps} steps"
        last = get_planned_stages(batch_plan)[-1]
        if problems := list(validate_run_length(last.first_step, last.end_step, steps, key=key, value=value)):
            raise ConfigError(problems)
        if overflow := find_schedule_overflow(optim, steps):
            logging.getLogger(__name__).warning("%s", overflow)
        first_step = _find_first_step(batch_plan, train)
        if first_step >= steps:
            key = "initial_epoch" if train.initial_step is None else "initial_step"
            text = f"leaves out {first_step} steps, and the run has {steps}"
            raise ConfigError([Problem(key, text, "max_train_steps and max_train_epochs count these as well")])
        return cls(batch_plan, steps, first_step)

    @property
    def num_epochs(self) -> int:
        """Epochs the run reaches into."""
        return self.batch_plan.get_epoch(self.steps - 1) + 1

    @property
    def samples_per_step(self) -> int:
        """The samples of an optimizer step over all ranks; the most of any where datasets have batch sizes."""
        plan = self.batch_plan
        return max(bucket.batch_size for bucket in plan.buckets) * plan.dp_size * plan.accumulation_steps

    def count_completed_epochs(self, step: int) -> int:
        """Count the epochs that are complete after ``step`` optimizer steps."""
        return self.batch_plan.count_completed_epochs(step)

    def get_epoch_ended_at(self, step: int) -> int | None:
        """Return the number, from 1, of the epoch that step ``step`` (counted from 1) completed."""
        done = self.count_completed_epochs(step)
        return done if done > self.count_completed_epochs(step - 1) else None


def _find_first_step(batch_plan: AnyBatchPlan, train: TrainConfig) -> int:
    """Count the steps before ``initial_step`` or ``initial_epoch``."""
    if train.initial_step is not None:
        return train.initial_step
    if train.initial_epoch is None or train.initial_epoch == 1:
        return 0
    return batch_plan.count_steps_for_epochs(train.initial_epoch - 1)
