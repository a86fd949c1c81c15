"""FSDP2 (``fully_shard``): which blocks are wrapped; the frozen model is sharded, LoRA adapters are replicated.

The adapter is whole on every rank because it is small: optimizers that look at all weights (Prodigy), clipping, EMA,
files and checkpoints then need to know nothing of sharding.  With ``--train full`` the trained weights are those of the
model, so they are sharded like frozen ones, and with them their gradients (reduce-scatter) and optimizer state.
There is no ``MixedPrecisionPolicy``: autocast, which every other strategy uses as well, sets the dtype of each kernel.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from ..dataloader.batch import PixelBatch
from ..distributed.communicator import Communicator
from ..distributed.devices import HOST
from ..distributed.fsdp_settings import FSDPSettings
from ..errors import ConfigError
from ..problems import Problem
from ..registry import copy_class_name
from .device_mesh_strategy import DeviceMeshStrategy
from .gradient_accumulation import TrainingTask
from .gradient_clipping import clip_sharded_grad_norm
from .gradient_sync import all_reduce_replicated
from .parallel_plan import ParallelPlan
from .strategy import StrategySettings
from .validate_engines import raise_problems, validate_fsdp_classes

logger = logging.getLogger(__name__)


class FSDPStrategy(DeviceMeshStrategy):
    """Shards the weights of the model and all-gathers (unshards) those of a block when it runs.

    Adapters are ignored by FSDP, so optimizers, checkpoints and LoRA files are the same as with DDP.  Without adapters
    the optimizer gets the sharded weights (DTensors).
    """

    def __init__(self, comm: Communicator, settings: StrategySettings):
        super().__init__(comm, settings)
        self.settings = fsdp = settings.fsdp or FSDPSettings(1, self.dims.dp)
        self.has_full_model, self.base_load_device = False, HOST
        sizes = {"dp_replicate": fsdp.dp_replicate, "dp_shard": fsdp.dp_shard, "tp": self.dims.tp}
        mesh = init_device_mesh(self.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
        names = ("dp_replicate", "dp_shard") if fsdp.dp_replicate > 1 else ("dp_shard",)
        self.shard_mesh: DeviceMesh = mesh[names]
        if self.trains_base:
            self.optimizer_sharding_engine = "FSDP"
            self.shard_group = mesh.get_group("dp_shard")
        comm.set_group_timeouts()

    def wrap(self, model: nn.Module, optimizer: Optimizer, plan: ParallelPlan | None = None) -> tuple[nn.Module, Any]:
        # Some blocks return views.  FSDP2 warns of in-place changes to them, which do not happen here.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        super().wrap(model, optimizer, plan)
        if self.keeps_missing_gradients:
            engine: Any = torch_fsdp._fully_shard._fsdp_param_group
            engine.RegisterPostBackwardFunction = _PostBackward
        total, local = count_parameter_bytes(model)
        logger.info(
            "FSDP: %d x %d processes (replicate x shard), %.1f MiB of %.1f MiB of weights on this rank%s",
            self.settings.dp_replicate,
            self.settings.dp_shard,
            local / 2**20,
            total / 2**20,
            ", in host memory" if self.settings.offload_params else "",
        )
        return self.model, self.optimizer

    def _partition_model(self, model: nn.Module, plan: ParallelPlan) -> None:
        raise_problems(validate_fsdp_classes(model, self.settings.block_classes))
        before = dict(model.named_parameters())
        for child in model.children():
            self.shard_module(child)
        if self.tensor_parallel is not None:
            after = dict(model.named_parameters())
            self.tensor_parallel.replace_parameters({before[name]: after[name] for name in before})

    def shard_module(self, module: nn.Module) -> None:
        """Shard the parameters of each block of a module, then those of the module itself; adapters are ignored."""
        trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if self.trains_base:
            trainable = {}
        policy = CPUOffloadPolicy(pin_memory=self.pins_memory) if self.settings.offload_params else OffloadPolicy()
        options: dict[str, Any] = {
            "mesh": self.shard_mesh,
            "ignored_params": set(trainable.values()),
            "offload_policy": policy,
        }
        for block in find_fsdp_blocks(module, self.settings.block_classes):
            with _preserve_class_name(block):
                fully_shard(block, reshard_after_forward=self.settings.reshard_after_forward, **options)
        with _preserve_class_name(module):
            # The output layers are needed first in backward, and some parameters are used outside of the forward.
            fully_shard(module, reshard_after_forward=False, **options)
        assert_sharded(module, trainable, self.shard_mesh)
        for sharded in _list_sharded_modules(module) if self.trains_base else ():
            if self.device.type == "cpu":  # gloo has no averages: FSDP then divides after the sum
                sharded.set_force_sum_reduction_for_comms(True)
            if self.dims.model_parallel_size > 1:
                sharded.set_gradient_divide_factor(float(self.comm.world_size * self.dims.cp))

    def compute_gradients(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        if not self.trains_base:
            return super().compute_gradients(task, batches, num_samples, step)

        def start_micro_batch(is_last: bool) -> AbstractContextManager[Any]:
            for module in self._sharded_modules:  # HSDP: between replicas, once per step
                module.set_requires_all_reduce(is_last, recurse=False)
            context: AbstractContextManager[Any] = self.accelerator.accumulate(self.model)
            return context

        loss = self.gradient_accumulation.accumulate_in_shards(start_micro_batch, task, batches, num_samples, step)
        self._all_reduce_gradients(1)
        return self._all_reduce_loss(loss)

    def _all_reduce_gradients(self, divisor: int) -> None:
        if not self.trains_base:
            super()._all_reduce_gradients(divisor)
        elif self.tensor_parallel is not None and self._sharded is not None:
            # FSDP has reduced them in the backward pass, among the ranks with the same part of the sharded layers.
            whole = [each for each in self.model.parameters() if each.requires_grad and each not in self._sharded]
            all_reduce_replicated(whole, self.tensor_parallel.partial_grad_parameters, self._sharded.group, self.device)

    @property
    def writes_shards(self) -> bool:
        """Parts of rows and columns are gathered, so that any other strategy can read them."""
        return self.trains_base and self._sharded is None

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        if not self.trains_base:
            return super().clip_grad_norm(parameters, max_norm)
        return clip_sharded_grad_norm(self.accelerator, parameters, max_norm, self.sum_over_shards, self.count_copies)

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Run the model without gradients; then free what the last layers gathered, or the next step would use it."""
        with super().evaluate():
            try:
                yield
            finally:
                for module in self._sharded_modules if self.trains_base else ():
                    module.reshard()

    @cached_property
    def _sharded_modules(self) -> list[FSDPModule]:
        """The modules of the wrapped model whose parameters FSDP shards as a unit."""
        return _list_sharded_modules(self.unwrap_model(self.model))


