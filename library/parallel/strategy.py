"""The abstract ``Strategy``: how the ranks share the work of one optimizer step, from its batches to the loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..adapters.token_layout import ShardedTokens
from ..config.types import DeviceMap
from ..dataloader.batch import PixelBatch
from ..distributed.communicator import Communicator
from ..distributed.deepspeed_settings import DeepSpeedSettings
from ..distributed.device_memory import has_device_memory
from ..distributed.fsdp_settings import FSDPSettings
from ..distributed.parallel_dims import ParallelDims
from ..distributed.step_phases import OutOfMemory
from ..distributed.straggler import Straggler, StragglerMonitor, find_straggler
from ..optim.fused_backward import FusedBackward, PartialStep
from .async_copy import AsyncScalarQueue
from .cuda_graphs import StepGraphs
from .gradient_accumulation import GradientAccumulation, TrainingTask
from .gradient_clipping import clip_grad_norm
from .gradient_sync import all_reduce_loss, scale_loss
from .parallel_plan import ParallelPlan
from .sharded_weights import GatherWeight, gather_shards, list_shard_positions, sum_over_group

if TYPE_CHECKING:
    from .compile import Compilation, CompileDynamic


T = TypeVar("T")
STOP_DELAY_STEPS = 2
"""Steps after which the host reads a stop flag, so that it does not wait for the device."""


@dataclass(frozen=True)
class StrategySettings:
    """The settings of options and launcher, in the form in which strategies take them."""

    dims: ParallelDims | None = None
    """The dimensions of the parallelism; ``None`` stands for data parallelism over all ranks."""
    fsdp: FSDPSettings | None = None
    deepspeed: DeepSpeedSettings | None = None
    device_map: DeviceMap | None = None
    pp_schedule: str = "1f1b"
    uses_cuda_graphs: bool = False
    trains_base: bool = False
    """Whether the weights of the model are trained, of which some may have no part in the result."""
    is_stop_requested: Callable[[], bool] = lambda: False
    """Whether this process got a signal to stop the run."""


class Strategy(ABC):
    """Wraps model and optimizer, and computes the gradients of a step on all ranks.

    A strategy has a ``Communicator`` (``comm``) and is not one: what only communicates needs no strategy. Whatever it
    shards, every rank holds all adapters, equal to the bit; where the model itself is trained, ``shard_group`` says
    whether ranks hold parts of its weights.
    """

    optimizer_sharding_engine = ""
    """The engine that shards optimizer state (DeepSpeed ZeRO, or FSDP where the model itself is trained), if any."""
    shard_group: dist.ProcessGroup | None = None
    """The ranks that hold the trained weights together, as DTensors; None where each rank holds all of them."""
    has_collective_forward = False
    """Whether a forward contains collectives, so that all ranks have to run each of them."""
    has_full_model = True
    """Whether every rank holds all frozen weights."""
    can_quantize_base = True
    """Whether the frozen weights may be quantized: bytes with scales."""
    has_offloaded_state_in_files = False
    """Whether optimizer state is in files because host memory has no room for it, nor for copies of it."""
    nf4_kernel: str | None = None
    """The kernel that dequantizes a base model in nf4 (``select_nf4_kernel``)."""

    supports_cuda_graphs = False
    """Whether forward and backward of a micro-batch are without collectives and hooks of an engine."""

    model: nn.Module
    """The wrapped model, after ``wrap``."""
    optimizer: Any
    """The optimizer, after ``wrap``."""

    def __init__(self, comm: Communicator, settings: StrategySettings):
        self.comm, self.accelerator, self.device = comm, comm.accelerator, comm.device
        self.dims = settings.dims or ParallelDims(dp=comm.world_size)
        self.model_parallel_size = self.dims.model_parallel_size
        """Number of ranks that work on the same images."""
        self.data_parallel_rank, self.data_parallel_size = self.dims.get_data_parallel_rank(comm.rank), self.dims.dp
        self.loss_ranks = self.dims.get_loss_ranks()
        """A rank that has the losses of the samples of each data-parallel rank."""
        self.has_loss = comm.rank in self.loss_ranks
        self.devices = [self.device]
        """All devices that this process computes on."""
        self.base_load_device = self.device
        """The device to which the base model is loaded, before ``wrap``."""
        self.straggler_monitor = StragglerMonitor(self.device, comm.world_size)
        self.uses_cuda_graphs, self.trains_base = settings.uses_cuda_graphs, settings.trains_base
        self.fused_backward: FusedBackward | None = None
        """What updates the weights within the backward pass, if asked for (``fused_backward_pass``)."""
        self.partial_step: PartialStep | None = None
        """What updates the weights, some at a time, where they are rounded stochastically."""
        self.step_graphs: StepGraphs | None = None
        """The CUDA graphs of micro-batches, if there are any."""
        self._is_stop_requested = settings.is_stop_requested
        self._stop_flags = AsyncScalarQueue()

    @property
    def gradient_accumulation(self) -> GradientAccumulation:
        """Forward and backward of the micro-batches of a step."""
        return GradientAccumulation(self.accelerator, self._backward_micro_batch, self.step_graphs, self.fused_backward)

    @property
    def has_grad_scaler(self) -> bool:
        """Whether fp16 losses are scaled, so that gradients overflow now and then."""
        return self.accelerator.scaler is not None

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``, of options, launcher and accelerate's config file."""
        return str(self.accelerator.mixed_precision)

    @property
    def is_compile_enabled(self) -> bool:
        """Whether options, launcher or accelerate's config file ask for ``torch.compile``."""
        return str(self.accelerator.state.dynamo_plugin.backend.value) != "NO"

    @property
    def pins_memory(self) -> bool:
        """Whether copies from pinned host memory are faster."""
        return has_device_memory(self.device)

    def empty_device_cache(self) -> None:
        clear_device_cache(garbage_collection=True)

    def compile(
        self, modules: Sequence[nn.Module], denoiser: nn.Module, dynamic: "CompileDynamic"
    ) -> "Compilation | None":
        """Compile the modules if asked for; call it before ``wrap``."""
        if not self.is_compile_enabled:
            return None
        from .compile import compile_model  # imports torch's compiler

        plugin = self.accelerator.state.dynamo_plugin
        # Per block, so that collectives between blocks are not compiled.
        return compile_model(modules, denoiser, plugin, dynamic, per_block=self.model_parallel_size > 1)

    def check_batch_sizes(self, batch_sizes: Collection[int], gradient_accumulation_steps: int) -> None:  # noqa: B027
        """Raise if the engine's own configuration has other batch sizes."""

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: Optimizer, plan: ParallelPlan | None = None) -> tuple[nn.Module, Any]:
        """Move, shard and wrap the model; return it with its optimizer."""

    @contextmanager
    def _disable_accelerate_compile(self) -> Iterator[None]:
        """Keep ``Accelerator.prepare`` from compiling within the context.

        It would compile modules again that are compiled, and put ``_orig_mod`` into the name of every parameter.
        """
        plugin = self.accelerator.state.dynamo_plugin
        backend = plugin.backend
        plugin.backend = type(backend).NO
        try:
            yield
        finally:
            plugin.backend = backend

    def bypass_tensor_parallel(self) -> AbstractContextManager[None]:
        """Allow calls of single layers on one rank within the context, with full weights and without collectives."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Backward of a loss outside of an optimizer step (gradient probe, warm-up)."""

    @abstractmethod
    def compute_gradients(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        """Accumulate the gradients of all micro-batches of a step (forward and backward) and synchronize them.

        Return the loss: the mean over the ``num_samples`` samples of all ranks.
        """

    def compute_gradients_catching_oom(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor | OutOfMemory:
        """Compute gradients, or return ``OutOfMemory`` on all ranks if any of them ran out of memory."""
        raise NotImplementedError(f"{type(self).__name__} cannot recover: its forward or backward contains collectives")

    def run_catching_oom(self, function: Callable[[], T]) -> T | OutOfMemory:
        """Call a function without collectives; return ``OutOfMemory`` on all ranks if any ran out of memory."""
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

    def _accumulate_gradients(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        return self.gradient_accumulation.accumulate(self.model, task, batches, num_samples, step)

    def _backward_micro_batch(self, loss: Tensor) -> None:
        accumulation_steps = self.accelerator.gradient_accumulation_steps
        self.accelerator.backward(scale_loss(loss, "accelerate", accumulation_steps, self.comm.world_size))

    def _all_reduce_loss(self, loss: Tensor) -> Tensor:
        """Sum the loss over all ranks, together with the stop flags."""
        total, num_stop_requests = all_reduce_loss(self.accelerator, loss, stop_requested=self._is_stop_requested())
        self._stop_flags.push(num_stop_requests)
        self.straggler_monitor.mark_step_end()
        return total

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop, equal on all ranks; call it once after each step.

        On a device it answers for an earlier step, whose flag can be read without waiting.
        """
        is_delayed = self.device.type != "cpu"
        if is_delayed and len(self._stop_flags) <= STOP_DELAY_STEPS:
            return False
        return self._stop_flags.pop() > 0

    def find_straggler(self) -> Straggler | None:
        """Return the rank that the others waited for since the last call; a collective."""
        if self.comm.world_size == 1:
            return None
        times = torch.tensor([self.straggler_monitor.pop_times()], device=self.device)
        return find_straggler(self.comm.all_gather_tensor(times).tolist())

    @property
    def writes_shards(self) -> bool:
        """Whether checkpoints have the parts of each rank, and not whole weights that the main rank gathers."""
        return self.shard_group is not None

    @property
    def shard_rank(self) -> int:
        """The number of this rank's part of the trained weights; ranks with the same part hold equal bits."""
        return 0 if self.shard_group is None else self.shard_group.rank()

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum what each rank computed of its part of the trained weights; a collective where they are sharded."""
        return values if self.shard_group is None else sum_over_group(values, self.device, self.shard_group)

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Run the model without gradients within the context."""
        with torch.no_grad():
            yield

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip gradients to ``max_norm`` (0: no clipping); return the norm before clipping."""
        if self.fused_backward is not None:  # which has clipped them
            return self.fused_backward.compute_grad_norm()
        return clip_grad_norm(self.accelerator, parameters, max_norm, self.device)

    def update_weights(self, step: int) -> None:
        """Let the optimizer take its step of this number, unless the backward pass has done so."""
        if self.fused_backward is not None:
            return
        if self.partial_step is None:
            self.optimizer.step()
            return
        groups = self.optimizer.param_groups
        self.partial_step.start(step)
        self.partial_step.update([each for group in groups for each in group["params"] if each.grad is not None])
        self.partial_step.finish()

    def list_positions(self, weight: Tensor) -> Tensor:
        """List the places in the whole weight, flat, of the elements that this rank holds, as int32."""
        return list_shard_positions(weight)

    def discard_gradients(self) -> None:
        """End a step without an update: with fp16, gradients are unscaled once between two updates of the scale."""
        if (scaler := self.accelerator.scaler) is not None:
            scaler.update(scaler.get_scale())

    def get_sharded_tokens(self, lora_a: nn.Module) -> ShardedTokens | None:
        """Return which tokens an adapter's down matrix sees on this rank; ``None``: all."""
        return None

    def sync_master_weights(self) -> None:  # noqa: B027
        """Copy the trainable parameters to the engine's master weights; call it after writing to them."""

    def use_written_weights(self) -> None:  # noqa: B027
        """Let the model compute with values that were written to trained weights, where it holds another copy.

        A collective.  Unlike ``sync_master_weights`` it is for values that are taken back, as those of an EMA are.
        """

    def iter_trained_weights(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trained weights of the wrapped model with their names, as the optimizer has them."""
        for name, parameter in self.unwrap_model(model).named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def get_stand_in(self, weight: Tensor) -> Tensor:
        """Return what has the shape of a weight of the model: itself, unless an engine keeps its elements elsewhere."""
        return weight.detach()

    def find_gather(self, stand_in: Tensor) -> GatherWeight | None:
        """Return what gathers a weight for which ``get_stand_in`` returned ``stand_in``; None if each rank has it."""
        return partial(gather_shards, stand_in) if isinstance(stand_in, DTensor) else None

    def count_copies(self, weight: nn.Parameter) -> int:
        """Count the ranks over which ``sum_over_shards`` sums that hold the same elements of a trained weight."""
        return 1

    def gather_state(self, weight: nn.Parameter, values: Tensor) -> Tensor:
        """Gather values of a trained weight for a checkpoint, on the main rank; a collective.

        Shards that checkpoints have as such (``shard_group``) are returned as they are.
        """
        return values

    def take_shard(self, weight: nn.Parameter, whole: Tensor) -> Tensor:
        """Return what this rank holds of values that ``gather_state`` returned; without communication."""
        return whole

    def close(self) -> None:  # noqa: B027
        """Release files and environment variables of the engine; call it before the process group is destroyed."""

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model without wrappers of DDP and ``torch.compile``."""
        # accelerate's unwrap_model imports DeepSpeed wherever it is installed, which takes half a second.
        inner: nn.Module = getattr(model, "_orig_mod", model)
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        return getattr(inner, "_orig_mod", inner)
