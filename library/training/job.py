"""What a run consists of, and what may be done to it from outside of the loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..adapters.norms import Limit
from ..config import RunConfig
from ..data.loader import StepLoader, StepWork
from ..distributed.strategy import DataParallel
from ..optim.average import RunningAverage
from ..optim.optimizers import Group
from ..optim.schedules import Schedule
from .bad_samples import BadSamples
from .ladder import Ladder
from .plan import RunPlan
from .task import Seen, Task

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


@dataclass(frozen=True)
class BadStep:
    """A step whose update was left out."""

    step: int  # from 0
    loss: float
    gradient_norm: float


class Watch(Protocol):
    """Knows the run as it was when it was last seen to be well, and which steps were left out."""

    bad: list[BadStep]

    def remember(self, run: "Run") -> None:
        """This is how the run was when it was last seen to be well."""

    def is_well(self, run: "Run", figures: Sequence[Figures]) -> bool:
        """Read what the device computed; when it is not well, take everything back to the last reading."""

    def take_back(self, run: "Run") -> None:
        """Make ``run`` what it was when it was remembered."""

    def may_learn_from(self, run: "Run", work: StepWork, figures: Figures) -> bool:
        """Whether this step may change the weights, as far as that is known; a bad one is told and counted."""


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
