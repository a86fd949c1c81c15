"""Engines that a launcher may ask for by the environment, kept away from accelerate, which would take over the model.

accelerate sets FSDP and DeepSpeed up for models that are trained as a whole, on some devices only, and elsewhere falls
back to plain data parallel without a word.  Here the strategy of a run does it, in the same way on every device.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .world import ENGINE_VARIABLES


@contextmanager
def hide_engine_variables() -> Iterator[None]:
    """Inside, the environment asks for no engine, so that an ``Accelerator`` is one of plain data parallel."""
    hidden = {name: os.environ.pop(name) for name in ENGINE_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def unset_fsdp_variable() -> None:
    """Have nobody else act on it later: transformers would load weights on one process and none on the others."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def set_deepspeed_device(device: torch.device) -> None:
    """Keep DeepSpeed, which accelerate imports wherever it is installed, from looking for one itself and saying so."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", device.type)
