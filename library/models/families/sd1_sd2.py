"""Stable Diffusion 1.x and 2.x: UNet with one CLIP or OpenCLIP text encoder; epsilon or v prediction."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...data.batch import Batch, Cond
from .. import text_encoding
from ..base import BaseModelInfo, Family
from ..facts_unet import SD1_FACTS, SD2_FACTS, UNET_CONV_LORA_TARGET_MODULES, UNET_LORA_TARGET_MODULES
from ..text_encoding import CLIP_LORA_TARGET_MODULES, encode_with_clip


class StableDiffusion1(Family):
    """Stable Diffusion 1.x."""

    facts = SD1_FACTS
    denoiser_name = "unet"
    has_skip_connections = True
    text_components = ("text_encoder", "tokenizer")
    tokenizer_repo_ids = {"tokenizer": "openai/clip-vit-large-patch14"}
    lora_target_modules = UNET_LORA_TARGET_MODULES
    conv_lora_target_modules = UNET_CONV_LORA_TARGET_MODULES
    preset_lora_target_modules = ("conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2")
    lora_other_key_styles = ("ldm",)
    text_lora_target_modules = {"text_encoder": CLIP_LORA_TARGET_MODULES}
    text_lora_prefixes = {"text_encoder": "lora_te"}
    default_image_size = (512, 512)
    default_num_inference_steps = 30
    default_guidance_scale = 7.5

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sd_v1", "stable-diffusion-v1")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return {"embeds": encode_with_clip(pipe, prompts, self.model_config)}

    def get_unused_text_layers(self, encoder: Any, component: str) -> tuple[str, ...]:
        return text_encoding.get_last_layer_names(encoder, (self.model_config.clip_skip or 1) - 1)

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, self.model_config.max_token_length)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        predicted: Tensor = denoiser(
            noisy_latents, timesteps, encoder_hidden_states=batch.cond["embeds"], return_dict=False
        )[0]
        return predicted


class StableDiffusion2(StableDiffusion1):
    """Stable Diffusion 2.x, whose text encoder is OpenCLIP's."""

    facts = SD2_FACTS
    tokenizer_repo_ids = {"tokenizer": "stabilityai/stable-diffusion-2:tokenizer"}

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        if pipe.scheduler.config.prediction_type == "v_prediction":
            return BaseModelInfo("sd_v2_v", "stable-diffusion-v2-768-v")
        return BaseModelInfo("sd_v2", "stable-diffusion-v2-512")
