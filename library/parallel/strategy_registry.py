"""The table of parallel strategies, and ``build_strategy``, which selects one by options and launcher."""

import logging
from collections.abc import Callable, Sequence

from ..config import RunConfig
from ..distributed.accelerator import prepare_accelerator, set_deepspeed_device, unset_fsdp_variable
from ..distributed.communicator import Communicator
from ..distributed.deepspeed_settings import resolve_deepspeed
from ..distributed.fsdp_settings import find_ignored_fsdp_settings, resolve_fsdp
from ..distributed.parallel_dims import build_parallel_dims
from ..distributed.world import World
from ..registry import Registry
from .quantize import select_nf4_kernel
from .strategy import Strategy, StrategySettings

logger = logging.getLogger(__name__)

STRATEGIES: Registry[type[Strategy]] = Registry(
    "parallel strategy",
    __package__,
    {
        "ddp": ".ddp:DDPStrategy",
        "device_map": ".device_map:DeviceMapStrategy",
        "pipeline": ".pipeline:PipelineStrategy",
        "deepspeed": ".deepspeed.engine:DeepSpeedStrategy",
        "fsdp": ".fsdp:FSDPStrategy",
        "device_mesh": ".device_mesh_strategy:DeviceMeshStrategy",
    },
)


def build_strategy(config: RunConfig, is_stop_requested: Callable[[], bool] = lambda: False) -> Strategy:
    """Join the process group and build the strategy of this run."""
    world = World.from_environment()
    comm = Communicator(prepare_accelerator(config))
    unset_fsdp_variable()
    set_deepspeed_device(comm.device)
    for notice in find_ignored_fsdp_settings(world):
        logger.warning("%s", notice)
    settings = StrategySettings(
        dims=build_parallel_dims(config.parallel, world.world_size),
        fsdp=resolve_fsdp(config.sharding, config.parallel.tp_size, world),
        deepspeed=resolve_deepspeed(config.deepspeed, world),
        device_map=config.parallel.device_map,
        pp_schedule=config.parallel.pp_schedule,
        uses_cuda_graphs=config.distributed.cuda_graphs,
        trains_base=config.adapter.is_full,
        is_stop_requested=is_stop_requested,
    )
    strategy = STRATEGIES.get(select_strategy(settings))(comm, settings)
    select_base_kernel(strategy, config.model.quantize_base)
    return strategy


def select_base_kernel(strategy: Strategy, quantize_base: str, stored_formats: Sequence[str] = ()) -> None:
    """Select the kernel of a base that is rounded to nf4, or that the model's files store in it."""
    if strategy.nf4_kernel is None and "nf4" in (quantize_base, *stored_formats):
        strategy.nf4_kernel = select_nf4_kernel(strategy.device)


def select_strategy(settings: StrategySettings) -> str:
    """Return the name of the strategy for these settings."""
    if settings.device_map is not None:
        return "device_map"
    if settings.dims is not None and settings.dims.pp > 1:
        return "pipeline"
    if settings.deepspeed is not None:
        return "deepspeed"
    if settings.fsdp is not None:
        return "fsdp"
    if settings.dims is not None and settings.dims.model_parallel_size > 1:
        return "device_mesh"
    return "ddp"
