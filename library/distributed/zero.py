"""DeepSpeed's ZeRO: what an optimizer remembers, gradients, and at stage 3 the model, divided among the processes."""

import logging
import os
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from ..data.batch import PixelBatch
from ..errors import ConfigError, UserError
from .backend import can_leave_alone, group_backend
from .engines import tell_device
from .strategy import DataParallel, LossFunction
from .structure import Structure
from .zero_files import ModelFiles
from .zero_optimizer import ZeroOptimizer
from .zero_settings import ZeroSettings

logger = logging.getLogger(__name__)


class Zero(DataParallel):
    """DeepSpeed's engine around what is trained; the loop, the optimizer and what a step means stay ours.

    The adapter is whole and readable on every process between steps.  Precision is accelerate's autocast, as
    everywhere: DeepSpeed's own would keep adapters in half precision.
    """

    divides_optimizer = "DeepSpeed"
    has_whole_model = False

    def __init__(self, accelerator: Accelerator, settings: ZeroSettings):
        super().__init__(accelerator)
        _refuse_unknown(_deepspeed(self.device), settings)
        self._engine: Any = None
        self._is_numbered = False
        self.computes_together = settings.stage == 3
        if settings.stage == 3:
            self.frozen_home = torch.device("cpu")  # no device ever holds the whole model
        self.settings = settings
        self._files: ModelFiles | None = None
        if settings.param_device == "nvme":
            self._files = ModelFiles(settings.param_path or "", self.gather)

    def refuse_other_batches(self, sizes: Collection[int], accumulation: int) -> None:
        if problems := self.settings.other_batches(sizes, accumulation, self.size):
            raise ConfigError(problems)

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, denoiser: nn.Module | None = None,
        structure: Structure | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        deepspeed = _deepspeed(self.device)
        # Of names that newer versions of torch have others for.
        warnings.filterwarnings("ignore", message=".torch.distributed.* is deprecated", category=FutureWarning)
        groups = [dict(group) for group in optimizer.param_groups]
        learning = [parameter for group in groups for parameter in group["params"]]
        config = self.settings.handed_over(pins_memory=self.pins_memory)
        # Its own is for whole models, and takes two gigabytes however little learns.
        config["zero_optimization"].setdefault("reduce_bucket_size", sum(item.numel() for item in learning))
        # DeepSpeed switches autocast off around its engine's forward, so it is switched on inside.
        model.forward = self.accelerator.autocast()(model.forward)
        self._never_be_alone()
        if self.settings.stage == 3:
            # Before the engine sees the model, which would have it whole on the device first.
            if self._files is not None:
                here = self.hosts.count(self.hosts[self.rank])
                self._files.divide(deepspeed.zero, model, config, self.size, here)
            else:
                deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
            for buffer in model.buffers():
                buffer.data = buffer.data.to(self.device)
        self._engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.have_patience()
        if self.settings.stage == 3:
            self._keep_whole(learning)
            _find_odd_readers(model)
        self.model, self.optimizer = self._engine, ZeroOptimizer(self._engine, groups, self.device)
        self._refuse_another(learning)
        logger.info("%s", self.settings.described(self.size))
        return self.model, self.optimizer

    def _never_be_alone(self) -> None:
        """A process alone belongs to no group and has no number; DeepSpeed needs both, and speaks to itself."""
        if not dist.is_initialized():
            group: Any = dist
            backend = group_backend(self.device.type, windows=False)
            group.init_process_group(backend, store=group.HashStore(), rank=0, world_size=1)
        if "LOCAL_RANK" not in os.environ:
            os.environ["LOCAL_RANK"] = "0"
            self._is_numbered = True

    def _keep_whole(self, parameters: Sequence[Any]) -> None:
        """The adapter is small, and read between steps by whoever writes or measures it."""
        zero = self._engine.optimizer
        known = {id(parameter) for parameter in zero.persistent_parameters}
        for parameter in parameters:
            parameter.ds_persist = True
            parameter.is_external_param = True  # the other is not heeded as long as the order of modules is not known
        zero.persistent_parameters.extend(item for item in parameters if id(item) not in known)
        parameters[0].all_gather(list(parameters))

    def _refuse_another(self, learning: Sequence[nn.Parameter]) -> None:
        """What DeepSpeed came up with is what was asked for."""
        engine, wanted = self._engine, self.settings
        asked_and_came: dict[str, tuple[Any, Any]] = {
            "stage": (wanted.stage, int(engine.zero_optimization_stage())),
            "processes": (self.size, engine.dp_world_size),
            "home of the optimizer": (wanted.optimizer_device, _place(engine.zero_offload_optimizer())),
            "home of the model": (wanted.param_device, _place(engine.zero_offload_param())),
            "numbers that learn": (sum(item.numel() for item in learning),
                                   sum(item.numel() for item in self.optimizer.parameters)),
            "divided model": (wanted.stage == 3, all(hasattr(item, "ds_id") for item in engine.module.parameters())),
        }  # fmt: skip
        different = [
            f"{what} {asked}, and it is {came}" for what, (asked, came) in asked_and_came.items() if asked != came
        ]
        if different:
            raise UserError(f"DeepSpeed is not as it was asked to be: {'; '.join(different)}")

    def gradients(self, loss_function: LossFunction, work: Sequence[PixelBatch], samples: int, step: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(work, start=1):
            self._engine.set_gradient_accumulation_boundary(number == len(work))
            total += self._one_batch(loss_function, batch, samples, step)
        self.pace.ready()
        return self._summed(total)

    def backward(self, loss: Tensor) -> None:
        # Past DeepSpeed, which takes gradients away as soon as they come to a parameter.
        learning = self.optimizer.parameters
        for parameter, gradient in zip(learning, torch.autograd.grad(loss, learning, allow_unused=True), strict=True):
            parameter.grad = gradient

    def _backward(self, share: Tensor) -> None:
        self._engine.backward(share * self.size)  # it takes the mean over processes

    def clip(self, parameters: Iterable[nn.Parameter], longest: float) -> Tensor:
        norm: Tensor = self.optimizer.length_of_gradient(longest)
        return norm

    def adapter_was_written(self) -> None:
        self.optimizer.take_over()

    def unwrapped(self, model: nn.Module) -> nn.Module:
        inner: Any = self._engine.module if model is self._engine else model
        return super().unwrapped(inner)

    def leave(self, *, is_well: bool = True) -> None:
        super().leave(is_well=is_well)
        if dist.is_initialized() and (is_well or can_leave_alone()):
            dist.destroy_process_group()
        if self._is_numbered:
            del os.environ["LOCAL_RANK"]
        if self._files is not None:
            self._files.remove()


def _place(offload: Any) -> str | None:
    """Where DeepSpeed says that it keeps something, if not on the device."""
    name = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    return None if name == "none" else name


def _find_odd_readers(model: nn.Module) -> None:
    """DeepSpeed finds out in a forward which weights of other modules a module reads, and fetches them.

    It does so in the forward of its engine only, and text encoders are called before it, and by previews all parts.
    """

    def look(part: nn.Module, is_forward: bool) -> None:
        for module in part.modules():
            table: Any = module._parameters
            table._in_forward = is_forward

    for part in model.children():
        part.register_forward_pre_hook(lambda part, *_: look(part, True), prepend=True)
        part.register_forward_hook(lambda part, *_: look(part, False), always_call=True)


def _refuse_unknown(deepspeed: Any, settings: ZeroSettings) -> None:
    """What DeepSpeed itself does not take, before anything is loaded."""
    try:
        deepspeed.runtime.zero.config.DeepSpeedZeroConfig(
            **settings.handed_over(pins_memory=False)["zero_optimization"]
        )
    except ValueError as error:
        faults: Any = getattr(error, "errors", list)()
        raise ConfigError([f"DeepSpeed's file: zero_optimization.{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
                           for fault in faults] or [f"DeepSpeed: {error}"]) from None  # fmt: skip


def _deepspeed(device: torch.device) -> Any:
    """The package, told where to compute, and kept from compiling what nobody here needs."""
    tell_device(device)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
