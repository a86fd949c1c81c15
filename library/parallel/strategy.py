"""What one optimizer step means on however many processes."""

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from ..data.batch import PixelBatch
from ..distributed.async_copy import AsyncScalarQueue
from ..distributed.communicator import Communicator
from ..distributed.devices import has_device_memory
from ..distributed.memory import OutOfMemory, record_phase
from ..distributed.straggler import Straggler, StragglerMonitor, find_straggler
from .blocks import ParallelPlan
from .ddp import exclude_frozen_from_ddp
from .gradient_sync import FlatGradients

if TYPE_CHECKING:
    from .compile import Compilation, CompileDynamic


T = TypeVar("T")


LossFunction = Callable[[PixelBatch, int], Tensor]
"""(batch, optimizer step) -> one weighted loss a sample."""


STOP_DELAY_STEPS = 2


class Strategy:
    """Every process holds the whole model and sees its own part of each global batch: one process, or DDP."""

    optimizer_sharding_engine = ""
    """The name of the engine that gives each process pieces of tensors to remember and to change; empty without."""
    has_collective_forward = False
    """Whether a forward is an exchange, so that all processes have to do each of them, whatever it is for."""
    has_full_model = True
    """Whether every process holds all frozen weights."""
    has_replicated_adapter = True
    """Whether every process holds all that is trained, equal to the bit."""

    def __init__(self, comm: Communicator):
        self.comm, self.accelerator, self.device = comm, comm.accelerator, comm.device
        self.is_stop_requested: Callable[[], bool] = lambda: False
        """Whether this process was asked to end the run."""
        self.data_parallel_rank, self.data_parallel_size = self.comm.rank, self.comm.world_size
        """Which part of a global batch this process works on, and how many parts there are."""
        self.has_loss = True
        """Whether this process knows the losses."""
        self.loss_ranks = list(range(self.comm.world_size))
        """Of each part, the process that knows the losses."""
        self.get_shape_key: Callable[[PixelBatch], Hashable] = lambda batch: batch.size_conditioning.shape
        """Batches of which it is the same make tensors of the same sizes."""
        self.prepare_recompute: Callable[[PixelBatch, int], None] = lambda batch, step: None
        """Called before a batch is computed again for its backward pass, when others came in between."""
        self.model_parallel_size = 1
        """So many processes share the work on one picture."""
        self.devices = [self.device]
        """All that this process computes on."""
        self.base_load_device = self.device
        """Where the frozen part of what is trained is loaded to, before it is wrapped."""
        self._stop_flags = AsyncScalarQueue()
        self.straggler_monitor = StragglerMonitor(self.device, self.comm.world_size)

    @property
    def has_grad_scaler(self) -> bool:
        """Whether losses are scaled against underflow (fp16), so that a gradient may be infinite now and then."""
        return self.accelerator.scaler is not None

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``, as it came out of flags, launcher and accelerate's own file."""
        return str(self.accelerator.mixed_precision)

    @property
    def is_compile_enabled(self) -> bool:
        """Whether the model is compiled, as it came out of flags, launcher and accelerate's own file."""
        return str(self.accelerator.state.dynamo_plugin.backend.value) != "NO"

    @property
    def pins_memory(self) -> bool:
        """Whether copies from pinned host memory are faster, which they are on devices with memory of their own."""
        return has_device_memory(self.device)

    def empty_device_cache(self) -> None:
        """Give back what nothing refers to any more."""
        clear_device_cache(garbage_collection=True)

    def compile(
        self, modules: Sequence[nn.Module], denoiser: nn.Module, dynamic: "CompileDynamic"
    ) -> "Compilation | None":
        """Compile what is trained as the accelerator was told, if at all; call it before ``wrap``."""
        if self.accelerator.state.dynamo_plugin.backend.value == "NO":
            return None
        from .compile import compile_model  # which takes torch's compiler along

        plugin = self.accelerator.state.dynamo_plugin
        return compile_model(
            modules, denoiser, plugin, dynamic, per_block=self.model_parallel_size > 1
        )  # exchanges are not compiled

    def check_batch_sizes(self, batch_sizes: Collection[int], gradient_accumulation_steps: int) -> None:
        """Nothing but our own options says how large batches are."""

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        denoiser: nn.Module | None = None,
        parallel_plan: ParallelPlan | None = None,
    ) -> tuple[nn.Module, Any]:
        """Place and wrap the model as the accelerator was told; return it with its optimizer.

        ``denoiser`` is the part of it that can be taken apart, and ``structure`` is how.
        """
        with self._disable_accelerate_compile(), warnings.catch_warnings():
            # torch has a new name for it that accelerate does not know; the old one still does what is meant.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
            if self.comm.world_size > 1:
                exclude_frozen_from_ddp(model)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.straggler_monitor.attach(self.model)
        return self.model, self.optimizer

    @contextmanager
    def _disable_accelerate_compile(self) -> Iterator[None]:
        """accelerate would wrap what is compiled already, and put ``_orig_mod`` into every name."""
        plugin = self.accelerator.state.dynamo_plugin
        wanted = plugin.backend
        plugin.backend = type(wanted).NO
        try:
            yield
        finally:
            plugin.backend = wanted

    def bypass_tensor_parallel(self) -> AbstractContextManager[None]:
        """Inside, single layers can be used on one process, without the others."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The gradients of a loss that every process computed for itself, with no exchange but what that needs."""
        loss.backward()  # type: ignore[no-untyped-call]

    def compute_gradients(
        self, loss_function: LossFunction, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        """Forward and backward of one step; return its loss, the mean over the ``samples`` of all processes."""
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                total += self._run_micro_batch(loss_function, batch, num_samples, step)
        if not self.accelerator.sync_gradients:
            raise AssertionError(f"step {step}: {len(batches)} micro-batches did not complete an optimizer step")
        return self._all_reduce_loss(total)

    def compute_gradients_catching_oom(
        self, loss_function: LossFunction, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor | OutOfMemory:
        """The same; but when any process is out of memory, all of them learn it, and have no gradients.

        A process that fails in the middle of an exchange would leave the others waiting in it.  So gradients are
        exchanged after all have said that they have theirs, for which several processes wait for their devices.
        """

        def compute_local_gradients() -> tuple[Tensor, FlatGradients | None]:
            total = torch.zeros((), device=self.device)
            for batch in batches:  # of which there may be more than accelerate's accumulate counts
                with self.accelerator.no_sync(self.model):
                    total += self._run_micro_batch(loss_function, batch, num_samples, step)
            self.straggler_monitor.mark_gradients_ready()
            with record_phase("communication"):
                return total, FlatGradients(self.model) if self.comm.world_size > 1 else None

        found = self.run_catching_oom(compute_local_gradients)
        if isinstance(found, OutOfMemory):
            return found
        total, gradients = found
        if gradients is not None:
            with record_phase("communication"):
                gradients.all_reduce_mean(self.comm.world_size)
        self.accelerator.sync_gradients = True
        return self._all_reduce_loss(total)

    def run_catching_oom(self, function: Callable[[], T]) -> T | OutOfMemory:
        """What ``work`` gives, or that it found no memory on some process; in ``work`` nobody waits for others."""
        failure = result = None
        try:
            result = function()
        except OutOfMemory as error:
            failure = error.strip_traceback()
        if not self.comm.all_reduce_sum(int(failure is not None)):
            return cast(T, result)
        del result
        self.model.zero_grad(set_to_none=True)
        self.empty_device_cache()
        return failure or OutOfMemory("another process")

    def _run_micro_batch(self, loss_function: LossFunction, batch: PixelBatch, num_samples: int, step: int) -> Tensor:
        """Forward and backward of a micro-batch; its share of the loss."""
        # The plan knows the true number of samples in the step, and the loss is divided by that, once.
        with record_phase("forward", batch), self.accelerator.autocast():
            share = loss_function(batch, step).sum() / num_samples
        with record_phase("backward", batch):
            self._backward_unscaled(share)
        return share.detach()

    def _backward_unscaled(self, loss: Tensor) -> None:
        """accelerate divides by the number of micro-steps and DDP takes the mean over processes; both are undone."""
        self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps * self.comm.world_size)

    def get_token_positions(self, lora_a: nn.Module) -> Tensor | None:
        """Which tokens of a picture an adapter's first matrix is given here; ``None`` for all of them."""
        return None

    def sync_optimizer_copies(self) -> None:
        """Whoever wrote into the parameters that learn, on all processes alike, tells it here."""

    def _all_reduce_loss(self, loss: Tensor) -> Tensor:
        """The sum over all processes; whether anybody was asked to end the run travels with it."""
        asked = loss.new_full((), float(self.is_stop_requested()))
        with record_phase("communication"):
            sums: Tensor = self.accelerator.reduce(torch.stack([loss, asked]), reduction="sum")
        self._stop_flags.push(sums[1])
        self.straggler_monitor.mark_step_end()
        return sums[0]

    def should_stop(self) -> bool:
        """Whether any process was asked to end the run, some steps ago; the same on all after the same step.

        Called once after each step.  So late a step is done anyway, and nobody waits for the device.
        """
        is_late = self.device.type != "cpu"
        if is_late and len(self._stop_flags) <= STOP_DELAY_STEPS:
            return False
        return self._stop_flags.pop() > 0

    def find_straggler(self) -> Straggler | None:
        """The process that the others waited for since this was asked; every process has to ask."""
        if self.comm.world_size == 1:
            return None
        mine = torch.tensor([self.straggler_monitor.pop_times()], device=self.device)
        return find_straggler(self.comm.all_gather_tensor(mine).tolist())

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Shorten the gradient to ``longest`` (0: leave it) and return the length it had."""
        norm = self.accelerator.clip_grad_norm_(parameters, max_norm or float("inf"))
        return torch.as_tensor(norm, device=self.device)

    def close(self) -> None:
        """Release what the engine keeps outside of this process's memory; call it before the process group ends."""

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The model without any wrapper, for reading names and weights."""
        # accelerate's way imports DeepSpeed where it is installed, which takes half a second that a run has no use for.
        inner: nn.Module = getattr(model, "_orig_mod", model)
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        return getattr(inner, "_orig_mod", inner)
