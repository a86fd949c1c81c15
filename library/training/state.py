"""What a run consists of, and what may be done to it from outside of the loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..adapters.regularization import MaxNormRegularizer
from ..config import RunConfig
from ..data.loader import StepBatches, StepLoader
from ..data.run_plan import RunPlan
from ..optim.ema import AdapterEMA
from ..optim.optimizers import ParamGroup
from ..optim.schedules import LRSchedule
from ..parallel.strategy import Strategy
from .task import DiffusionTask, MicroBatchStats

if TYPE_CHECKING:
    from ..parallel.compile import Compilation
    from .step_guards import BadSamples, OomRecovery


@dataclass(frozen=True)
class StepMetrics:
    """What a step was like; the tensors stay on the device until somebody has to read them."""

    step: int  # from 0
    loss: Tensor
    grad_norm: Tensor
    learning_rates: Mapping[str, Any]  # of each group that has one
    micro_batches: tuple[MicroBatchStats, ...]  # the micro-batches of this process
    data_wait_seconds: float  # seconds until the loader had them
    is_skipped: bool = False  # it changed nothing, because something in it was no number


class MetricLogger(Protocol):
    """Gets to know how the run goes."""

    @property
    def has_trackers(self) -> bool:
        """Whether images go anywhere; the same on all ranks."""

    def advance_progress(self, run: "TrainingRun") -> None:
        """A step was sent on its way; nobody knows yet how it went."""

    def log_steps(self, run: "TrainingRun", metrics: Sequence["StepMetrics"]) -> None:
        """These steps are done, and their figures may be read."""

    def log_values(self, run: "TrainingRun", values: Mapping[str, float]) -> None:
        """What else was found out about the run as it is now."""

    def log_images(self, run: "TrainingRun", images: Mapping[str, bytes]) -> None:
        """Previews of all processes, as PNG files."""


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was left out."""

    step: int  # from 0
    loss: float
    grad_norm: float


class StepGuard(Protocol):
    """Knows the run as it was when it was last seen to be well, and which steps were left out."""

    skipped_steps: list[SkippedStep]

    def take_snapshot(self, run: "TrainingRun") -> None:
        """This is how the run was when it was last seen to be well."""

    def check_or_roll_back(self, run: "TrainingRun", metrics: Sequence[StepMetrics]) -> bool:
        """Read what the device computed; when it is not well, take everything back to the last reading."""

    def roll_back(self, run: "TrainingRun") -> None:
        """Make ``run`` what it was when it was remembered."""

    def should_step(self, run: "TrainingRun", step_batches: StepBatches, metrics: StepMetrics) -> bool:
        """Whether this step may change the weights, as far as that is known; a bad one is told and counted."""


@dataclass
class TrainState:
    """What must be known to go on, besides adapter and optimizer."""

    step: int = 0
    samples: int = 0
    has_trained: bool = False  # whether any step had a learning rate above 0


class Callback(Protocol):
    """Something that is done between steps; it knows itself when it is due."""

    is_deferrable: bool
    """Whether a run that is told to end may leave it to the run that goes on."""

    def should_run(self, run: "TrainingRun") -> bool: ...

    def __call__(self, run: "TrainingRun") -> None: ...


@dataclass
class TrainingRun:
    """Everything a run consists of."""

    config: RunConfig
    plan: RunPlan
    strategy: Strategy
    task: DiffusionTask
    loader: StepLoader
    model: nn.Module  # the denoiser with its adapters, as wrapped by the strategy
    param_groups: Sequence[ParamGroup]  # the parameters that learn
    optimizer: Any
    lr_schedule: LRSchedule
    nan_guard: StepGuard
    oom_recovery: "OomRecovery"
    bad_samples: "BadSamples"
    metric_logger: MetricLogger
    ema: AdapterEMA | None = None
    max_norm_regularizer: MaxNormRegularizer | None = None  # on the length of updates
    compilation: "Compilation | None" = None
    callbacks: Sequence[Callback] = ()
    state: TrainState = field(default_factory=TrainState)
    is_warmed_up: bool = False
    step_batches: StepBatches | None = None
    """What the step that is being done consists of."""
    pending_callbacks: tuple[str, ...] = ()
    """What is due after the step that was just done, and is not done yet."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything that learns."""
        return [parameter for group in self.param_groups for parameter in group.parameters]


class StopRequested(Exception):
    """The run was asked to end; the step is whole, and what was left to do at it is ``owed``."""

    def __init__(self, pending: Sequence[str]):
        super().__init__()
        self.pending = tuple(pending)


class NullMetricLogger:
    """Tells nobody."""

    has_trackers = False

    def advance_progress(self, run: "TrainingRun") -> None: ...

    def log_steps(self, run: "TrainingRun", metrics: Sequence["StepMetrics"]) -> None: ...

    def log_values(self, run: "TrainingRun", values: Mapping[str, float]) -> None: ...

    def log_images(self, run: "TrainingRun", images: Mapping[str, bytes]) -> None: ...


def is_interval_reached(plan: RunPlan, step: int, every_steps: int | None, every_epochs: int | None) -> bool:
    """Whether something that happens every n epochs, or else every n steps, happens after ``step`` steps."""
    if every_epochs is not None:
        return plan.count_completed_epochs(step) // every_epochs > plan.count_completed_epochs(step - 1) // every_epochs
    return every_steps is not None and step % every_steps == 0
