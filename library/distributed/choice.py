"""Which strategy a run gets."""

import logging

from ..config import RunConfig
from .accelerator import prepare_accelerator
from .engines import hide_from_libraries, tell_device
from .layout import layout_of
from .sharding import asked_for
from .strategy import DataParallel
from .world import World
from .zero_settings import zero_settings

logger = logging.getLogger(__name__)


def strategy_of(args: RunConfig) -> DataParallel:
    """Join the other processes, and return how they work together."""
    world = World.from_environment()
    asked = asked_for(args, world)
    zero, _ = zero_settings(args, world)  # its problems are told before the others are joined
    accelerator = prepare_accelerator(args)
    hide_from_libraries()
    tell_device(accelerator.device)
    layout = layout_of(args, world)
    if args.parallel.device_map is not None:
        from .mapped import Mapped

        return Mapped(accelerator, args.parallel.device_map)
    if layout.stages > 1:
        from .pipelined import Pipelined

        return Pipelined(accelerator, layout, args.parallel.pp_schedule)
    if zero is not None:
        from .zero import Zero

        return Zero(accelerator, zero)
    if layout.together > 1 and asked.sharding is None:
        from .grouped import Grouped

        return Grouped(accelerator, layout)
    if asked.sharding is None:
        return DataParallel(accelerator)
    from .sharded import Sharded

    for remark in asked.remarks:
        logger.warning("%s", remark)
    return Sharded(accelerator, asked.sharding, layout)
