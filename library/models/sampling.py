"""Sample preview images and clips: a diffusers pipeline around the modules in memory, with a scheduler of its own.

The denoising loop and its classifier-free guidance are those of the pipeline.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import Image
from torch import nn

from ..dataloader.sample_prompts import Prompt
from ..dataset.clip_encoding import SoundTrack
from .noise_schedulers import build_flow_scheduler, build_scheduler

if TYPE_CHECKING:
    from .base import Family


@contextmanager
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode, and back to training mode the modules that were in it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _seed_global_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, and restore them: the decoder of LTX-Video 0.9.1 draws noise from them."""
    has_states = hasattr(torch.get_device_module(device), "get_rng_state_all")  # one for each device
    with torch.random.fork_rng([device] if has_states else []):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def sample_clip(
    family: "Family",
    pipe: Any,
    prompt: Prompt,
    sampling_kwargs: Mapping[str, Any],
    generator: torch.Generator,
    sampler: str | None,
) -> tuple[list[Image], SoundTrack | None]:
    """Sample the frames of a clip, or one image, and the sound of models that make some.

    ``sampling_kwargs`` are the family's arguments of the pipeline.
    """
    if family.build_noise_process(pipe).prediction_type == "flow":
        scheduler = build_flow_scheduler(pipe.scheduler, prompt.flow_shift)
    else:
        scheduler = build_scheduler(sampler or "ddim", pipe.scheduler)
    sampling_pipe = family.adapt_sampling_pipeline(_build_sampling_pipeline(pipe, scheduler))
    width, height = family.facts.sampling.get_image_size(prompt.width, prompt.height)
    steps = prompt.num_inference_steps or family.facts.sampling.num_inference_steps
    kwargs = {"num_inference_steps": steps, **sampling_kwargs, "width": width, "height": height}
    if family.facts.pipeline.frames is not None:
        kwargs.setdefault("num_frames", prompt.num_frames or 1)
    with use_eval_mode(getattr(sampling_pipe, family.facts.denoiser_name)):
        output = sampling_pipe(generator=generator, output_type="latent", **kwargs)
    latents = output.frames if hasattr(output, "frames") else output.images
    # Decode outside of the pipeline, which would cast the float32 VAE to the denoiser's dtype.
    with _seed_global_generators(generator.initial_seed(), latents.device):
        pixels = family.decode_sampled_latents(sampling_pipe, latents, height, width)
    processor = getattr(sampling_pipe, "video_processor", None) or sampling_pipe.image_processor
    frames = pixels[0].transpose(0, 1) if pixels.ndim == 5 else pixels[:1]  # (frames, channels, height, width)
    images: list[Image] = processor.postprocess(frames, output_type="pil")
    return images, family.decode_sampled_sound(sampling_pipe, output)


def _build_sampling_pipeline(pipe: Any, scheduler: Any) -> Any:
    """A pipeline around the same modules with its own scheduler, which holds the state of the sampling."""
    _, settings = type(pipe)._get_signature_keys(type(pipe))
    options = {name: pipe.config[name] for name in settings if name in pipe.config}
    sampling_pipe = type(pipe)(**{**pipe.components, **options, "scheduler": scheduler})
    sampling_pipe.set_progress_bar_config(disable=True)
    return sampling_pipe
