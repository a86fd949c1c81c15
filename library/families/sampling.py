"""What drawing pictures needs beside a pipeline: a scheduler by kohya's sampler name, and modules at rest."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..registry import did_you_mean

SAMPLERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
}
"""Sampler names to a diffusers class and the settings that differ from the model's own scheduler."""


def scheduler_for(sampler: str, model_scheduler: Any) -> Any:
    """A new scheduler with the noise table of the model's own."""
    if sampler not in SAMPLERS:
        raise ConfigError([f"unknown sampler {sampler!r}{did_you_mean(sampler, SAMPLERS)}"])
    name, settings = SAMPLERS[sampler]
    try:
        return getattr(importlib.import_module("diffusers"), name).from_config(model_scheduler.config, **settings)
    except ImportError as error:
        raise ConfigError([f"sampler {sampler}: {str(error).strip()}"]) from None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off, and back on where it was on."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
