"""Stable Diffusion 3 and 3.5: two CLIP text encoders and T5, read together; flow matching."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from ..data.batch import Batch, Cond, Moments
from ..data.prompts import Prompt
from ..diffusion.process import FlowMatching, Process
from . import clip_text, kl_latents
from .base import Family, Titles
from .clip_text import CLIP_LORA_TARGETS, T5_LORA_TARGETS
from .flow_facts import SD3
from .sampling import draw_flow


class StableDiffusion3(Family):
    facts = SD3
    denoiser = "transformer"
    text_parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    tokenizers = {  # noqa: RUF012
        "tokenizer": "openai/clip-vit-large-patch14",
        "tokenizer_2": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
        "tokenizer_3": "google/t5-v1_1-xxl",
    }
    # Every linear layer of the joint blocks; the second attention is 3.5-medium's.
    lora_targets = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "norm1.linear",
        "norm1_context.linear",
    )  # fmt: skip
    lora_prefix = "lora_unet"
    lora_format = "diffusers"
    lora_names = "sd3"
    text_lora_targets = {  # noqa: RUF012
        "text_encoder": CLIP_LORA_TARGETS, "text_encoder_2": CLIP_LORA_TARGETS, "text_encoder_3": T5_LORA_TARGETS,
    }  # fmt: skip
    text_lora_prefixes = {  # noqa: RUF012
        "text_encoder": "lora_te1", "text_encoder_2": "lora_te2", "text_encoder_3": "lora_te3",
    }  # fmt: skip
    block_lists = ("transformer_blocks",)
    picture_size = (1024, 1024)
    picture_steps = 28
    picture_scale = 7.0

    def idle_layers(self, denoiser: Any) -> tuple[str, ...]:
        # The last block asks nothing on behalf of the text.
        return (f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}.attn.add_q_proj",)

    def outer_lora_targets(self, denoiser: Any) -> tuple[str, ...]:
        embedders = (f"time_text_embed.{each}_embedder.linear_{number}" for each in ("timestep", "text")
                     for number in (1, 2))  # fmt: skip
        return "pos_embed.proj", "context_embedder", *embedders, "norm_out.linear", "proj_out"

    def process(self, pipe: Any) -> Process:
        return FlowMatching.from_scheduler(pipe.scheduler.config)

    def titles(self, pipe: Any) -> Titles:
        kind = _kind(pipe.transformer.config)
        return Titles(kind, f"stable-diffusion-3-{kind}")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        with clip_text.cut_in_silence(pipe, pipe.tokenizer, pipe.tokenizer_2, pipe.tokenizer_3):
            embeds, _, pooled, _ = pipe.encode_prompt(
                list(prompts), None, None, pipe.text_encoder.device, do_classifier_free_guidance=False,
                max_sequence_length=self._length,
            )  # fmt: skip
        return {"embeds": embeds, "pooled": pooled}

    def too_long(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        return clip_text.too_long(pipe.tokenizer_3, prompts, self._length - 1)  # and one for the end of the text

    @property
    def _length(self) -> int:
        return self.options.t5xxl_max_token_length or 256

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        return kl_latents.moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        return kl_latents.decode(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, batch: Batch) -> Tensor:
        predicted: Tensor = denoiser(
            hidden_states=noisy,
            timestep=t,
            encoder_hidden_states=batch.cond["embeds"],
            pooled_projections=batch.cond["pooled"],
            return_dict=False,
        )[0]
        return predicted

    def draw(
        self, pipe: Any, prompt: Prompt, cond: Cond, negative: Cond, generator: torch.Generator, sampler: str | None
    ) -> Image:
        return draw_flow(
            self, pipe, prompt, generator, sampler,
            guidance_scale=self.picture_scale if prompt.scale is None else prompt.scale,
            prompt_embeds=cond["embeds"], pooled_prompt_embeds=cond["pooled"],
            negative_prompt_embeds=negative["embeds"], negative_pooled_prompt_embeds=negative["pooled"],
        )  # fmt: skip


def _kind(config: Any) -> str:
    """sd-scripts' name for the model; only 3.5-medium has blocks with two attentions."""
    if config.qk_norm is None:
        return "medium"
    return "5-medium" if config.dual_attention_layers else "5-large"
