"""The frozen model spread over the processes by torch's FSDP2; adapters are whole on every one of them."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..distributed.communicator import Communicator
from ..distributed.fsdp_settings import FSDPSettings
from ..distributed.parallel_dims import ParallelDims
from ..errors import ConfigError
from .blocks import ParallelPlan
from .model_parallel import ModelParallelStrategy

logger = logging.getLogger(__name__)


class FSDPStrategy(ModelParallelStrategy):
    """Each process sees its own part of a global batch, and fetches the weights of a block when it is needed.

    What learns is not spread: it is small, and so every optimizer, state and file is what it is under DDP.
    """

    def __init__(self, comm: Communicator, settings: FSDPSettings, dims: ParallelDims | None = None):
        super().__init__(comm, ParallelDims(dp=comm.world_size) if dims is None else dims)
        self.settings = settings
        self.has_full_model, self.base_load_device = False, torch.device("cpu")
        names = ("replicate", "shard") if settings.dp_replicate > 1 else ("shard",)
        whole = init_device_mesh(
            self.device.type,
            (settings.dp_replicate, settings.dp_shard, self.dims.tp),
            mesh_dim_names=("replicate", "shard", "part"),
        )
        self.shard_mesh: DeviceMesh = whole[names]
        self.comm.set_group_timeouts()

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        denoiser: nn.Module | None = None,
        parallel_plan: ParallelPlan | None = None,
    ) -> tuple[nn.Module, Any]:
        """Spread each child of ``model``, and say how much of it is here."""
        # Of blocks whose outputs are views; nothing is done to them in place, or results would not be DDP's.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        super().wrap(model, optimizer, denoiser, parallel_plan)
        whole, here = count_parameter_bytes(model)
        logger.info(
            "FSDP: %d x %d processes; of %.1f MiB of weights this one holds %.1f MiB%s",
            self.settings.dp_replicate,
            self.settings.dp_shard,
            whole / 2**20,
            here / 2**20,
            ", in host memory" if self.settings.offload_params else "",
        )
        return self.model, self.optimizer

    def _partition_model(self, model: nn.Module, denoiser: nn.Module, parallel_plan: ParallelPlan) -> None:
        classes = {type(module).__name__ for module in model.modules()}
        if unknown := [name for name in self.settings.block_classes if name not in classes]:
            raise ConfigError(
                [
                    f"the launcher's fsdp_transformer_layer_cls_to_wrap {','.join(unknown)}: no part of this"
                    " model is called so; leave it out, and diffusers names the classes"
                ]
            )
        for part in model.children():
            self.shard_module(part)

    def shard_module(self, module: nn.Module) -> None:
        """Spread the frozen weights of a model that is called as a whole, block by block, from host memory."""
        learnt = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        policy = CPUOffloadPolicy(pin_memory=self.pins_memory) if self.settings.offload_params else OffloadPolicy()
        settings: dict[str, Any] = {
            "mesh": self.shard_mesh,
            "ignored_params": set(learnt.values()),
            "offload_policy": policy,
        }
        for block in find_fsdp_blocks(module, self.settings.block_classes):
            with _preserve_class_name(block):
                fully_shard(block, reshard_after_forward=self.settings.reshard_after_forward, **settings)
        with _preserve_class_name(module):
            # What belongs to no block is needed first in backward, and some of it outside of the model's forward.
            fully_shard(module, reshard_after_forward=False, **settings)
        assert_sharded(module, learnt, self.shard_mesh)


@contextmanager
def _preserve_class_name(module: nn.Module) -> Iterator[None]:
    """Inside, torch gives the module another class; transformers, which knows classes by name, is not to notice."""
    own = type(module)
    yield
    for name in ("__module__", "__qualname__", "__name__"):
        setattr(type(module), name, getattr(own, name))


def find_fsdp_blocks(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """The modules that are fetched as a whole, inner ones first: of ``names``, or those that its authors name."""
    own = getattr(model, "_no_split_modules", None) or getattr(model, "_repeated_blocks", None) or ()
    for wanted in (names, own):
        found = [module for module in model.modules() if type(module).__name__ in wanted and module is not model]
        if found:
            return found[::-1]
    raise ConfigError(
        [
            f"FSDP: {type(model).__name__} does not say what its blocks are; name their classes with the "
            "launcher's fsdp_transformer_layer_cls_to_wrap"
        ]
    )


def assert_sharded(model: nn.Module, trainable: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """That every frozen weight is spread over all processes as asked, and what learns is still itself."""
    wanted = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    for name, parameter in model.named_parameters():
        if name in trainable:
            is_right = parameter is trainable[name]
        else:
            is_right = isinstance(parameter, DTensor) and parameter.device_mesh == mesh
            is_right = is_right and parameter.placements == wanted  # type: ignore[attr-defined]
        if not is_right:
            raise AssertionError(f"FSDP: {name} is not spread as asked, but a {type(parameter).__name__}")


def count_parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """Of all weights, and of those that this process holds."""
    whole = here = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole += parameter.numel() * parameter.element_size()
        here += local.numel() * local.element_size()
    return whole, here
