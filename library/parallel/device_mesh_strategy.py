"""Tensor and context parallelism, the base of pipeline parallelism and FSDP: ranks share the model or its tokens.

LoRA adapters are replicated: after ``gradient_sync`` every rank makes the same step, so optimizers, checkpoints and
LoRA files are those of a single process.  The sizes of the dimensions are checked in distributed/parallel_dims.py.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..adapters.token_layout import ShardedTokens
from ..dataloader.batch import PixelBatch
from ..distributed.communicator import Communicator
from ..distributed.devices import HOST
from .context_parallel import ContextParallel
from .gradient_accumulation import TrainingTask
from .gradient_clipping import clip_sharded_grad_norm
from .gradient_sync import all_reduce_gradients
from .parallel_plan import ParallelPlan
from .sharded_weights import GatherWeight, PartialWeights, replace_optimizer_parameters, sum_over_group
from .strategy import Strategy, StrategySettings
from .tensor_parallel import TensorParallel
from .tensor_parallel_weights import TensorParallelWeights
from .ulysses import ProcessGroupAllToAll

if TYPE_CHECKING:
    from .compile import Compilation, CompileDynamic


logger = logging.getLogger(__name__)


class DeviceMeshStrategy(Strategy):
    """Shards linear layers (tensor parallel) and tokens (context parallel) of the denoiser over a device mesh."""

    has_collective_forward = True

    def __init__(self, comm: Communicator, settings: StrategySettings):
        super().__init__(comm, settings)
        dims = self.dims
        self.pipeline_stage = dims.get_pipeline_stage(comm.rank)
        self.is_last_stage = self.pipeline_stage == dims.pp - 1
        self.has_full_model = dims.cp == dims.model_parallel_size
        if not self.has_full_model:
            self.base_load_device = HOST  # no device has to hold the full model
        sizes = {"dp": dims.dp, "pp": dims.pp, "cp": dims.cp, "tp": dims.tp}
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
        self.tensor_parallel: TensorParallel | None = None
        self.keeps_missing_gradients = self.trains_base
        """Whether what has no part in a step keeps its weights: without a gradient, they are not decayed either."""
        self._sharded: PartialWeights | None = None
        """The trained weights of which this rank has a part, or which another rank has."""
        if dims.tp > 1:
            tp_group = self.mesh.get_group("tp")
            sharded: TensorParallelWeights | None = None
            if self.trains_base:
                self.optimizer_sharding_engine = "tensor parallelism"
                self._sharded = sharded = TensorParallelWeights(tp_group, self.device)
            self.tensor_parallel = TensorParallel.from_group(tp_group, sharded)
        names = ("dp", "cp") if self._sharded is not None and dims.cp > 1 else ("dp",)
        self._replica_group = (self.mesh[names]._flatten() if len(names) > 1 else self.mesh[names]).get_group()
        """The ranks that have the same part of what tensor parallelism shards."""
        self._compilation: Compilation | None = None
        self.context_parallel = None
        if dims.cp > 1:
            group = ProcessGroupAllToAll(self.mesh.get_group("cp"))
            self.context_parallel = ContextParallel(group, self._mark_dynamic)
        comm.set_group_timeouts()

    def compile(
        self, modules: Sequence[nn.Module], denoiser: nn.Module, dynamic: "CompileDynamic"
    ) -> "Compilation | None":
        self._compilation = super().compile(modules, denoiser, dynamic)
        return self._compilation

    def _mark_dynamic(self, tensor: Tensor) -> None:
        if self._compilation is not None:
            self._compilation.mark_dynamic(tensor)

    def wrap(self, model: nn.Module, optimizer: Optimizer, plan: ParallelPlan | None = None) -> tuple[nn.Module, Any]:
        plan = plan or ParallelPlan()
        denoiser = plan.denoiser or model
        self.keeps_missing_gradients |= getattr(model, "is_partly_idle", False)
        names = {parameter: name for name, parameter in model.named_parameters()}
        with self._disable_accelerate_compile():
            if self.tensor_parallel is not None:
                full_size = _count_bytes(denoiser)
                self.tensor_parallel.shard_layers(denoiser, plan.tensor_parallel, plan.head_args)
                ranks = f"rank {self.tensor_parallel.rank} of {self.tensor_parallel.size}"
                logger.info(
                    "tensor parallel: %s holds its shard of %d linear layers, %.1f of %.1f MiB of the denoiser",
                    *(ranks, len(plan.tensor_parallel), _count_bytes(denoiser) / 2**20, full_size / 2**20),
                )
            if self.context_parallel is not None:
                self.context_parallel.wrap_blocks(denoiser, plan)
            self._partition_model(model, plan)
            if self.context_parallel is not None:
                self.context_parallel.wrap_sequence_ends()
            # Adds autocast; does not move or wrap the model.
            self.model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        replace_optimizer_parameters(optimizer, names, dict(model.named_parameters()))
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        return self.model, self.optimizer

    def _partition_model(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Move the model to the device; subclasses distribute it over ranks first."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.device)

    @contextmanager
    def bypass_tensor_parallel(self) -> Iterator[None]:
        if self.tensor_parallel is None:
            yield
            return
        with self.tensor_parallel.bypass():
            yield

    def get_sharded_tokens(self, lora_a: nn.Module) -> ShardedTokens | None:
        return None if self.context_parallel is None else self.context_parallel.get_sharded_tokens(lora_a)

    def backward(self, loss: Tensor) -> None:
        (loss * float(self.is_last_stage)).backward()  # type: ignore[no-untyped-call]
        self._all_reduce_gradients(self.dims.dp)

    def compute_gradients(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        loss = self._all_reduce_loss(self._accumulate_gradients(task, batches, num_samples, step))
        self._all_reduce_gradients(self.comm.world_size)
        return loss

    def _all_reduce_gradients(self, divisor: int) -> None:
        partial = set() if self.tensor_parallel is None else self.tensor_parallel.partial_grad_parameters
        include_missing = self.dims.model_parallel_size > 1 and not self.keeps_missing_gradients
        sharded = () if self._sharded is None else self._sharded
        all_reduce_gradients(
            self.model,
            self.dims,
            divisor,
            partial,
            include_missing=include_missing,
            sharded=sharded,
            replica_group=self._replica_group,
        )

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        if self._sharded is None:
            return super().clip_grad_norm(parameters, max_norm)
        return clip_sharded_grad_norm(self.accelerator, parameters, max_norm, self.sum_over_shards, self.count_copies)

    @property
    def shard_rank(self) -> int:
        rank = super().shard_rank
        return rank if self._sharded is None else rank * self._sharded.group.size() + self._sharded.group.rank()

    def sum_over_shards(self, values: Tensor) -> Tensor:
        total = super().sum_over_shards(values)
        return total if self._sharded is None else sum_over_group(total, self.device, self._sharded.group)

    def count_copies(self, weight: nn.Parameter) -> int:
        return 1 if self._sharded is None or weight in self._sharded else self._sharded.group.size()

    def list_positions(self, weight: Tensor) -> Tensor:
        return super().list_positions(weight) if self._sharded is None else self._sharded.list_positions(weight)

    def get_stand_in(self, weight: Tensor) -> Tensor:
        return super().get_stand_in(weight) if self._sharded is None else self._sharded.get_stand_in(weight)

    def find_gather(self, stand_in: Tensor) -> GatherWeight | None:
        sharded = self._sharded
        if sharded is None or (weight := sharded.find_weight(stand_in)) is None:
            return super().find_gather(stand_in)
        return lambda: sharded.gather(weight, weight)

    def gather_state(self, weight: nn.Parameter, values: Tensor) -> Tensor:
        if self._sharded is None or not (weight in self._sharded or isinstance(values, DTensor)):
            return values
        whole = self._sharded.gather(weight, values)
        return whole.to(HOST) if self.comm.is_main else values

    def take_shard(self, weight: nn.Parameter, whole: Tensor) -> Tensor:
        return whole if self._sharded is None else self._sharded.take(weight, whole)

    def _all_reduce_loss(self, loss: Tensor) -> Tensor:
        """Count the loss once per group of ranks that share images."""
        return super()._all_reduce_loss(loss if self.has_loss else torch.zeros_like(loss))


def _count_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
