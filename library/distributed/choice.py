"""Which strategy a run gets."""

import logging

from ..config import RunConfig
from .accelerator import prepare_accelerator
from .engines import hide_from_libraries
from .sharding import asked_for
from .strategy import DataParallel
from .world import World

logger = logging.getLogger(__name__)


def strategy_of(args: RunConfig) -> DataParallel:
    """Join the other processes, and return how they work together."""
    asked = asked_for(args, World.from_environment())
    accelerator = prepare_accelerator(args)
    hide_from_libraries()
    if asked.sharding is None:
        return DataParallel(accelerator)
    from .sharded import Sharded

    for remark in asked.remarks:
        logger.warning("%s", remark)
    return Sharded(accelerator, asked.sharding)