class _PostBackward(torch.autograd.Function):
    """FSDP2's node at the inputs of a block, which starts the reduction of its gradients in the backward pass.

    torch's own turns a missing gradient of an input into zeros, and the blocks before it would then get gradients of
    zeros, by which weights are decayed and moved by their momentum, where other strategies leave them alone.
    """

    @staticmethod
    def forward(ctx: Any, param_group: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.param_group = param_group
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.param_group.post_backward()
        return None, *gradients


def _list_sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """List the modules whose parameters FSDP shards as a unit."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def _preserve_class_name(module: nn.Module) -> Iterator[None]:
    """Give the class that ``fully_shard`` creates the name of the old one, by which transformers looks classes up."""
    original = type(module)
    yield
    copy_class_name(type(module), original)


def find_fsdp_blocks(model: nn.Module, class_names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the modules to shard as units, inner ones first: of ``class_names``, or of the classes the model lists."""
    listed = getattr(model, "_no_split_modules", None) or getattr(model, "_repeated_blocks", None) or ()
    for names in (class_names, listed):
        blocks = [module for module in model.modules() if type(module).__name__ in names and module is not model]
        if blocks:
            return blocks[::-1]
    option = "the launcher's fsdp_transformer_layer_cls_to_wrap"
    raise ConfigError([Problem("", f"FSDP: {type(model).__name__} does not list its block classes", f"set {option}")])


def assert_sharded(model: nn.Module, trainable: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Check that every frozen parameter is sharded over ``mesh`` and every trainable one is unchanged."""
    placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    for name, parameter in model.named_parameters():
        if name in trainable:
            is_correct = parameter is trainable[name]
        else:
            is_correct = isinstance(parameter, DTensor) and parameter.device_mesh == mesh
            is_correct = is_correct and parameter.placements == placements  # type: ignore[attr-defined]
        if not is_correct:
            raise AssertionError(f"FSDP: {name} is a {type(parameter).__name__}, not sharded as configured")


def count_parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of all parameters, and of those on this rank."""
    total = local = 0
    for parameter in model.parameters():
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total += parameter.numel() * parameter.element_size()
        local += shard.numel() * shard.element_size()
    return total, local
