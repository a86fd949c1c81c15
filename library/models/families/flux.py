"""FLUX.1 dev and schnell: packed 2 x 2 latent patches, CLIP's pooled embedding and T5; flow matching.

dev is guidance-distilled and has a guidance embedding; schnell has none and is sampled in four steps.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...data.batch import Batch, Cond
from ...data.prompts import Prompt
from .. import text_encoding
from ..base import BaseModelInfo, Family
from ..facts_dit import FLUX_FACTS, JOINT_BLOCK_LORA_TARGET_MODULES
from ..text_encoding import CLIP_LORA_TARGET_MODULES, T5_LORA_TARGET_MODULES


class Flux(Family):
    facts = FLUX_FACTS
    denoiser_name = "transformer"
    text_components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    tokenizer_repo_ids = {"tokenizer": "openai/clip-vit-large-patch14", "tokenizer_2": "google/t5-v1_1-xxl"}
    # Every linear layer of the double and single blocks; another proj_out lies outside of them.
    lora_target_modules = (
        *JOINT_BLOCK_LORA_TARGET_MODULES,
        "norm.linear",
        "proj_mlp",
        "single_transformer_blocks.*.proj_out",
    )
    lora_key_style = "flux"
    lora_other_key_styles = ("flux_xlabs",)
    text_lora_target_modules = {"text_encoder": CLIP_LORA_TARGET_MODULES, "text_encoder_2": T5_LORA_TARGET_MODULES}
    text_lora_prefixes = {"text_encoder": "lora_te1", "text_encoder_2": "lora_te3"}
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    block_token_args = {"image_rotary_emb": ((0, ("encoder_hidden_states", "hidden_states")),) * 2}
    default_num_inference_steps = 20
    default_guidance_scale = 1.0

    def get_non_block_lora_target_modules(self, denoiser: Any) -> tuple[str, ...]:
        embedders = ("timestep", "text", "guidance") if denoiser.config.guidance_embeds else ("timestep", "text")
        layers = (f"time_text_embed.{each}_embedder.linear_{number}" for each in embedders for number in (1, 2))
        return "x_embedder", "context_embedder", *layers

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("flux1", "flux-1-dev" if _has_guidance_embeds(pipe) else "flux-1-schnell")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_clip_prompts(pipe, prompts, self.encode_t5_prompts(pipe, prompts))

    def encode_t5_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        max_tokens, is_masked = self._get_max_sequence_length(pipe), self.model_config.apply_t5_attn_mask
        encoder_name = "text_encoder_2"
        embeds, mask = text_encoding.encode_with_t5(pipe, prompts, encoder_name, max_tokens, masks_padding=is_masked)
        return {"embeds": embeds} if mask is None else {"embeds": embeds, "mask": mask}

    def encode_clip_prompts(self, pipe: Any, prompts: Sequence[str], t5_cond: Cond) -> Cond:
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            pooled = pipe._get_clip_prompt_embeds(list(prompts), device=pipe.text_encoder.device)
        return {**t5_cond, "pooled": pooled}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        max_tokens = self._get_max_sequence_length(pipe) - 1  # minus the end token
        return text_encoding.find_truncated_prompts(pipe.tokenizer_2, prompts, max_tokens)

    def _get_max_sequence_length(self, pipe: Any) -> int:
        # dev and schnell differ; tell them by the scheduler, since the transformer may not be loaded yet.
        return self.model_config.t5xxl_max_token_length or (512 if pipe.scheduler.config.use_dynamic_shifting else 256)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        count, channels, height, width = noisy_latents.shape
        embeds = cast(Tensor, batch.cond["embeds"])
        # Built on the CPU and copied asynchronously: the pipeline's own copy would synchronize.
        img_ids = pipe._prepare_latent_image_ids(count, height // 2, width // 2, None, noisy_latents.dtype)
        has_guidance, scale = _has_guidance_embeds(pipe), self.model_config.guidance_scale
        guidance = torch.full_like(timesteps, scale) if has_guidance else None
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents, count, channels, height, width),
            timestep=timesteps / 1000,
            guidance=guidance,
            encoder_hidden_states=embeds,
            pooled_projections=batch.cond["pooled"],
            txt_ids=noisy_latents.new_zeros(embeds.shape[1], 3),
            img_ids=img_ids.to(noisy_latents.device, non_blocking=True),
            joint_attention_kwargs=_build_attention_kwargs(batch.cond, height // 2 * (width // 2)),
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return unpacked

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        default_steps = self.default_num_inference_steps if _has_guidance_embeds(pipe) else 4
        cond, negative_cond = _drop_padding(cond), _drop_padding(negative_cond)
        return super().build_sampling_kwargs(pipe, prompt, cond, negative_cond) | dict(
            num_inference_steps=prompt.num_inference_steps or default_steps,
            true_cfg_scale=self.get_guidance_scale(prompt),
            guidance_scale=3.5 if prompt.embedded_guidance is None else prompt.embedded_guidance,
        )


def _build_attention_kwargs(cond: Cond, num_image_tokens: int) -> dict[str, Tensor] | None:
    """Mask T5's padding tokens in the attention of all blocks (``apply_t5_attn_mask``); text comes before image."""
    if "mask" not in cond:
        return None
    mask = cast(Tensor, cond["mask"]) > 0.5
    image_mask = mask.new_ones(len(mask), num_image_tokens)
    return {"attention_mask": torch.cat([mask, image_mask], dim=1)[:, None, None, :]}


def _drop_padding(cond: Cond) -> Cond:
    """Cut the masked tokens off one text: the pipeline takes no mask, and a masked token has no influence."""
    if "mask" not in cond:
        return cond
    length = int(cast(Tensor, cond["mask"])[0].sum())
    return {**cond, "embeds": cast(Tensor, cond["embeds"])[:, :length]}


def _has_guidance_embeds(pipe: Any) -> bool:
    """True for dev, False for schnell."""
    return bool(pipe.transformer.config.guidance_embeds)
