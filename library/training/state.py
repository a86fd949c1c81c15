"""The objects of the training loop: the run and its state, step metrics, the protocols of callbacks and loggers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..adapters.update_norms import MaxNormRegularizer
from ..config import RunConfig
from ..dataloader.loader import StepBatches, StepLoader
from ..dataloader.run_plan import RunPlan
from ..optim.ema import AdapterEMA
from ..optim.lr_schedulers import LRSchedule
from ..optim.optimizers import ParamGroup
from ..parallel.strategy import Strategy
from .task import DiffusionTask, MicroBatchStats

if TYPE_CHECKING:
    from ..parallel.compile import Compilation
    from .nan_and_oom_handling import BadSamples, NanGuard, OomRecovery


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one optimizer step; tensors stay on the device until they are logged."""

    step: int  # from 0
    loss: Tensor
    grad_norm: Tensor
    learning_rates: Mapping[str, Any]  # the rate of each parameter group
    micro_batches: tuple[MicroBatchStats, ...]  # the micro-batches of this rank
    data_wait_seconds: float  # time spent waiting for the data loader
    is_skipped: bool = False  # the optimizer step was skipped: loss or gradient was NaN or Inf


class MetricLogger(Protocol):
    """Logs the metrics of a run."""

    def advance_progress(self, run: "TrainingRun") -> None:
        """Advance the progress bar; the metrics of the step are not known yet."""

    def log_steps(self, run: "TrainingRun", metrics: Sequence["StepMetrics"]) -> None:
        """Log the metrics of finished steps. Collective: all ranks must call it."""

    def log_values(self, run: "TrainingRun", values: Mapping[str, float]) -> None:
        """Log metrics of the run at the current step."""

    @property
    def has_trackers(self) -> bool:
        """Whether images go anywhere but to disk; the same on all ranks."""

    def log_previews(self, run: "TrainingRun", previews: Mapping[str, Mapping[str, bytes]]) -> None:
        """Log previews of all ranks, each given as its files by extension."""


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was skipped because its loss or gradient was NaN or Inf."""

    step: int  # from 0
    loss: float
    grad_norm: float


@dataclass
class TrainState:
    """Counters that a checkpoint holds besides adapter, EMA and optimizer state."""

    step: int = 0
    samples: int = 0
    has_trained: bool = False  # whether any step had a learning rate above 0


class Callback(Protocol):
    """Work between two steps: validation, previews, saving."""

    id: str
    """The name of the callback in checkpoints, which list the callbacks that a stopped run has still to run."""
    is_deferrable: bool
    """Whether a run that is stopped by a signal leaves it to the resumed run."""

    def should_run(self, run: "TrainingRun") -> bool:
        """Whether it is due after the step just done; the same on all ranks."""

    def on_train_begin(self, run: "TrainingRun") -> None:
        """Prepare the callback; all ranks call this before the first step of a new or resumed run."""

    def __call__(self, run: "TrainingRun") -> None: ...


@dataclass
class TrainingRun:
    """All parts of a training run."""

    config: RunConfig
    plan: RunPlan
    strategy: Strategy
    task: DiffusionTask
    loader: StepLoader
    model: nn.Module  # denoiser and trained text encoders with their adapters, as wrapped by the strategy
    param_groups: Sequence[ParamGroup]  # the trainable parameters
    optimizer: Any
    lr_schedule: LRSchedule
    nan_guard: "NanGuard"
    oom_recovery: "OomRecovery"
    bad_samples: "BadSamples"
    metric_logger: MetricLogger
    ema: AdapterEMA | None = None
    max_norm_regularizer: MaxNormRegularizer | None = None
    compilation: "Compilation | None" = None
    callbacks: Sequence[Callback] = ()
    state: TrainState = field(default_factory=TrainState)
    is_warmed_up: bool = False
    step_batches: StepBatches | None = None
    """The batches of the current step."""
    pending_callbacks: tuple[str, ...] = ()
    """The ids of callbacks that are due after the step just done and have not run yet."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters."""
        return [parameter for group in self.param_groups for parameter in group.parameters]


class StopRequested(Exception):
    """The run was asked to stop; the step is complete, and ``pending`` callbacks are left to the resumed run."""

    def __init__(self, pending: Sequence[str]):
        super().__init__()
        self.pending = tuple(pending)


class NullMetricLogger:
    """Logs nothing."""

    has_trackers = False

    def advance_progress(self, run: "TrainingRun") -> None: ...

    def log_steps(self, run: "TrainingRun", metrics: Sequence["StepMetrics"]) -> None: ...

    def log_values(self, run: "TrainingRun", values: Mapping[str, float]) -> None: ...

    def log_previews(self, run: "TrainingRun", previews: Mapping[str, Mapping[str, bytes]]) -> None: ...


def is_interval_reached(plan: RunPlan, step: int, *, steps: int | None = None, epochs: int | None = None) -> bool:
    """Whether an interval of so many epochs, or else of so many steps, ends with step ``step`` (counted from 1)."""
    if epochs is not None:
        return plan.count_completed_epochs(step) // epochs > plan.count_completed_epochs(step - 1) // epochs
    return steps is not None and step % steps == 0
