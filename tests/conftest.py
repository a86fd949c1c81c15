"""Every test runs offline, on the CPU, on one thread, and without the user's own settings."""

import gc
import logging
import multiprocessing
import os
import sys
from datetime import date
from importlib.metadata import version
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

OTHER_SYSTEMS = Path(__file__).parent / "support" / "other_systems"
SLOW_FOLDERS = {"distributed", "invariance", "interop"}
"""Folders with complete training runs and multi-process tests; `make test` runs only those marked ``quick``."""

NEWER_DIFFUSERS = {"kandinsky6": "0.42", "flux3": "0.42", "bria_fibo2": "0.42"}
"""Models that need a version of diffusers which there is not for Python 3.10."""


def pytest_addoption(parser):
    parser.addoption(
        "--slice", default="today", help="rows of tests/pairs: 3/8, all, or today (one slice after the other)"
    )
    parser.addoption(
        "--days",
        type=int,
        default=1,
        metavar="N",
        help="run the slow tests in N days, another part of them and of their rows each day, and those marked daily",
    )
    parser.addoption("--day", type=int, metavar="K", help="with --days: the part of this day, 0 to N - 1 (today's)")
    parser.addoption(
        "--start_method",
        choices=["fork", "forkserver", "spawn"],
        help="how processes are started; Windows, macOS: spawn",
    )
    parser.addoption(
        "--refuse_open_files",
        action="store_true",
        help="files that are open or mapped are not removed or replaced, as on Windows (needs Linux)",
    )


def pytest_configure(config):
    """Set the rules of other systems, for this process and all that it starts."""
    method, refuses = config.getoption("start_method"), config.getoption("refuse_open_files")
    if method is None and not refuses:
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OTHER_SYSTEMS), os.environ.get("PYTHONPATH")]))
    if method is not None:
        os.environ["TEST_START_METHOD"] = method
        multiprocessing.set_start_method(method, force=True)
    if refuses:
        os.environ["TEST_REFUSE_OPEN_FILES"] = "1"
        sys.path.append(str(OTHER_SYSTEMS))
        import open_file_rules

        open_file_rules.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in SLOW_FOLDERS and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)
    _skip_models_of_newer_diffusers(items)
    days, day = config.getoption("days"), config.getoption("day")
    if days > 1:
        _keep_daily_rows(config, items, days, date.today().toordinal() if day is None else day)


def list_missing_models():
    """Map the models that the installed diffusers does not have to the version that they need."""
    installed = [*map(int, version("diffusers").split(".")[:2])]
    return {name: needed for name, needed in NEWER_DIFFUSERS.items() if installed < [*map(int, needed.split("."))]}


def pytest_ignore_collect(collection_path):
    """Leave out files of tests of one model that the installed diffusers does not have, which they import."""
    name = collection_path.name
    return True if name.startswith("test_") and any(model in name for model in list_missing_models()) else None


def _skip_models_of_newer_diffusers(items):
    for name, needed in list_missing_models().items():
        for item in (item for item in items if name in item.nodeid):
            item.add_marker(pytest.mark.skip(reason=f"needs diffusers {needed}"))


def _keep_daily_rows(config, items, days, day):
    from daily_rows import select_daily_rows

    slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("daily")]
    rows = ((item.nodeid.partition("[")[0], item.nodeid.partition("[")[2], item) for item in slow)
    others = {*slow}.difference(select_daily_rows(rows, days, day))
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish():
    """Leave what was imported out of garbage collection, which takes a sixth of the time of small tests.

    It also runs less often: on syntax trees of the whole package it takes 40 % of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


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
