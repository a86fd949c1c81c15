"""Stable Diffusion XL: UNet with size conditioning and two CLIP text encoders; epsilon or v prediction."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...data.batch import Batch, Cond
from .. import text_encoding
from ..base import BaseModelInfo, Family
from ..facts_unet import SDXL_FACTS, UNET_CONV_LORA_TARGET_MODULES, UNET_LORA_TARGET_MODULES
from ..text_encoding import CHUNK_LENGTH, CLIP_LORA_TARGET_MODULES, join_chunks, tokenize_in_chunks


class StableDiffusionXL(Family):
    facts = SDXL_FACTS
    denoiser_name = "unet"
    has_skip_connections = True
    text_components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    tokenizer_repo_ids = {
        "tokenizer": "openai/clip-vit-large-patch14",
        "tokenizer_2": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
    }
    lora_target_modules = UNET_LORA_TARGET_MODULES
    conv_lora_target_modules = UNET_CONV_LORA_TARGET_MODULES
    lora_key_style = "ldm"
    text_lora_target_modules = dict.fromkeys(("text_encoder", "text_encoder_2"), CLIP_LORA_TARGET_MODULES)
    text_lora_prefixes = {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
    default_num_inference_steps = 30
    default_guidance_scale = 7.5

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sdxl_base_v1-0", "stable-diffusion-xl-v1-base")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        length = self.model_config.max_token_length
        states = []
        for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
            rows = tokenize_in_chunks(tokenizer, prompts, length)
            output = encoder(rows.to(encoder.device, non_blocking=True), output_hidden_states=True)
            states.append(join_chunks(output.hidden_states[-2], length // CHUNK_LENGTH))
        pooled = output.text_embeds[:: length // CHUNK_LENGTH]  # of the first chunk of each prompt
        return {"embeds": torch.cat(states, dim=-1), "pooled": pooled}

    def get_unused_text_layers(self, encoder: Any, component: str) -> tuple[str, ...]:
        # Only the second encoder's last layer is used, for the pooled embedding.
        return text_encoding.get_last_layer_names(encoder, 1) if component == "text_encoder" else ()

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, self.model_config.max_token_length)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        # time_ids: original size, crop top-left, target size; height before width.
        added_cond = {"text_embeds": batch.cond["pooled"], "time_ids": batch.size_conditioning}
        predicted: Tensor = denoiser(
            noisy_latents,
            timesteps,
            encoder_hidden_states=batch.cond["embeds"],
            added_cond_kwargs=added_cond,
            return_dict=False,
        )[0]
        return predicted
