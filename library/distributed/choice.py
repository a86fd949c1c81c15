"""Which strategy a run gets."""

import logging

from ..config import RunConfig
from .accelerator import prepare_accelerator
from .engines import unset_fsdp_variable, set_deepspeed_device
from .layout import build_parallel_dims
from .sharding import resolve_fsdp
from .strategy import Strategy
from .world import World
from .zero_settings import resolve_deepspeed_settings

logger = logging.getLogger(__name__)


def build_strategy(config: RunConfig) -> Strategy:
    """Join the other processes, and return how they work together."""
    world = World.from_environment()
    asked = resolve_fsdp(config, world)
    zero, _ = resolve_deepspeed_settings(config, world)  # its problems are told before the others are joined
    accelerator = prepare_accelerator(config)
    unset_fsdp_variable()
    set_deepspeed_device(accelerator.device)
    layout = build_parallel_dims(config, world)
    if config.parallel.device_map is not None:
        from .mapped import DeviceMapStrategy

        return DeviceMapStrategy(accelerator, config.parallel.device_map)
    if layout.pp > 1:
        from .pipelined import PipelineStrategy

        return PipelineStrategy(accelerator, layout, config.parallel.pp_schedule)
    if zero is not None:
        from .zero import DeepSpeedStrategy

        return DeepSpeedStrategy(accelerator, zero)
    if layout.model_parallel_size > 1 and asked.settings is None:
        from .grouped import ModelParallelStrategy

        return ModelParallelStrategy(accelerator, layout)
    if asked.settings is None:
        return Strategy(accelerator)
    from .sharded import FSDPStrategy

    for remark in asked.notices:
        logger.warning("%s", remark)
    return FSDPStrategy(accelerator, asked.settings, layout)
