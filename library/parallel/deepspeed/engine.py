"""DeepSpeed ZeRO: optimizer state and gradients sharded over the ranks, at stage 3 also the model.

The engine is driven directly and not by accelerate, which steps inside ``backward``, before gradients can be clipped
or checked for NaN.
"""

import logging
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import patch_environment
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from ...dataloader.batch import PixelBatch
from ...distributed.accelerator import set_deepspeed_device
from ...distributed.communicator import Communicator
from ...distributed.deepspeed_settings import DeepSpeedSettings
from ...distributed.devices import HOST
from ...distributed.process_group import select_backend
from ...distributed.validate_sharding import validate_deepspeed_batch_sizes
from ...errors import UserError
from ..gradient_accumulation import TrainingTask
from ..gradient_sync import scale_loss
from ..parallel_plan import ParallelPlan
from ..sharded_weights import GatherWeight, gather_shards
from ..strategy import Strategy, StrategySettings
from ..validate_engines import raise_problems, validate_zero_config
from .mapped_memory import MappedMemory
from .nvme_offload import NVMeOffload
from .sharded_optimizer import ShardedDeepSpeedOptimizer
from .weight_shards import WeightShards
from .zero_optimizer import DeepSpeedOptimizer

logger = logging.getLogger(__name__)
MAPPED_GROUP_SIZE = 10**8
"""Elements that the optimizer updates at once where its state is in files, and so of what it needs in memory."""
FULL_BUCKET_SIZE = 5 * 10**7
"""Elements of ``reduce_bucket_size`` at stage 3 with trained weights; DeepSpeed's default would be a buffer of 2 GB."""


