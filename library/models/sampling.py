"""What drawing pictures needs beside a pipeline: a scheduler by kohya's sampler name, and modules at rest."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import Image
from torch import nn

from ..data.prompts import Prompt
from .schedulers import build_flow_scheduler, build_scheduler

if TYPE_CHECKING:
    from .base import Family


def build_sampling_pipeline(pipe: Any, scheduler: Any) -> Any:
    """A pipeline around the same modules with a scheduler of its own, which keeps the course of the drawing."""
    _, settings = type(pipe)._get_signature_keys(type(pipe))
    options = {name: pipe.config[name] for name in settings if name in pipe.config}
    artist = type(pipe)(**{**pipe.components, **options, "scheduler": scheduler})
    artist.set_progress_bar_config(disable=True)
    return artist


@contextmanager
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off, and back on where it was on."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def run_sampling_pipeline(
    family: "Family", pipe: Any, prompt: Prompt, generator: torch.Generator, sampler: str | None, **conditioning: Any
) -> Image:
    """One picture by the pipeline's class with another scheduler; ``conditioning`` is given to it as it is."""
    artist = build_sampling_pipeline(pipe, build_scheduler(sampler or "ddim", pipe.scheduler))
    scale = family.default_guidance_scale if prompt.cfg_scale is None else prompt.cfg_scale
    return _run_pipeline(family, artist, prompt, generator, guidance_scale=scale, **conditioning)


def run_flow_sampling_pipeline(
    family: "Family", pipe: Any, prompt: Prompt, generator: torch.Generator, sampler: str | None, **conditioning: Any
) -> Image:
    """The same for flow matching, with the model's own scheduler; ``conditioning`` names the guidance, too."""
    artist = build_sampling_pipeline(pipe, build_flow_scheduler(sampler, pipe.scheduler, prompt.flow_shift))
    return _run_pipeline(family, artist, prompt, generator, **conditioning)


@torch.no_grad()
def _run_pipeline(
    family: "Family", sampling_pipe: Any, prompt: Prompt, generator: torch.Generator, **call: Any
) -> Image:
    width, height = prompt.width or family.default_image_size[0], prompt.height or family.default_image_size[1]
    call.setdefault("num_inference_steps", prompt.num_inference_steps or family.default_num_inference_steps)
    with use_eval_mode(getattr(sampling_pipe, family.denoiser_name)):
        latents = sampling_pipe(width=width, height=height, generator=generator, output_type="latent", **call).images
    if latents.ndim == 3:  # in a row of patches
        latents = sampling_pipe._unpack_latents(latents, height, width, sampling_pipe.vae_scale_factor)
        latents = latents.squeeze(2) if latents.ndim == 5 else latents  # a video of one frame
    # Decoded here and not by the pipeline, which would give a float32 VAE the denoiser's dtype.
    picture: Image = sampling_pipe.image_processor.postprocess(
        family.decode_latents(sampling_pipe, latents), output_type="pil"
    )[0]
    return picture
