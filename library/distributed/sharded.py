"""The frozen model spread over the processes by torch's FSDP2; adapters are whole on every one of them."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..data.batch import PixelBatch
from ..errors import ConfigError
from .chain import Chain
from .flat import FlatGradients
from .sharding import Sharding
from .strategy import DataParallel, LossFunction

logger = logging.getLogger(__name__)


class Sharded(DataParallel):
    """Each process sees its own part of a global batch, and fetches the weights of a block when it is needed.

    What learns is not spread: it is small, and so every optimizer, state and file is what it is under DDP.
    """

    computes_together = True

    def __init__(self, accelerator: Accelerator, sharding: Sharding):
        super().__init__(accelerator)
        self.sharding = sharding
        self.frozen_home = torch.device("cpu")  # no device ever holds the whole model
        sizes, names = (sharding.replicas, sharding.parts), ("replicate", "shard")
        several = sharding.replicas > 1
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, sizes if several else sizes[1:],
                                                 mesh_dim_names=names if several else names[1:])  # fmt: skip

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, denoiser: nn.Module | None = None,
        chain: Chain | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        """Compile blocks, spread each child of ``model``, and say how much of it is here."""
        # Of blocks whose outputs are views; nothing is done to them in place, or results would not be DDP's.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        with self._regions_compiled(model if denoiser is None else denoiser):
            for part in model.children():
                self.spread(part)
            # What accelerate adds is autocast and a compiler for the whole; nothing is moved or wrapped.
            self.model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        whole, here = parameter_bytes(model)
        logger.info("FSDP: %d x %d processes; of %.1f MiB of weights this one holds %.1f MiB%s", self.sharding.replicas,
                    self.sharding.parts, whole / 2**20, here / 2**20,
                    ", in host memory" if self.sharding.offloads else "")  # fmt: skip
        return self.model, self.optimizer

    def spread(self, part: nn.Module) -> None:
        """Spread the frozen weights of a model that is called as a whole, block by block, from host memory."""
        learnt = {name: parameter for name, parameter in part.named_parameters() if parameter.requires_grad}
        policy = CPUOffloadPolicy(pin_memory=self.pins_memory) if self.sharding.offloads else OffloadPolicy()
        settings: dict[str, Any] = {"mesh": self.mesh, "ignored_params": set(learnt.values()), "offload_policy": policy}
        for block in blocks_of(part, self.sharding.blocks):
            with _same_names(block):
                fully_shard(block, reshard_after_forward=self.sharding.reshards, **settings)
        with _same_names(part):
            # What belongs to no block is needed first in backward, and some of it outside of the model's forward.
            fully_shard(part, reshard_after_forward=False, **settings)
        check_spread(part, learnt, self.mesh)

    def gradients(self, loss_function: LossFunction, work: Sequence[PixelBatch], samples: int, step: int) -> Tensor:
        """Forward and backward of one step; the gradients are exchanged once, after its last micro-batch."""
        loss = super().gradients(loss_function, work, samples, step)
        FlatGradients(self.model).become_the_mean(self.size)
        return loss


@contextmanager
def _same_names(module: nn.Module) -> Iterator[None]:
    """Inside, torch gives the module another class; transformers, which knows classes by name, is not to notice."""
    own = type(module)
    yield
    for name in ("__module__", "__qualname__", "__name__"):
        setattr(type(module), name, getattr(own, name))


def blocks_of(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """The modules that are fetched as a whole, inner ones first: of ``names``, or those that its authors name."""
    own = getattr(model, "_no_split_modules", None) or getattr(model, "_repeated_blocks", None) or ()
    for wanted in (names, own):
        found = [module for module in model.modules() if type(module).__name__ in wanted and module is not model]
        if found:
            return found[::-1]
    raise ConfigError([f"FSDP: {type(model).__name__} does not say what its blocks are; name their classes with the "
                       "launcher's fsdp_transformer_layer_cls_to_wrap"])  # fmt: skip


def check_spread(model: nn.Module, learnt: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """That every frozen weight is spread over all processes as asked, and what learns is still itself."""
    wanted = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    for name, parameter in model.named_parameters():
        if name in learnt:
            is_right = parameter is learnt[name]
        else:
            is_right = isinstance(parameter, DTensor) and parameter.device_mesh == mesh
            is_right = is_right and parameter.placements == wanted  # type: ignore[attr-defined]
        if not is_right:
            raise AssertionError(f"FSDP: {name} is not spread as asked, but a {type(parameter).__name__}")


def parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """Of all weights, and of those that this process holds."""
    whole = here = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole += parameter.numel() * parameter.element_size()
        here += local.numel() * local.element_size()
    return whole, here
