"""FLUX.1 dev and schnell: patches of 2 x 2 latents in a row, CLIP's pooled text and T5; flow matching.

dev has its guidance distilled in and is told how strong it is to be; schnell is not, and draws in four steps.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from PIL.Image import Image
from torch import Tensor, nn

from ..data.batch import Batch, Cond, Moments
from ..data.prompts import Prompt
from ..diffusion.process import FlowMatching, Process
from . import clip_text, kl_latents
from .base import Family, Titles
from .clip_text import CLIP_LORA_TARGETS, T5_LORA_TARGETS
from .flow_facts import FLUX
from .sampling import draw_flow


class Flux(Family):
    facts = FLUX
    denoiser = "transformer"
    text_parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    tokenizers = {"tokenizer": "openai/clip-vit-large-patch14", "tokenizer_2": "google/t5-v1_1-xxl"}  # noqa: RUF012
    # Every linear layer of the double and single blocks; proj_out is also a name outside of them.
    lora_targets = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "norm1.linear",
        "norm1_context.linear", "norm.linear", "proj_mlp", "single_transformer_blocks.*.proj_out",
    )  # fmt: skip
    lora_prefix = "lora_unet"
    lora_format = "diffusers"
    lora_names = "flux"
    text_lora_targets = {"text_encoder": CLIP_LORA_TARGETS, "text_encoder_2": T5_LORA_TARGETS}  # noqa: RUF012
    text_lora_prefixes = {"text_encoder": "lora_te1", "text_encoder_2": "lora_te3"}  # noqa: RUF012
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    block_tokens = {  # noqa: RUF012
        "image_rotary_emb": ((0, ("encoder_hidden_states", "hidden_states")),) * 2,
    }
    picture_size = (1024, 1024)
    picture_steps = 20
    picture_scale = 1.0

    def outer_lora_targets(self, denoiser: Any) -> tuple[str, ...]:
        embedders = ("timestep", "text", "guidance") if denoiser.config.guidance_embeds else ("timestep", "text")
        layers = (f"time_text_embed.{each}_embedder.linear_{number}" for each in embedders for number in (1, 2))
        return "x_embedder", "context_embedder", *layers

    def process(self, pipe: Any) -> Process:
        return FlowMatching.from_scheduler(pipe.scheduler.config)

    def titles(self, pipe: Any) -> Titles:
        return Titles("flux1", "flux-1-dev" if _is_guided(pipe) else "flux-1-schnell")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        with clip_text.cut_in_silence(pipe, pipe.tokenizer, pipe.tokenizer_2):
            embeds, pooled, _ = pipe.encode_prompt(
                list(prompts), device=pipe.text_encoder.device, max_sequence_length=self._length(pipe)
            )
        return {"embeds": embeds, "pooled": pooled}

    def too_long(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        return clip_text.too_long(pipe.tokenizer_2, prompts, self._length(pipe) - 1)  # and one for the end of the text

    def _length(self, pipe: Any) -> int:
        # dev and schnell differ; the transformer, which knows better than the scheduler, may not be loaded yet.
        return self.options.t5xxl_max_token_length or (512 if pipe.scheduler.config.use_dynamic_shifting else 256)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        return kl_latents.moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        return kl_latents.decode(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, batch: Batch) -> Tensor:
        count, channels, height, width = noisy.shape
        embeds = cast(Tensor, batch.cond["embeds"])
        # They are made on the host: sent by the pipeline itself, they would be waited for.
        places = pipe._prepare_latent_image_ids(count, height // 2, width // 2, None, noisy.dtype)
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy, count, channels, height, width),
            timestep=t / 1000,
            guidance=torch.full_like(t, self.options.guidance_scale) if _is_guided(pipe) else None,
            encoder_hidden_states=embeds,
            pooled_projections=batch.cond["pooled"],
            txt_ids=noisy.new_zeros(embeds.shape[1], 3),
            img_ids=places.to(noisy.device, non_blocking=True),
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return unpacked

    def draw(
        self, pipe: Any, prompt: Prompt, cond: Cond, negative: Cond, generator: torch.Generator, sampler: str | None
    ) -> Image:
        return draw_flow(
            self, pipe, prompt, generator, sampler,
            num_inference_steps=prompt.steps or (self.picture_steps if _is_guided(pipe) else 4),
            true_cfg_scale=self.picture_scale if prompt.scale is None else prompt.scale,
            guidance_scale=3.5 if prompt.guidance is None else prompt.guidance,
            prompt_embeds=cond["embeds"], pooled_prompt_embeds=cond["pooled"],
            negative_prompt_embeds=negative["embeds"], negative_pooled_prompt_embeds=negative["pooled"],
        )  # fmt: skip


def _is_guided(pipe: Any) -> bool:
    """dev is, schnell is not."""
    return bool(pipe.transformer.config.guidance_embeds)
