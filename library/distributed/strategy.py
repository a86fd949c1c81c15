"""What one optimizer step means on however many processes."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from ..data.batch import PixelBatch
from .chain import Chain
from .company import Company
from .flat import FlatGradients
from .host_copy import LateWords
from .memory import OutOfMemory, phase
from .pace import Pace, Slowest, slowest

T = TypeVar("T")
LossFunction = Callable[[PixelBatch, int], Tensor]
"""(batch, optimizer step) -> one weighted loss a sample."""

STEPS_UNTIL_KNOWN = 2


class DataParallel(Company):
    """Every process holds the whole model and sees its own part of each global batch: one process, or DDP."""

    computes_together = False
    """Whether a forward is an exchange, so that all processes have to do each of them, whatever it is for."""
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
        self.frozen_home = self.device
        """Where the frozen part of what is trained is loaded to, before it is wrapped."""
        self._asked = LateWords()
        self.pace = Pace(self.device)

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
        return self.device.type in ("cuda", "xpu")

    def free_memory(self) -> None:
        """Give back what nothing refers to any more."""
        clear_device_cache(garbage_collection=True)

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, denoiser: nn.Module | None = None,
        chain: Chain | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        """Place, wrap and compile the model as the accelerator was told; return it with its optimizer.

        ``denoiser`` is the part of it whose blocks are compiled where only blocks are to be; without it, the model.
        ``chain`` is how its blocks follow each other, where they simply do.
        """
        with self._regions_compiled(model if denoiser is None else denoiser), warnings.catch_warnings():
            # torch has a new name for it that accelerate does not know; the old one still does what is meant.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
            if self.size > 1:
                _keep_at_home(model)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.pace.watch(self.model)
        return self.model, self.optimizer

    @contextmanager
    def _regions_compiled(self, model: nn.Module) -> Iterator[None]:
        """Regional compilation by diffusers, which knows its repeated blocks and compiles them in place.

        accelerate's own way wraps each block, which puts ``_orig_mod`` into every name and fails on UNets, where
        diffusers asks an optional block for its truth value; so it is told that there is nothing to compile.
        """
        plugin = self.accelerator.state.dynamo_plugin
        wanted = plugin.backend
        if wanted.value == "NO" or not plugin.use_regional_compilation:
            yield
            return
        if not getattr(model, "_repeated_blocks", None):  # diffusers names none for SD3, but what stays together
            model._repeated_blocks = getattr(model, "_no_split_modules", None)  # type: ignore[assignment]
        compile_blocks: Any = model.compile_repeated_blocks
        compile_blocks(**plugin.to_kwargs())
        plugin.backend = type(wanted).NO
        try:
            yield
        finally:
            plugin.backend = wanted

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
            with phase("exchange"):
                return total, FlatGradients(self.model) if self.size > 1 else None

        found = self.if_it_fits(of_this_process)
        if isinstance(found, OutOfMemory):
            return found
        total, gradients = found
        if gradients is not None:
            with phase("exchange"):
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
        # accelerate divides by the number of micro-steps and DDP takes the mean over processes; both are undone here,
        # because the plan knows the true number of samples in the step and the loss is divided by that, once.
        undo = self.accelerator.gradient_accumulation_steps * self.size
        with phase("forward", batch), self.accelerator.autocast():
            share = loss_function(batch, step).sum() / samples
        with phase("backward", batch):
            self.accelerator.backward(share * undo)
        return share.detach()

    def _summed(self, total: Tensor) -> Tensor:
        """The sum over all processes; whether anybody was asked to end the run travels with it."""
        asked = total.new_full((), float(self.is_asked()))
        with phase("exchange"):
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
