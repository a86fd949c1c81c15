"""Stable Diffusion 3 and 3.5: MMDiT with two CLIP text encoders and T5; flow matching."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...data.batch import Batch, Cond
from .. import text_encoding
from ..base import BaseModelInfo, Family
from ..facts_dit import JOINT_BLOCK_LORA_TARGET_MODULES, SD3_FACTS
from ..text_encoding import CLIP_LORA_TARGET_MODULES, T5_LORA_TARGET_MODULES


class StableDiffusion3(Family):
    facts = SD3_FACTS
    denoiser_name = "transformer"
    text_components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    tokenizer_repo_ids = {
        "tokenizer": "openai/clip-vit-large-patch14",
        "tokenizer_2": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
        "tokenizer_3": "google/t5-v1_1-xxl",
    }
    # Every linear layer of the joint blocks, including the second attention of 3.5-medium.
    lora_target_modules = JOINT_BLOCK_LORA_TARGET_MODULES
    lora_format = "diffusers"
    lora_key_style = "sd3"
    text_lora_target_modules = {
        "text_encoder": CLIP_LORA_TARGET_MODULES,
        "text_encoder_2": CLIP_LORA_TARGET_MODULES,
        "text_encoder_3": T5_LORA_TARGET_MODULES,
    }
    text_lora_prefixes = {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2", "text_encoder_3": "lora_te3"}
    block_lists = ("transformer_blocks",)
    default_num_inference_steps = 28
    default_guidance_scale = 7.0

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        # The last block has no queries for the text.
        return (f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}.attn.add_q_proj",)

    def get_non_block_lora_target_modules(self, denoiser: Any) -> tuple[str, ...]:
        names = (f"{embedder}_embedder.linear_{number}" for embedder in ("timestep", "text") for number in (1, 2))
        embedders = (f"time_text_embed.{name}" for name in names)
        return "pos_embed.proj", "context_embedder", *embedders, "norm_out.linear", "proj_out"

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        variant = _get_sd3_variant(pipe.transformer.config)
        return BaseModelInfo(variant, f"stable-diffusion-3-{variant}")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_clip_prompts(pipe, prompts, self.encode_t5_prompts(pipe, prompts))

    def encode_t5_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        length, is_masked = self.max_sequence_length, self.model_config.apply_t5_attn_mask
        embeds, _ = text_encoding.encode_with_t5(pipe, prompts, "text_encoder_3", length, masks_padding=is_masked)
        return {"embeds": embeds}  # the transformer has no mask, as in sd-scripts

    def encode_clip_prompts(self, pipe: Any, prompts: Sequence[str], t5_cond: Cond) -> Cond:
        """CLIP's tokens come before those of T5 and are padded with zeros to their width."""
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer, pipe.tokenizer_2):
            states, pooled = zip(
                *(
                    pipe._get_clip_prompt_embeds(list(prompts), device=pipe.text_encoder.device, clip_model_index=index)
                    for index in range(2)
                ),
                strict=True,
            )
        t5_embeds = cast(Tensor, t5_cond["embeds"])
        clip_embeds = torch.cat(states, dim=-1)
        clip_embeds = nn.functional.pad(clip_embeds, (0, t5_embeds.shape[-1] - clip_embeds.shape[-1]))
        return {"embeds": torch.cat([clip_embeds, t5_embeds], dim=-2), "pooled": torch.cat(pooled, dim=-1)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        max_tokens = self.max_sequence_length - 1  # minus the end token
        return text_encoding.find_truncated_prompts(pipe.tokenizer_3, prompts, max_tokens)

    @property
    def max_sequence_length(self) -> int:
        return self.model_config.t5xxl_max_token_length or 256

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            timestep=timesteps,
            encoder_hidden_states=batch.cond["embeds"],
            pooled_projections=batch.cond["pooled"],
            return_dict=False,
        )[0]
        return predicted


def _get_sd3_variant(config: Any) -> str:
    """sd-scripts' name of the variant; only 3.5-medium has blocks with two attentions."""
    if config.qk_norm is None:
        return "medium"
    return "5-medium" if config.dual_attention_layers else "5-large"
