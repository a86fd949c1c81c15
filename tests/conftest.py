"""Every test runs offline, on the CPU, on one thread, and without the user's own settings."""

import gc
import logging
import os
from pathlib import Path

import pytest

for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "WANDB_API_KEY"):
    os.environ.pop(name, None)
os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}

from hypothesis import settings  # noqa: E402 - it reads the environment that is set above

settings.register_profile("house", deadline=None)  # the duration of an example depends on the machine
settings.load_profile("house")

SLOW_FOLDERS = {"distributed", "invariance", "interop"}
"""Folders with complete training runs and multi-process tests; `make test` runs only those marked ``quick``."""


def pytest_addoption(parser):
    parser.addoption(
        "--slice", default="today", help="rows of tests/pairs: 3/8, all, or today (one slice after the other)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in SLOW_FOLDERS and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Leave what was imported out of garbage collection, which takes a sixth of the time of small tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Restore the logger that a command configures, so that the next test sees its messages."""
    logger = logging.getLogger("library")
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers[:]
    try:
        return (yield)
    finally:
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers
