"""Stable Diffusion 1.x: UNet, one CLIP text encoder, prediction of noise or velocity."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from PIL.Image import Image
from torch import Tensor, nn

from ..data.batch import Batch, Cond
from ..data.prompts import Prompt
from ..demo import stand_in
from ..diffusion.process import Process, from_table
from .base import Family
from .loading import full_precision, load_parts
from .sampling import evaluating, scheduler_for


class StableDiffusion1(Family):
    pipeline = "StableDiffusionPipeline"
    denoiser = "unet"
    text_parts = ("text_encoder", "tokenizer")
    # Every linear layer and 1x1 convolution inside the UNet's Transformer2DModel blocks.
    lora_targets = (
        "proj_in", "proj_out", "to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2",
    )  # fmt: skip
    lora_prefix = "lora_unet"
    base_model_version = "sd_v1"
    architecture = "stable-diffusion-v1"
    picture_size = (512, 512)
    picture_steps = 30
    picture_scale = 7.5

    def load(self, source: str | None, dtype: torch.dtype, parts: Sequence[str] | None = None) -> Any:
        wanted = self.parts if parts is None else parts
        if source is None:
            return stand_in.build(wanted, dtype)
        return load_parts(StableDiffusionPipeline, source, dtype, wanted, requires_safety_checker=False)

    def process(self, pipe: Any) -> Process:
        # A folder may name any scheduler; this one has the noise table of training, whatever draws pictures.
        scheduler: Any = DDPMScheduler
        trained = scheduler.from_config(pipe.scheduler.config)
        return from_table(trained.alphas_cumprod, trained.config.prediction_type)

    @torch.no_grad()
    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        embeds, _ = pipe.encode_prompt(
            list(prompts), pipe.text_encoder.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"embeds": embeds}

    @torch.no_grad()
    def encode_pixels(self, pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        with full_precision(pipe.vae):
            spread = pipe.vae.encode(pixels.to(pipe.vae.device, pipe.vae.dtype)).latent_dist
        shape = spread.mean.shape[1:]
        noise = [torch.randn(shape, generator=each, device=each.device) for each in generators]
        latents: Tensor = (
            spread.mean + spread.std * torch.stack(noise).to(spread.mean)
        ) * pipe.vae.config.scaling_factor
        return latents

    @torch.no_grad()
    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        latents = latents.to(pipe.vae.device, pipe.vae.dtype) / pipe.vae.config.scaling_factor
        with full_precision(pipe.vae):
            pixels: Tensor = pipe.vae.decode(latents, return_dict=False)[0]
        return pixels

    def predict(self, pipe: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, batch: Batch) -> Tensor:
        predicted: Tensor = denoiser(noisy, t, encoder_hidden_states=batch.cond["embeds"], return_dict=False)[0]
        return predicted

    @torch.no_grad()
    def draw(
        self, pipe: Any, prompt: Prompt, cond: Cond, negative: Cond, generator: torch.Generator, sampler: str
    ) -> Image:
        width, height = self.picture_size
        # A pipeline of its own: the scheduler keeps the course of the sampling, and the other must not see it.
        parts = {**pipe.components, "scheduler": scheduler_for(sampler, pipe.scheduler), "safety_checker": None}
        artist = type(pipe)(**parts, requires_safety_checker=False)
        artist.set_progress_bar_config(disable=True)
        with evaluating(pipe.unet):
            latents = artist(
                prompt_embeds=cond["embeds"],
                negative_prompt_embeds=negative["embeds"],
                width=prompt.width or width,
                height=prompt.height or height,
                num_inference_steps=prompt.steps or self.picture_steps,
                guidance_scale=self.picture_scale if prompt.scale is None else prompt.scale,
                generator=generator,
                output_type="latent",
            ).images
        # Decoded here and not by the pipeline, which would give a float32 VAE the denoiser's dtype.
        picture: Image = artist.image_processor.postprocess(self.decode_latents(pipe, latents), output_type="pil")[0]
        return picture
