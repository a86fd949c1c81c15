"""``plan --gpu_memory``: which ways of sharing a run fit on devices of a size, told and as data."""

import logging
from typing import Any

from ..config import RunConfig
from ..errors import ConfigError
from ..families import FAMILIES
from ..optim import optimizers
from ..training.forecast.forecast import Devices, Load, forecast
from ..training.forecast.pace import Assumed
from ..training.forecast.told import recorded, told
from ..training.forecast.ways import obstacles, refusals
from ..training.forecast.ways_out import way_out
from ..training.outline import Outlook
from ..training.parallel_fit import misfits


def with_devices(
    config: RunConfig, given: frozenset[str], outlook: Outlook, *, count: int, memory: int, flops: float, link: float
) -> tuple[dict[str, Any], str]:
    """As plain data and as text, for ``count`` devices; loads no weights."""
    optimizers.rehearse(config.optim)
    family = FAMILIES.get(outlook.detected.family)(config.model)
    if problems := [*refusals(config, count), *misfits(config, family, outlook.detected)]:
        raise ConfigError(problems)
    devices = Devices(count, memory, Assumed(flops, link))
    load = Load.of(outlook.prepared, outlook.plan.batches, outlook.plan.steps)
    logging.disable(logging.WARNING)  # what a run tells of itself; many are assembled here, on devices that are not
    try:
        rows = forecast(config, given, outlook.detected, load, devices)
        if not rows:
            raise ConfigError(obstacles(config, given, count, outlook.detected))
        fits = any(row.need.total <= devices.memory for row in rows)
        out = None if fits else way_out(config, given, outlook.detected, load, devices, rows)
    finally:
        logging.disable(logging.NOTSET)
    return recorded(rows, out, devices), told(rows, out, load, devices)
