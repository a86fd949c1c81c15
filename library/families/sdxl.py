"""Stable Diffusion XL: UNet that is told sizes, two CLIP text encoders, prediction of noise or velocity."""

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
from .clip_text import CLIP_LORA_TARGETS, PIECE, joined, token_rows
from .sampling import draw_with
from .unet import CONV_LORA_TARGETS, LORA_TARGETS, noise_process
from .unet_facts import SDXL


class StableDiffusionXL(Family):
    facts = SDXL
    denoiser = "unet"
    hands_on_skips = True
    text_parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    tokenizers = {  # noqa: RUF012
        "tokenizer": "openai/clip-vit-large-patch14",
        "tokenizer_2": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
    }
    lora_targets = LORA_TARGETS
    conv_lora_targets = CONV_LORA_TARGETS
    lora_prefix = "lora_unet"
    lora_names = "ldm"
    text_lora_targets = dict.fromkeys(("text_encoder", "text_encoder_2"), CLIP_LORA_TARGETS)
    text_lora_prefixes = {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}  # noqa: RUF012
    picture_size = (1024, 1024)
    picture_steps = 30
    picture_scale = 7.5

    def process(self, pipe: Any) -> Process:
        return noise_process(pipe)

    def titles(self, pipe: Any) -> Titles:
        return Titles("sdxl_base_v1-0", "stable-diffusion-xl-v1-base")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        length = self.options.max_token_length
        states = []
        for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
            rows = token_rows(tokenizer, prompts, length)
            output = encoder(rows.to(encoder.device, non_blocking=True), output_hidden_states=True)
            states.append(joined(output.hidden_states[-2], length // PIECE))
        pooled = output.text_embeds[:: length // PIECE]  # of the first piece of each prompt
        return {"embeds": torch.cat(states, dim=-1), "pooled": pooled}

    def idle_text_layers(self, encoder: Any, part: str) -> tuple[str, ...]:
        # Only the second one's last layer is read, for the text as a whole.
        return clip_text.last_layers(encoder, 1) if part == "text_encoder" else ()

    def too_long(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        return clip_text.too_long(pipe.tokenizer, prompts, self.options.max_token_length)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        return kl_latents.moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        return kl_latents.decode(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, batch: Batch) -> Tensor:
        # The frame is in the order that the UNet reads it: original size, crop, target size; height before width.
        sizes = {"text_embeds": batch.cond["pooled"], "time_ids": batch.frame}
        predicted: Tensor = denoiser(
            noisy, t, encoder_hidden_states=batch.cond["embeds"], added_cond_kwargs=sizes, return_dict=False
        )[0]
        return predicted

    def draw(
        self, pipe: Any, prompt: Prompt, cond: Cond, negative: Cond, generator: torch.Generator, sampler: str | None
    ) -> Image:
        # The pipeline tells the UNet an uncropped picture of the size that is drawn.
        return draw_with(
            self, pipe, prompt, generator, sampler,
            prompt_embeds=cond["embeds"], pooled_prompt_embeds=cond["pooled"],
            negative_prompt_embeds=negative["embeds"], negative_pooled_prompt_embeds=negative["pooled"],
        )  # fmt: skip
