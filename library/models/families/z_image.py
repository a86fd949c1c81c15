"""Z-Image: one stream of text and picture, Qwen3's text of any length; flow matching with time running backwards."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from ...data.batch import Batch, Cond, Moments
from ...data.prompts import Prompt
from ...diffusion.process import FlowMatchingProcess, NoiseProcess
from .. import text_encoding, vae
from ..base import BaseModelInfo, Family
from ..facts_dit import Z_IMAGE_FACTS
from ..sampling import run_flow_sampling_pipeline

Z_IMAGE_MAX_SEQUENCE_LENGTH = 512
"""Tokens of text with the marks of who speaks, as in diffusers' pipeline."""


class ZImage(Family):
    facts = Z_IMAGE_FACTS
    denoiser_name = "transformer"
    text_components = ("text_encoder", "tokenizer")
    tokenizer_repo_ids = {"tokenizer": "Tongyi-MAI/Z-Image-Turbo:tokenizer"}  # noqa: RUF012
    # The linear layers of the main blocks; the refiners before them and the modulation stay as they are.
    lora_target_modules = tuple(
        f"layers.*.{end}"
        for end in (
            "attention.to_q",
            "attention.to_k",
            "attention.to_v",
            "attention.to_out.0",
            "feed_forward.w1",
            "feed_forward.w2",
            "feed_forward.w3",
        )
    )
    lora_prefix = "lora_unet"
    lora_other_key_styles = ("z_image",)
    lora_format = "diffusers"
    block_lists = ("layers",)
    block_activation_args = ("x",)
    block_token_args = {"attn_mask": ((1, ("x",)),), "freqs_cis": ((1, ("x",)),)}  # noqa: RUF012
    has_variable_text_length = True
    denoiser_text_multiple = 32
    default_image_size = (1024, 1024)
    default_num_inference_steps = 9
    default_guidance_scale = 0.0

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("z_image", "z-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        embeds, _ = pipe.encode_prompt(
            list(prompts),
            pipe.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=Z_IMAGE_MAX_SEQUENCE_LENGTH,
        )
        return {"embeds": embeds}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        said = [
            pipe.tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True, enable_thinking=True)
            for each in messages
        ]
        return {
            "embeds": text_encoding.build_meta_text_embeds(
                pipe.tokenizer, said, pipe.transformer.config.cap_feat_dim, Z_IMAGE_MAX_SEQUENCE_LENGTH
            )
        }

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        said = {}
        for prompt in prompts:
            message = [{"role": "user", "content": prompt}]
            text = pipe.tokenizer.apply_chat_template(message, tokenize=False, enable_thinking=True)
            end = text.rfind(prompt)
            said[text[: end + len(prompt)] if end >= 0 else text] = prompt
        return [
            said[text]
            for text in text_encoding.find_truncated_prompts(pipe.tokenizer, list(said), Z_IMAGE_MAX_SEQUENCE_LENGTH)
        ]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        return vae.encode_vae_moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        return vae.decode_vae_latents(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        pictures = list(noisy_latents.unsqueeze(2).unbind(0))  # each (C, 1, H, W): one frame
        predicted = denoiser(pictures, 1 - timesteps / 1000, batch.cond["embeds"], return_dict=False)[0]
        return -torch.stack(predicted).squeeze(2)  # the model's time runs from noise to picture, and so does its speed

    def generate_image(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> Image:
        return run_flow_sampling_pipeline(
            self,
            pipe,
            prompt,
            generator,
            sampler,
            guidance_scale=self.default_guidance_scale if prompt.cfg_scale is None else prompt.cfg_scale,
            prompt_embeds=cond["embeds"],
            negative_prompt_embeds=negative_cond["embeds"],
        )
