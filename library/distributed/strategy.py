"""What one optimizer step means on however many processes."""

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from ..data.batch import PixelBatch
from .company import Company
from .devices import has_own_memory
from .flat import FlatGradients
from .host_copy import LateWords
from .memory import OutOfMemory, phase
from .pace import Pace, Slowest, slowest
from .structure import Structure

if TYPE_CHECKING:
    from .compiling import Compilation, Shapes

T = TypeVar("T")
LossFunction = Callable[[PixelBatch, int], Tensor]
"""(batch, optimizer step) -> one weighted loss a sample."""

STEPS_UNTIL_KNOWN = 2


class DataParallel(Company):
    """Every process holds the whole model and sees its own part of each global batch: one process, or DDP."""

    divides_optimizer = ""
    """The name of the engine that gives each process pieces of tensors to remember and to change; empty without."""
    computes_together = False
    """Whether a forward is an exchange, so that all processes have to do each of them, whatever it is for."""
    has_whole_model = True
    """Whether every process holds all frozen weights."""
    is_replicated = True
    """Whether every process holds all that is trained, equal to the bit."""

    def __init__(self, accelerator: Accelerator):
        super().__init__(accelerator)
        self.is_asked: Callable[[], bool] = lambda: False
        """Whether this process was asked to end the run."""
        self.data_rank, self.data_size = self.rank, self.size
        """Which part of a global batch this process works on, and how many parts there are."""
        self.tells = True
        """Whether this process knows the losses."""
        self.tellers = list(range(self.size))
        """Of each part, the process that knows the losses."""
        self.shape_of: Callable[[PixelBatch], Hashable] = lambda batch: batch.frame.shape
        """Batches of which it is the same make tensors of the same sizes."""
        self.recall: Callable[[PixelBatch, int], None] = lambda batch, step: None
        """Called before a batch is computed again for its backward pass, when others came in between."""
        self.together = 1
        """So many processes share the work on one picture."""
        self.devices = [self.device]
        """All that this process computes on."""
        self.frozen_home = self.device
        """Where the frozen part of what is trained is loaded to, before it is wrapped."""
        self._asked = LateWords()
        self.pace = Pace(self.device, self.size)

    @property
    def scales_gradients(self) -> bool:
        """Whether losses are scaled against underflow (fp16), so that a gradient may be infinite now and then."""
        return self.accelerator.scaler is not None

    @property
    def precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``, as it came out of flags, launcher and accelerate's own file."""
        return str(self.accelerator.mixed_precision)

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled, as it came out of flags, launcher and accelerate's own file."""
        return str(self.accelerator.state.dynamo_plugin.backend.value) != "NO"

    @property
    def pins_memory(self) -> bool:
        """Whether copies from pinned host memory are faster, which they are on devices with memory of their own."""
        return has_own_memory(self.device)

    def free_memory(self) -> None:
        """Give back what nothing refers to any more."""
        clear_device_cache(garbage_collection=True)

    def compile(self, parts: Sequence[nn.Module], denoiser: nn.Module, shapes: "Shapes") -> "Compilation | None":
        """Compile what is trained as the accelerator was told, if at all; call it before ``wrap``."""
        if self.accelerator.state.dynamo_plugin.backend.value == "NO":
            return None
        from .compiling import compiled  # which takes torch's compiler along

        plugin = self.accelerator.state.dynamo_plugin
        return compiled(parts, denoiser, plugin, shapes, by_blocks=self.together > 1)  # exchanges are not compiled

    def refuse_other_batches(self, sizes: Collection[int], accumulation: int) -> None:
        """Nothing but our own options says how large batches are."""

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, denoiser: nn.Module | None = None,
        structure: Structure | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        """Place and wrap the model as the accelerator was told; return it with its optimizer.

        ``denoiser`` is the part of it that can be taken apart, and ``structure`` is how.
        """
        with self._compiling_left_to_us(), warnings.catch_warnings():
            # torch has a new name for it that accelerate does not know; the old one still does what is meant.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
            if self.size > 1:
                _keep_at_home(model)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.pace.watch(self.model)
        return self.model, self.optimizer

    @contextmanager
    def _compiling_left_to_us(self) -> Iterator[None]:
        """accelerate would wrap what is compiled already, and put ``_orig_mod`` into every name."""
        plugin = self.accelerator.state.dynamo_plugin
        wanted = plugin.backend
        plugin.backend = type(wanted).NO
        try:
            yield
        finally:
            plugin.backend = wanted

    def alone(self) -> AbstractContextManager[None]:
        """Inside, single layers can be used on one process, without the others."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The gradients of a loss that every process computed for itself, with no exchange but what that needs."""
        loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self, loss_function: LossFunction, work: Sequence[PixelBatch], samples: int, step: int) -> Tensor:
        """Forward and backward of one step; return its loss, the mean over the ``samples`` of all processes."""
        total = torch.zeros((), device=self.device)
        for batch in work:
            with self.accelerator.accumulate(self.model):
                total += self._one_batch(loss_function, batch, samples, step)
        if not self.accelerator.sync_gradients:
            raise AssertionError(f"step {step}: {len(work)} micro-batches did not complete an optimizer step")
        return self._summed(total)

    def gradients_that_fit(
        self, loss_function: LossFunction, work: Sequence[PixelBatch], samples: int, step: int
    ) -> Tensor | OutOfMemory:
        """The same; but when any process is out of memory, all of them learn it, and have no gradients.

        A process that fails in the middle of an exchange would leave the others waiting in it.  So gradients are
        exchanged after all have said that they have theirs, for which several processes wait for their devices.
        """

        def of_this_process() -> tuple[Tensor, FlatGradients | None]:
            total = torch.zeros((), device=self.device)
            for batch in work:  # of which there may be more than accelerate's accumulate counts
                with self.accelerator.no_sync(self.model):
                    total += self._one_batch(loss_function, batch, samples, step)
            self.pace.ready()
            with phase("communication"):
                return total, FlatGradients(self.model) if self.size > 1 else None

        found = self.if_it_fits(of_this_process)
        if isinstance(found, OutOfMemory):
            return found
        total, gradients = found
        if gradients is not None:
            with phase("communication"):
                gradients.become_the_mean(self.size)
        self.accelerator.sync_gradients = True
        return self._summed(total)

    def if_it_fits(self, work: Callable[[], T]) -> T | OutOfMemory:
        """What ``work`` gives, or that it found no memory on some process; in ``work`` nobody waits for others."""
        failure = result = None
        try:
            result = work()
        except OutOfMemory as error:
            failure = error.alone()
        if not self.total(int(failure is not None)):
            return cast(T, result)
        del result
        self.model.zero_grad(set_to_none=True)
        self.free_memory()
        return failure or OutOfMemory("another process")

    def _one_batch(self, loss_function: LossFunction, batch: PixelBatch, samples: int, step: int) -> Tensor:
        """Forward and backward of a micro-batch; its share of the loss."""
        # The plan knows the true number of samples in the step, and the loss is divided by that, once.
        with phase("forward", batch), self.accelerator.autocast():
            share = loss_function(batch, step).sum() / samples
        with phase("backward", batch):
            self._backward(share)
        return share.detach()

    def _backward(self, share: Tensor) -> None:
        """accelerate divides by the number of micro-steps and DDP takes the mean over processes; both are undone."""
        self.accelerator.backward(share * self.accelerator.gradient_accumulation_steps * self.size)

    def places(self, down: nn.Module) -> Tensor | None:
        """Which tokens of a picture an adapter's first matrix is given here; ``None`` for all of them."""
        return None

    def adapter_was_written(self) -> None:
        """Whoever wrote into the parameters that learn, on all processes alike, tells it here."""

    def _summed(self, total: Tensor) -> Tensor:
        """The sum over all processes; whether anybody was asked to end the run travels with it."""
        asked = total.new_full((), float(self.is_asked()))
        with phase("communication"):
            sums: Tensor = self.accelerator.reduce(torch.stack([total, asked]), reduction="sum")
        self._asked.send(sums[1])
        self.pace.together()
        return sums[0]

    def must_end(self) -> bool:
        """Whether any process was asked to end the run, some steps ago; the same on all after the same step.

        Called once after each step.  So late a step is done anyway, and nobody waits for the device.
        """
        is_late = self.device.type != "cpu"
        if is_late and len(self._asked) <= STEPS_UNTIL_KNOWN:
            return False
        return self._asked.read() > 0

    def slowest(self) -> Slowest | None:
        """The process that the others waited for since this was asked; every process has to ask."""
        if self.size == 1:
            return None
        mine = torch.tensor([self.pace.read()], device=self.device)
        return slowest(self.gathered(mine).tolist())

    def clip(self, parameters: Iterable[nn.Parameter], longest: float) -> Tensor:
        """Shorten the gradient to ``longest`` (0: leave it) and return the length it had."""
        norm = self.accelerator.clip_grad_norm_(parameters, longest or float("inf"))
        return torch.as_tensor(norm, device=self.device)

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """The model without any wrapper, for reading names and weights."""
        # accelerate's way imports DeepSpeed where it is installed, which takes half a second that a run has no use for.
        inner: nn.Module = getattr(model, "_orig_mod", model)
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        return getattr(inner, "_orig_mod", inner)


def _keep_at_home(model: nn.Module) -> None:
    """What is frozen is the same everywhere, so DDP need not send it around at the start, nor keep books on it."""
    frozen = [name for name, item in model.named_parameters() if not item.requires_grad]
    held: Any = model
    held._ddp_params_and_buffers_to_ignore = [*frozen, *(name for name, _ in model.named_buffers())]
