"""DeepSpeed's ZeRO: what an optimizer remembers, gradients, and at stage 3 the model, divided among the processes."""

import logging
import os
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.batch import PixelBatch
from ..distributed.accelerator import set_deepspeed_device
from ..distributed.communicator import Communicator
from ..distributed.deepspeed_settings import DeepSpeedSettings
from ..distributed.process_group import select_backend
from ..errors import ConfigError, UserError
from .blocks import ParallelPlan
from .deepspeed_nvme import NVMeOffload
from .deepspeed_optimizer import DeepSpeedOptimizer
from .strategy import LossFunction, Strategy

logger = logging.getLogger(__name__)


class DeepSpeedStrategy(Strategy):
    """DeepSpeed's engine around what is trained; the loop, the optimizer and what a step means stay ours.

    The adapter is whole and readable on every process between steps.  Precision is accelerate's autocast, as
    everywhere: DeepSpeed's own would keep adapters in half precision.
    """

    optimizer_sharding_engine = "DeepSpeed"
    has_full_model = False

    def __init__(self, comm: Communicator, settings: DeepSpeedSettings):
        super().__init__(comm)
        _check_zero_config(_import_deepspeed(self.device), settings)
        self._engine: Any = None
        self._has_set_local_rank = False
        self.has_collective_forward = settings.stage == 3
        if settings.stage == 3:
            self.base_load_device = torch.device("cpu")  # no device ever holds the whole model
        self.settings = settings
        self._nvme: NVMeOffload | None = None
        if settings.offload_param_device == "nvme":
            self._nvme = NVMeOffload(settings.offload_param_path or "", self.comm.all_gather_object)

    def check_batch_sizes(self, batch_sizes: Collection[int], gradient_accumulation_steps: int) -> None:
        if problems := self.settings.validate_batch_sizes(
            batch_sizes, gradient_accumulation_steps, self.comm.world_size
        ):
            raise ConfigError(problems)

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        denoiser: nn.Module | None = None,
        parallel_plan: ParallelPlan | None = None,
    ) -> tuple[nn.Module, Any]:
        deepspeed = _import_deepspeed(self.device)
        # Of names that newer versions of torch have others for.
        warnings.filterwarnings("ignore", message=".torch.distributed.* is deprecated", category=FutureWarning)
        groups = [dict(group) for group in optimizer.param_groups]
        learning = [parameter for group in groups for parameter in group["params"]]
        config = self.settings.build_config(pin_memory=self.pins_memory)
        # Its own is for whole models, and takes two gigabytes however little learns.
        config["zero_optimization"].setdefault("reduce_bucket_size", sum(item.numel() for item in learning))
        # DeepSpeed switches autocast off around its engine's forward, so it is switched on inside.
        model.forward = self.accelerator.autocast()(model.forward)
        self._init_single_process_group()
        if self.settings.stage == 3:
            # Before the engine sees the model, which would have it whole on the device first.
            if self._nvme is not None:
                here = self.comm.hostnames.count(self.comm.hostnames[self.comm.rank])
                self._nvme.partition_model(deepspeed.zero, model, config, self.comm.world_size, here)
            else:
                deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
            for buffer in model.buffers():
                buffer.data = buffer.data.to(self.device)
        self._engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.comm.set_group_timeouts()
        if self.settings.stage == 3:
            self._keep_adapter_gathered(learning)
            _enable_external_parameter_detection(model)
        self.model, self.optimizer = self._engine, DeepSpeedOptimizer(self._engine, groups, self.device)
        self._check_engine(learning)
        logger.info("%s", self.settings.format_summary(self.comm.world_size))
        return self.model, self.optimizer

    def _init_single_process_group(self) -> None:
        """A process alone belongs to no group and has no number; DeepSpeed needs both, and speaks to itself."""
        if not dist.is_initialized():
            group: Any = dist
            backend = select_backend(self.device.type, is_windows=False)
            group.init_process_group(backend, store=group.HashStore(), rank=0, world_size=1)
        if "LOCAL_RANK" not in os.environ:
            os.environ["LOCAL_RANK"] = "0"
            self._has_set_local_rank = True

    def _keep_adapter_gathered(self, parameters: Sequence[Any]) -> None:
        """The adapter is small, and read between steps by whoever writes or measures it."""
        zero = self._engine.optimizer
        known = {id(parameter) for parameter in zero.persistent_parameters}
        for parameter in parameters:
            parameter.ds_persist = True
            parameter.is_external_param = True  # the other is not heeded as long as the order of modules is not known
        zero.persistent_parameters.extend(item for item in parameters if id(item) not in known)
        parameters[0].all_gather(list(parameters))

    def _check_engine(self, trainable: Sequence[nn.Parameter]) -> None:
        """What DeepSpeed came up with is what was asked for."""
        engine, wanted = self._engine, self.settings
        asked_and_came: dict[str, tuple[Any, Any]] = {
            "stage": (wanted.stage, int(engine.zero_optimization_stage())),
            "processes": (self.comm.world_size, engine.dp_world_size),
            "home of the optimizer": (
                wanted.offload_optimizer_device,
                _get_offload_device(engine.zero_offload_optimizer()),
            ),
            "home of the model": (wanted.offload_param_device, _get_offload_device(engine.zero_offload_param())),
            "numbers that learn": (
                sum(item.numel() for item in trainable),
                sum(item.numel() for item in self.optimizer.parameters),
            ),
            "divided model": (wanted.stage == 3, all(hasattr(item, "ds_id") for item in engine.module.parameters())),
        }
        different = [
            f"{what} {asked}, and it is {came}" for what, (asked, came) in asked_and_came.items() if asked != came
        ]
        if different:
            raise UserError(f"DeepSpeed is not as it was asked to be: {'; '.join(different)}")

    def compute_gradients(
        self, loss_function: LossFunction, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            self._engine.set_gradient_accumulation_boundary(number == len(batches))
            total += self._run_micro_batch(loss_function, batch, num_samples, step)
        self.straggler_monitor.mark_gradients_ready()
        return self._all_reduce_loss(total)

    def backward(self, loss: Tensor) -> None:
        # Past DeepSpeed, which takes gradients away as soon as they come to a parameter.
        learning = self.optimizer.parameters
        for parameter, gradient in zip(learning, torch.autograd.grad(loss, learning, allow_unused=True), strict=True):
            parameter.grad = gradient

    def _backward_unscaled(self, loss: Tensor) -> None:
        self._engine.backward(loss * self.comm.world_size)  # it takes the mean over processes

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        norm: Tensor = self.optimizer.compute_grad_norm(max_norm)
        return norm

    def sync_optimizer_copies(self) -> None:
        self.optimizer.copy_parameters_to_shards()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        inner: Any = self._engine.module if model is self._engine else model
        return super().unwrap_model(inner)

    def close(self) -> None:
        if self._has_set_local_rank:
            del os.environ["LOCAL_RANK"]
        if self._nvme is not None:
            self._nvme.remove()


def _get_offload_device(offload: Any) -> str | None:
    """Where DeepSpeed says that it keeps something, if not on the device."""
    name = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    return None if name == "none" else name


def _enable_external_parameter_detection(model: nn.Module) -> None:
    """DeepSpeed finds out in a forward which weights of other modules a module reads, and fetches them.

    It does so in the forward of its engine only, and text encoders are called before it, and by previews all parts.
    """

    def set_in_forward(part: nn.Module, is_forward: bool) -> None:
        for module in part.modules():
            table: Any = module._parameters
            table._in_forward = is_forward

    for part in model.children():
        part.register_forward_pre_hook(lambda part, *_: set_in_forward(part, True), prepend=True)
        part.register_forward_hook(lambda part, *_: set_in_forward(part, False), always_call=True)


def _check_zero_config(deepspeed: Any, settings: DeepSpeedSettings) -> None:
    """What DeepSpeed itself does not take, before anything is loaded."""
    try:
        deepspeed.runtime.zero.config.DeepSpeedZeroConfig(
            **settings.build_config(pin_memory=False)["zero_optimization"]
        )
    except ValueError as error:
        faults: Any = getattr(error, "errors", list)()
        raise ConfigError(
            [
                f"DeepSpeed's file: zero_optimization.{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
                for fault in faults
            ]
            or [f"DeepSpeed: {error}"]
        ) from None


def _import_deepspeed(device: torch.device) -> Any:
    """The package, told where to compute, and kept from compiling what nobody here needs."""
    set_deepspeed_device(device)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
