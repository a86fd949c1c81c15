"""The training loop: all that happens in a run happens here, in this order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..data.loader import Loader
from ..distributed.strategy import DataParallel
from ..optim.average import RunningAverage
from ..optim.optimizers import Group, learning_rates, set_learning_rates
from ..optim.schedules import Schedule
from .health import check
from .plan import RunPlan
from .task import Task


class Action(Protocol):
    """Something that is done between steps; it knows itself when it is due."""

    def __call__(self, run: "Run", figures: "Figures") -> None: ...


@dataclass(frozen=True)
class Figures:
    """What a step was like; the tensors stay on the device until somebody has to read them."""

    loss: Tensor
    gradient_norm: Tensor
    learning_rates: Mapping[str, Any]  # of each group that has one


@dataclass
class State:
    """What must be known to go on, besides adapter and optimizer."""

    step: int = 0
    samples: int = 0
    has_learnt: bool = False  # whether any step had a learning rate above 0


@dataclass
class Run:
    """Everything a run consists of."""

    config: RunConfig
    plan: RunPlan
    strategy: DataParallel
    task: Task
    loader: Loader
    adapter: nn.Module  # the denoiser with its adapters, as wrapped by the strategy
    groups: Sequence[Group]  # the parameters that learn
    optimizer: Any
    schedule: Schedule
    average: RunningAverage | None = None
    actions: Sequence[Action] = ()
    state: State = field(default_factory=State)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything that learns."""
        return [parameter for group in self.groups for parameter in group.parameters]


def train(run: Run) -> None:
    """Run every step from the state's on to the last."""
    config, state, strategy = run.config, run.state, run.strategy
    if state.step >= run.plan.steps:
        return
    parameters, peaks, names = (
        run.parameters,
        [group.rate for group in run.groups],
        [group.name for group in run.groups],
    )
    for work in run.loader.steps(state.step):
        factor = run.schedule(state.step)
        set_learning_rates(run.optimizer, peaks, factor)
        loss = strategy.gradients(run.task, work.batches, work.samples, state.step)
        norm = strategy.clip(parameters, config.optim.max_grad_norm)
        check(loss, norm, work.batches, state.step, scaled=strategy.scales_gradients)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.samples += work.samples
        state.has_learnt |= factor > 0
        if run.average is not None:
            run.average.update(state.step)
        for action in run.actions:
            action(run, Figures(loss, norm, learning_rates(run.optimizer, names)))
        if state.step >= run.plan.steps:
            return


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count(parameters: Sequence[torch.Tensor]) -> int:
    """Numbers in all tensors together."""
    return sum(parameter.numel() for parameter in parameters)
