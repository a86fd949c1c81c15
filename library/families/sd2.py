"""Stable Diffusion 2.x: UNet, one OpenCLIP text encoder without its last layer, prediction of noise or velocity."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from ..data.batch import Batch, Cond, Moments
from ..data.prompts import Prompt
from ..diffusion.process import Process
from . import clip_text, kl_latents
from .base import Family, Titles
from .clip_text import CLIP_LORA_TARGETS, encode_with_one
from .sampling import draw_with
from .unet import CONV_LORA_TARGETS, LORA_TARGETS, noise_process
from .unet_facts import SD2


class StableDiffusion2(Family):
    facts = SD2
    denoiser = "unet"
    hands_on_skips = True
    text_parts = ("text_encoder", "tokenizer")
    tokenizers = {"tokenizer": "stabilityai/stable-diffusion-2:tokenizer"}  # noqa: RUF012
    lora_targets = LORA_TARGETS
    conv_lora_targets = CONV_LORA_TARGETS
    lora_prefix = "lora_unet"
    lora_other_names = ("ldm",)
    text_lora_targets = {"text_encoder": CLIP_LORA_TARGETS}  # noqa: RUF012
    text_lora_prefixes = {"text_encoder": "lora_te"}  # noqa: RUF012
    picture_size = (512, 512)
    picture_steps = 30
    picture_scale = 7.5

    def process(self, pipe: Any) -> Process:
        return noise_process(pipe)

    def titles(self, pipe: Any) -> Titles:
        if pipe.scheduler.config.prediction_type == "v_prediction":
            return Titles("sd_v2_v", "stable-diffusion-v2-768-v")
        return Titles("sd_v2", "stable-diffusion-v2-512")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return {"embeds": encode_with_one(pipe, prompts, self.options)}

    def idle_text_layers(self, encoder: Any, part: str) -> tuple[str, ...]:
        return clip_text.last_layers(encoder, (self.options.clip_skip or 1) - 1)

    def too_long(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        return clip_text.too_long(pipe.tokenizer, prompts, self.options.max_token_length)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        return kl_latents.moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        return kl_latents.decode(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, batch: Batch) -> Tensor:
        predicted: Tensor = denoiser(noisy, t, encoder_hidden_states=batch.cond["embeds"], return_dict=False)[0]
        return predicted

    def draw(
        self, pipe: Any, prompt: Prompt, cond: Cond, negative: Cond, generator: torch.Generator, sampler: str | None
    ) -> Image:
        return draw_with(self, pipe, prompt, generator, sampler,
                         prompt_embeds=cond["embeds"], negative_prompt_embeds=negative["embeds"])  # fmt: skip
