"""Several processes work on the same pictures, each with a part of the frozen model; adapters are whole on all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..data.batch import PixelBatch
from ..distributed.communicator import Communicator
from ..distributed.memory import record_phase
from ..distributed.parallel_dims import ParallelDims
from .blocks import ParallelPlan
from .context_parallel import ContextParallel
from .gradient_sync import FlatGradients
from .strategy import LossFunction, Strategy
from .tensor_parallel import TensorParallel
from .ulysses import ProcessGroupAllToAll

if TYPE_CHECKING:
    from .compile import Compilation, CompileDynamic


class ModelParallelStrategy(Strategy):
    """A process finds gradients for what it computed, and their sum over all processes is the gradient.

    So all of them keep all adapters the same, and optimizers, states and files are what they are on one process.
    """

    has_collective_forward = True

    def __init__(self, comm: Communicator, dims: ParallelDims):
        super().__init__(comm)
        self.dims, self.model_parallel_size = dims, dims.model_parallel_size
        self.data_parallel_rank, self.data_parallel_size = dims.get_data_parallel_rank(self.comm.rank), dims.dp
        self.loss_ranks = dims.get_loss_ranks()
        self.has_loss = self.comm.rank in self.loss_ranks
        self.pipeline_stage = dims.get_pipeline_stage(self.comm.rank)
        self.is_last_stage = self.pipeline_stage == dims.pp - 1
        self.has_full_model = dims.cp == dims.model_parallel_size
        if not self.has_full_model:
            self.base_load_device = torch.device("cpu")  # no device ever holds all of it
        sizes = {"data": dims.dp, "stage": dims.pp, "context": dims.cp, "part": dims.tp}
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
        self.tensor_parallel = TensorParallel.from_group(self.mesh.get_group("part")) if dims.tp > 1 else None
        self._compilation: Compilation | None = None
        self.context_parallel = None
        if dims.cp > 1:
            self.context_parallel = ContextParallel(
                ProcessGroupAllToAll(self.mesh.get_group("context")), self._mark_dynamic
            )
        self.comm.set_group_timeouts()

    def compile(
        self, modules: Sequence[nn.Module], denoiser: nn.Module, dynamic: "CompileDynamic"
    ) -> "Compilation | None":
        """As without others; of what changes in an exchange, it is told."""
        self._compilation = super().compile(modules, denoiser, dynamic)
        return self._compilation

    def _mark_dynamic(self, tensor: Tensor) -> None:
        if self._compilation is not None:
            self._compilation.mark_dynamic(tensor)

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        denoiser: nn.Module | None = None,
        parallel_plan: ParallelPlan | None = None,
    ) -> tuple[nn.Module, Any]:
        """Take the model apart, and bring this process's part of it to the device."""
        denoiser, parallel_plan = denoiser or model, parallel_plan or ParallelPlan()
        with self._disable_accelerate_compile():
            if self.tensor_parallel is not None:
                self.tensor_parallel.shard_layers(denoiser, parallel_plan.tensor_parallel)
            if self.context_parallel is not None:
                self.context_parallel.wrap_blocks(denoiser, parallel_plan)
            self._partition_model(model, denoiser, parallel_plan)
            if self.context_parallel is not None:
                self.context_parallel.wrap_sequence_ends()
            # What accelerate adds is autocast; nothing is moved or wrapped.
            self.model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        return self.model, self.optimizer

    def _partition_model(self, model: nn.Module, denoiser: nn.Module, parallel_plan: ParallelPlan) -> None:
        """What else is left to others; what is not brings itself to the device."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.device)

    @contextmanager
    def bypass_tensor_parallel(self) -> Iterator[None]:
        """Inside, single layers work as if nothing was taken apart."""
        if self.tensor_parallel is None:
            yield
            return
        with self.tensor_parallel.bypass():
            yield

    def get_token_positions(self, lora_a: nn.Module) -> Tensor | None:
        """Only some, where a picture is shared."""
        return None if self.context_parallel is None else self.context_parallel.get_token_positions(lora_a)

    def backward(self, loss: Tensor) -> None:
        """The gradients of a loss that several processes computed together, on all of them."""
        (loss * float(self.is_last_stage)).backward()  # type: ignore[no-untyped-call]
        self._all_reduce_gradients(self.dims.dp)

    def compute_gradients(
        self, loss_function: LossFunction, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        """Forward and backward of one step; the gradients are exchanged once, after its last micro-batch."""
        loss = super().compute_gradients(loss_function, batches, num_samples, step)
        self._all_reduce_gradients(self.comm.world_size)
        return loss

    def _all_reduce_gradients(self, divisor: int) -> None:
        """The sum over all processes, divided by so many; what several of them found as a whole counts once."""
        if self.tensor_parallel is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None and parameter not in self.tensor_parallel.partial_grad_parameters:
                    parameter.grad /= self.dims.tp
        with record_phase("communication"):
            gradients = FlatGradients(self.model, include_missing=self.dims.model_parallel_size > 1)
            gradients.all_reduce_mean(divisor * self.dims.cp)

    def _all_reduce_loss(self, loss: Tensor) -> Tensor:
        return super()._all_reduce_loss(loss if self.has_loss else torch.zeros_like(loss))
