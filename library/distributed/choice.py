"""Which strategy a run gets."""

from ..config import RunConfig
from .accelerator import prepare_accelerator
from .strategy import DataParallel


def strategy_of(args: RunConfig) -> DataParallel:
    """Join the other processes, and return how they work together."""
    return DataParallel(prepare_accelerator(args))
