"""The training loop: all that happens in a run happens here, in this order."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..adapters.norms import Limit
from ..config import RunConfig
from ..data.loader import StepLoader, StepWork
from ..distributed.memory import phase
from ..distributed.strategy import DataParallel
from ..optim.average import RunningAverage
from ..optim.optimizers import Group, learning_rates, set_learning_rates
from ..optim.schedules import Schedule
from .bad_samples import BadSamples
from .health import STEPS_BETWEEN_READINGS, Watch
from .ladder import Ladder
from .plan import RunPlan
from .probe import probe
from .rehearsal import try_later_stages
from .task import Seen, Task
from .warm_up import warm_up

if TYPE_CHECKING:
    from ..distributed.compiling import Compilation


class Action(Protocol):
    """Something that is done between steps; it knows itself when it is due."""

    can_wait: bool
    """Whether a run that is told to end may leave it to the run that goes on."""

    def is_due(self, run: "Run") -> bool: ...

    def __call__(self, run: "Run") -> None: ...


class Teller(Protocol):
    """Gets to know how the run goes."""

    def stepped(self, run: "Run") -> None:
        """A step was sent on its way; nobody knows yet how it went."""

    def told(self, run: "Run", figures: Sequence["Figures"]) -> None:
        """These steps are done, and their figures may be read."""

    def noted(self, run: "Run", values: Mapping[str, float]) -> None:
        """What else was found out about the run as it is now."""

    def pictured(self, run: "Run", pictures: Mapping[str, bytes]) -> None:
        """Previews of all processes, as PNG files."""


class Ended(Exception):
    """The run was asked to end; the step is whole, and what was left to do at it is ``owed``."""

    def __init__(self, owed: Sequence[str]):
        super().__init__()
        self.owed = tuple(owed)


class Silence:
    """Tells nobody."""

    def stepped(self, run: "Run") -> None: ...

    def told(self, run: "Run", figures: Sequence["Figures"]) -> None: ...

    def noted(self, run: "Run", values: Mapping[str, float]) -> None: ...

    def pictured(self, run: "Run", pictures: Mapping[str, bytes]) -> None: ...


@dataclass(frozen=True)
class Figures:
    """What a step was like; the tensors stay on the device until somebody has to read them."""

    step: int  # from 0
    loss: Tensor
    gradient_norm: Tensor
    learning_rates: Mapping[str, Any]  # of each group that has one
    seen: tuple[Seen, ...]  # the micro-batches of this process
    waited: float  # seconds until the loader had them
    is_left_out: bool = False  # it changed nothing, because something in it was no number


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
    loader: StepLoader
    adapter: nn.Module  # the denoiser with its adapters, as wrapped by the strategy
    groups: Sequence[Group]  # the parameters that learn
    optimizer: Any
    schedule: Schedule
    watch: Watch
    ladder: Ladder
    bad_samples: BadSamples
    teller: Teller
    average: RunningAverage | None = None
    limit: Limit | None = None  # on the length of updates
    compilation: "Compilation | None" = None
    actions: Sequence[Action] = ()
    state: State = field(default_factory=State)
    is_probed: bool = False
    work: StepWork | None = None
    """What the step that is being done consists of."""
    owed: tuple[str, ...] = ()
    """What is due after the step that was just done, and is not done yet."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything that learns."""
        return [parameter for group in self.groups for parameter in group.parameters]


def train(run: Run) -> None:
    """Run every step from the state's on to the last; what goes wrong is taken back and left out."""
    if run.state.step >= run.plan.steps:
        return
    while not _ran_on(run):
        pass


def _ran_on(run: Run) -> bool:
    """Go on to the end, or to where something turned out to have gone wrong, which is undone by then."""
    first, unread = run.state.step, list[Figures]()
    run.watch.remember(run)
    for work, waited in _timed(run.loader.steps(first)):
        run.work, run.owed = work, ()
        if not run.is_probed:
            if run.compilation is not None:
                warm_up(run, run.compilation, work.batches[0])
            else:
                try_later_stages(run, work.batches[0])
            run.ladder.try_out(run, work.batches[0], probe)
            run.is_probed = True
        unread.append(_step(run, work, waited))
        run.bad_samples.note(work.problems)
        run.teller.stepped(run)
        due = [action for action in run.actions if action.is_due(run)]
        is_last = run.state.step >= run.plan.steps
        must_end = run.strategy.must_end() and not is_last
        if due or is_last or must_end or run.state.step == 1 or len(unread) >= STEPS_BETWEEN_READINGS:
            if not run.watch.is_well(run, unread):
                return False
            run.bad_samples.settle(run.strategy)
            run.teller.told(run, unread)
            unread = []
            if not is_last:
                run.watch.remember(run)
                run.owed = tuple(type(action).__name__ for action in due)
        for action in due:
            if not (must_end and action.can_wait):
                action(run)
                run.owed = tuple(name for name in run.owed if name != type(action).__name__)
        if must_end:
            raise Ended(run.owed)
        if is_last:
            return True
    raise AssertionError("the loader goes on without end")


def _timed(steps: Iterator[StepWork]) -> Iterator[tuple[StepWork, float]]:
    """Each step's work with the seconds that it was waited for."""
    while True:
        started = time.perf_counter()
        with phase("data"):
            work = next(steps)
        yield work, time.perf_counter() - started


def _step(run: Run, work: StepWork, waited: float) -> Figures:
    """One optimizer step; nothing in it waits for the device."""
    state, strategy = run.state, run.strategy
    factor = run.schedule(state.step)
    set_learning_rates(run.optimizer, [group.rate for group in run.groups], factor)
    loss = run.ladder.gradients(run, work)
    with phase("optimizer"):
        norm = strategy.clip(run.parameters, run.config.optim.max_grad_norm)
    figures = Figures(state.step, loss, norm, {}, tuple(run.task.seen), waited)
    learns = run.watch.may_learn_from(run, work, figures)
    if learns:
        with phase("optimizer"):
            run.optimizer.step()
            if run.limit is not None:
                run.limit()
                strategy.adapter_was_written()
    run.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += work.samples
    state.has_learnt |= learns and factor > 0 and any(group.rate for group in run.groups)
    if learns and run.average is not None:
        run.average.update(state.step)
    rates = learning_rates(run.optimizer, [group.name for group in run.groups])
    return replace(figures, learning_rates=rates, is_left_out=not learns)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count(parameters: Sequence[torch.Tensor]) -> int:
    """Numbers in all tensors together."""
    return sum(parameter.numel() for parameter in parameters)