class DeepSpeedStrategy(Strategy):
    """Runs forward, backward and optimizer step through a DeepSpeed engine.

    Between steps adapters are complete on every rank.  Where stage 3 shards the trained weights of the model itself,
    the optimizer has the slices of this rank (``weight_shards``), and the model gathers weights when it uses them.
    Mixed precision is accelerate's autocast: DeepSpeed's own would keep adapters in half precision.
    """

    optimizer_sharding_engine = "DeepSpeed"

    def __init__(self, comm: Communicator, settings: StrategySettings):
        super().__init__(comm, settings)
        self.settings = self._summary = zero = settings.deepspeed or DeepSpeedSettings()
        _import_deepspeed(self.device)
        raise_problems(validate_zero_config(zero))
        self._engine: Any = None
        self._has_set_local_rank = False
        self.has_collective_forward = zero.stage == 3
        self.has_full_model = self.can_quantize_base = zero.stage < 3
        if zero.stage == 3:
            self.base_load_device = HOST  # no device has to hold the full model
        self._weight_shards: WeightShards | None = None
        if zero.stage == 3 and self.trains_base:
            self._init_single_process_group()
            self._shard_mesh = init_device_mesh(self.device.type, (comm.world_size,), mesh_dim_names=("dp",))
            self.shard_group = self._shard_mesh.get_group()
        self._nvme: NVMeOffload | None = None
        self._mapped = dict[str, MappedMemory]()
        if self.trains_base and zero.uses_files:
            self._map_offloaded(zero)
        elif zero.offload_param_device == "nvme":
            self._nvme = NVMeOffload(zero.offload_param_path or "", comm.all_gather_object)

    def _map_offloaded(self, zero: DeepSpeedSettings) -> None:
        """Keep what is offloaded in files that are mapped, which to DeepSpeed are host memory."""
        folders = {"optimizer": zero.offload_optimizer_path, "param": zero.offload_param_path}
        devices = {"optimizer": zero.offload_optimizer_device, "param": zero.offload_param_device}
        for name, folder in folders.items():
            if devices[name] == "nvme" and folder is not None:
                self._mapped[name] = MappedMemory(f"offload_{name}_nvme_path", folder)
        self.settings, self._summary = zero.keep_in_host_memory(), zero
        self.has_offloaded_state_in_files = "optimizer" in self._mapped

    def check_batch_sizes(self, batch_sizes: Collection[int], gradient_accumulation_steps: int) -> None:
        sizes = batch_sizes, gradient_accumulation_steps, self.comm.world_size
        raise_problems(validate_deepspeed_batch_sizes(self.settings, *sizes))

    def wrap(self, model: nn.Module, optimizer: Optimizer, plan: ParallelPlan | None = None) -> tuple[nn.Module, Any]:
        deepspeed = _import_deepspeed(self.device)
        # DeepSpeed uses names that torch has deprecated.
        warnings.filterwarnings("ignore", message=".torch.distributed.* is deprecated", category=FutureWarning)
        groups = [dict(group) for group in optimizer.param_groups]
        trainable = [parameter for group in groups for parameter in group["params"]]
        trainable_numel = sum(item.numel() for item in trainable)  # partitioned parameters have no elements
        config = self.settings.build_config(pin_memory=self.pins_memory and not self._mapped)
        # DeepSpeed's default allocates 2 GB for an adapter of any size.
        if not self.trains_base:
            config["zero_optimization"].setdefault("reduce_bucket_size", trainable_numel)
        elif self.settings.stage == 3:
            config["zero_optimization"].setdefault("reduce_bucket_size", min(trainable_numel, FULL_BUCKET_SIZE))
        if self._mapped:
            config["zero_optimization"].setdefault("sub_group_size", MAPPED_GROUP_SIZE)
        # DeepSpeed disables autocast around the forward of its engine, so enable it inside.
        model.forward = self.accelerator.autocast()(model.forward)
        self._init_single_process_group()
        if self.settings.stage == 3:
            # Partition before the engine gets the model, which would move all of it to the device first.
            if self._nvme is not None:
                ranks_per_machine = self.comm.hostnames.count(self.comm.hostnames[self.comm.rank])
                self._nvme.partition_model(deepspeed.zero, model, config, self.comm.world_size, ranks_per_machine)
            else:
                deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
            for buffer in model.buffers():
                buffer.data = buffer.data.to(self.device)
        with patch_environment(**get_local_rank_variables(self.device)):
            self._engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.comm.set_group_timeouts()
        self._move_to_files()
        if self.settings.stage == 3:
            if self.shard_group is None:
                self._keep_adapter_gathered(trainable)
            _enable_external_parameter_detection(model)
        self.model, self.optimizer = self._engine, self._build_optimizer(groups, trainable)
        self._check_engine(trainable_numel)
        logger.info("%s", self._summary.format_summary(self.comm.world_size))
        return self.model, self.optimizer

    def _build_optimizer(
        self, groups: Sequence[dict[str, Any]], trainable: Sequence[nn.Parameter]
    ) -> DeepSpeedOptimizer:
        if self.shard_group is not None:
            self._weight_shards = WeightShards(self._engine.optimizer, trainable, self._shard_mesh)
            return ShardedDeepSpeedOptimizer(
                self._engine, groups, self.device, self._weight_shards, self._mapped.get("optimizer")
            )
        optimizer = DeepSpeedOptimizer(self._engine, groups, self.device)
        if self.trains_base:
            optimizer.keep_state_on_main_host()
        return optimizer

    def _move_to_files(self) -> None:
        """Move to files what DeepSpeed has in host memory, and optimizer state as it comes."""
        zero = self._engine.optimizer
        if files := self._mapped.get("optimizer"):
            masters: list[Tensor] = list(zero.fp32_partitioned_groups_flat)
            gradients = [each.grad for each in masters if each.grad is not None]
            accumulated = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values()
            files.move([*masters, *gradients, zero.grad_partitions_flat_buffer, *accumulated])
            files.move_state_after_steps(zero.optimizer)
        if files := self._mapped.get("param"):
            partitions = [parameter.ds_tensor for parameter in self._engine.module.parameters()]
            flat = [each for each in zero.fp16_partitioned_groups_flat if each is not None]
            files.move([*partitions, *flat, *zero.param_groups_fp16_flat_cpu_memory])

    def _init_single_process_group(self) -> None:
        """Create the process group and ``LOCAL_RANK`` that DeepSpeed needs for a process without a launcher, too."""
        if not dist.is_initialized():
            group: Any = dist
            backend = select_backend(self.device.type, is_windows=False)
            group.init_process_group(backend, store=group.HashStore(), rank=0, world_size=1)
        if "LOCAL_RANK" not in os.environ:
            os.environ["LOCAL_RANK"] = "0"
            self._has_set_local_rank = True

    def _keep_adapter_gathered(self, parameters: Sequence[Any]) -> None:
        """Never partition adapters, which are small and read between steps."""
        zero = self._engine.optimizer
        known = {id(parameter) for parameter in zero.persistent_parameters}
        for parameter in parameters:
            parameter.ds_persist = True
            parameter.is_external_param = True  # ds_persist has no effect until DeepSpeed has traced a step
        zero.persistent_parameters.extend(item for item in parameters if id(item) not in known)
        parameters[0].all_gather(list(parameters))

    def _check_engine(self, trainable_numel: int) -> None:
        """Compare the engine with the settings."""
        engine, settings = self._engine, self.settings
        expected_and_actual: dict[str, tuple[Any, Any]] = {
            "stage": (settings.stage, int(engine.zero_optimization_stage())),
            "world size": (self.comm.world_size, engine.dp_world_size),
            "optimizer offload": (
                settings.offload_optimizer_device,
                _get_offload_device(engine.zero_offload_optimizer()),
            ),
            "parameter offload": (settings.offload_param_device, _get_offload_device(engine.zero_offload_param())),
            "trainable parameters": (
                trainable_numel,
                sum(item.numel() for item in self.optimizer.parameters),
            ),
            "partitioned model": (
                settings.stage == 3,
                all(hasattr(item, "ds_id") for item in engine.module.parameters()),
            ),
        }
        mismatches = [
            f"{name} is {actual}, expected {expected}"
            for name, (expected, actual) in expected_and_actual.items()
            if expected != actual
        ]
        if mismatches:
            raise UserError(f"DeepSpeed's engine does not match its settings: {'; '.join(mismatches)}")

    def compute_gradients(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        accumulate = self.gradient_accumulation.accumulate_in_deepspeed
        total = accumulate(self._engine, task, batches, num_samples, step)
        self.straggler_monitor.mark_gradients_ready()
        return self._all_reduce_loss(total)

    def backward(self, loss: Tensor) -> None:
        if self._weight_shards is not None:
            self._engine.set_gradient_accumulation_boundary(True)
            with self._weight_shards.record_gradients() as reached:
                self._engine.backward(loss)
            self.optimizer.take_gradients(reached)
            return
        # Not through the engine, which takes gradients away in hooks as soon as they are computed.
        trainable = self.optimizer.parameters
        for parameter, gradient in zip(trainable, torch.autograd.grad(loss, trainable, allow_unused=True), strict=True):
            parameter.grad = gradient

    def _backward_micro_batch(self, loss: Tensor) -> None:
        accumulation_steps = self.accelerator.gradient_accumulation_steps
        self._engine.backward(scale_loss(loss, "deepspeed", accumulation_steps, self.comm.world_size))

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        norm: Tensor = self.optimizer.clip_in_next_step(max_norm)
        return norm

    def sync_master_weights(self) -> None:
        self.optimizer.copy_parameters_to_shards()

    def use_written_weights(self) -> None:
        if self._weight_shards is not None:
            self._weight_shards.update_model()

    def iter_trained_weights(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().iter_trained_weights(model):
            yield name, parameter if self._weight_shards is None else self._weight_shards.get_trained(parameter)

    def get_stand_in(self, weight: Tensor) -> Tensor:
        return weight.detach() if self._weight_shards is None else self._weight_shards.get_stand_in(weight)

    def find_gather(self, stand_in: Tensor) -> GatherWeight | None:
        shard = None if self._weight_shards is None else self._weight_shards.find_shard(stand_in)
        return None if shard is None else lambda: gather_shards(shard).view(stand_in.shape)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        inner: Any = self._engine.module if model is self._engine else model
        return super().unwrap_model(inner)

    def close(self) -> None:
        if self._has_set_local_rank:
            del os.environ["LOCAL_RANK"]
        if self._nvme is not None:
            self._nvme.remove()


def get_local_rank_variables(device: torch.device) -> dict[str, int]:
    """Return variables that make the local rank the device's index, as DeepSpeed assumes; under SLURM it may differ."""
    if device.index is None:
        return {}
    return dict.fromkeys({"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys(), device.index)


def _get_offload_device(offload: Any) -> str | None:
    name = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    return None if name == "none" else name


def _enable_external_parameter_detection(model: nn.Module) -> None:
    """Have DeepSpeed detect parameters that a module reads of other modules, also outside of the engine's forward.

    Text encoders run before it, and previews call all modules themselves.
    """

    def set_in_forward(child: nn.Module, is_forward: bool) -> None:
        for module in child.modules():
            parameters: Any = module._parameters
            parameters._in_forward = is_forward

    for child in model.children():
        child.register_forward_pre_hook(lambda child, *_: set_in_forward(child, True), prepend=True)
        child.register_forward_hook(lambda child, *_: set_in_forward(child, False), always_call=True)


def _import_deepspeed(device: torch.device) -> Any:
    """Import the package for this device, without the kernels that it would compile for CPU communication."""
    set_deepspeed_device(device)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
