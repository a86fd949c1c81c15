"""What drawing pictures needs beside a pipeline: a scheduler by kohya's sampler name, and modules at rest."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import Image
from torch import nn

from ..data.prompts import Prompt
from ..errors import ConfigError
from ..registry import did_you_mean

if TYPE_CHECKING:
    from .base import Family

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


@torch.no_grad()
def draw_with(
    family: "Family", pipe: Any, prompt: Prompt, generator: torch.Generator, sampler: str, **conditioning: Any
) -> Image:
    """One picture by the pipeline's class with another scheduler; ``conditioning`` is given to it as it is."""
    width, height = family.picture_size
    _, settings = type(pipe)._get_signature_keys(type(pipe))
    options = {name: pipe.config[name] for name in settings if name in pipe.config}
    # A pipeline of its own: the scheduler keeps the course of the sampling, and the other must not see it.
    artist = type(pipe)(**{**pipe.components, **options, "scheduler": scheduler_for(sampler, pipe.scheduler)})
    artist.set_progress_bar_config(disable=True)
    with evaluating(getattr(pipe, family.denoiser)):
        latents = artist(
            width=prompt.width or width,
            height=prompt.height or height,
            num_inference_steps=prompt.steps or family.picture_steps,
            guidance_scale=family.picture_scale if prompt.scale is None else prompt.scale,
            generator=generator,
            output_type="latent",
            **conditioning,
        ).images
    # Decoded here and not by the pipeline, which would give a float32 VAE the denoiser's dtype.
    picture: Image = artist.image_processor.postprocess(family.decode_latents(pipe, latents), output_type="pil")[0]
    return picture
