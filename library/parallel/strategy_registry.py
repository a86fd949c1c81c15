"""Which strategy a run gets."""

import logging

from ..config import RunConfig
from ..distributed.accelerator import prepare_accelerator, set_deepspeed_device, unset_fsdp_variable
from ..distributed.communicator import Communicator
from ..distributed.deepspeed_settings import resolve_deepspeed_settings
from ..distributed.fsdp_settings import resolve_fsdp
from ..distributed.parallel_dims import build_parallel_dims
from ..distributed.world import World
from .strategy import Strategy

logger = logging.getLogger(__name__)


def build_strategy(config: RunConfig) -> Strategy:
    """Join the other processes, and return how they work together."""
    world = World.from_environment()
    asked = resolve_fsdp(config, world)
    zero, _ = resolve_deepspeed_settings(config, world)  # its problems are told before the others are joined
    comm = Communicator(prepare_accelerator(config))
    unset_fsdp_variable()
    set_deepspeed_device(comm.device)
    layout = build_parallel_dims(config, world)
    if config.parallel.device_map is not None:
        from .device_map import DeviceMapStrategy

        return DeviceMapStrategy(comm, config.parallel.device_map)
    if layout.pp > 1:
        from .pipeline import PipelineStrategy

        return PipelineStrategy(comm, layout, config.parallel.pp_schedule)
    if zero is not None:
        from .deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(comm, zero)
    if layout.model_parallel_size > 1 and asked.settings is None:
        from .model_parallel import ModelParallelStrategy

        return ModelParallelStrategy(comm, layout)
    if asked.settings is None:
        return Strategy(comm)
    from .fsdp import FSDPStrategy

    for remark in asked.notices:
        logger.warning("%s", remark)
    return FSDPStrategy(comm, asked.settings, layout)
