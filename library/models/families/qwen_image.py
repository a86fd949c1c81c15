"""Qwen-Image: patches of 2 x 2 latents in a row, Qwen2.5-VL's text of any length, a video VAE; flow matching."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ...data.batch import Batch, Cond, Moments
from ...data.prompts import Prompt
from ...diffusion.process import FlowMatchingProcess, NoiseProcess
from .. import text_encoding, vae
from ..base import BaseModelInfo, Family
from ..facts_dit import QWEN_IMAGE_FACTS
from ..sampling import run_flow_sampling_pipeline
from ..vae import get_latent_statistics

QWEN_MAX_SEQUENCE_LENGTH = 512
"""Tokens of text, as in diffusers' pipeline."""


class QwenImage(Family):
    facts = QWEN_IMAGE_FACTS
    denoiser_name = "transformer"
    text_components = ("text_encoder", "tokenizer")
    tokenizer_repo_ids = {"tokenizer": "Qwen/Qwen-Image:tokenizer"}  # noqa: RUF012
    # The linear layers of the blocks; the modulation stays as it is.
    lora_target_modules = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    lora_prefix = "lora_unet"
    lora_format = "diffusers"
    block_lists = ("transformer_blocks",)
    block_token_args = {  # noqa: RUF012
        "image_rotary_emb": ((0, ("hidden_states",)), (0, ("encoder_hidden_states",))),
        "encoder_hidden_states_mask": ((1, ("encoder_hidden_states",)),),
    }
    has_variable_text_length = True
    pad_text_to_multiple_of = 64
    default_image_size = (1024, 1024)
    default_num_inference_steps = 50
    default_guidance_scale = 4.0

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        # What the last block makes of the text is not looked at.
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}"
        return tuple(
            f"{last}.{end}" for end in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        )

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("qwen_image", "qwen-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        embeds, mask = pipe.encode_prompt(
            list(prompts), pipe.text_encoder.device, max_sequence_length=QWEN_MAX_SEQUENCE_LENGTH
        )
        lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(1).tolist()
        return {"embeds": [each[:length] for each, length in zip(embeds, lengths, strict=True)]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        said = [pipe.prompt_template_encode.format(prompt) for prompt in prompts]
        width, before = pipe.transformer.config.joint_attention_dim, pipe.prompt_template_encode_start_idx
        return {
            "embeds": text_encoding.build_meta_text_embeds(
                pipe.tokenizer, said, width, QWEN_MAX_SEQUENCE_LENGTH, before
            )
        }

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        before, _, _ = pipe.prompt_template_encode.partition("{}")
        most = QWEN_MAX_SEQUENCE_LENGTH + pipe.prompt_template_encode_start_idx
        cut = set(text_encoding.find_truncated_prompts(pipe.tokenizer, [before + prompt for prompt in prompts], most))
        return [prompt for prompt in prompts if before + prompt in cut]

    @torch.no_grad()
    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        frames = pixels.to(pipe.vae.device, pipe.vae.dtype).unsqueeze(2)
        with vae.disable_autocast(pipe.vae):
            found = pipe.vae.encode(frames).latent_dist
        mean, std = get_latent_statistics(pipe.vae, found.mean)
        return Moments.from_mean_and_std(((found.mean - mean) / std).squeeze(2), (found.std / std).squeeze(2))

    @torch.no_grad()
    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        frames = latents.to(pipe.vae.device, pipe.vae.dtype).unsqueeze(2)
        mean, std = get_latent_statistics(pipe.vae, frames)
        with vae.disable_autocast(pipe.vae):
            pixels: Tensor = pipe.vae.decode(frames * std + mean, return_dict=False)[0]
        return pixels.squeeze(2)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        count, channels, height, width = noisy_latents.shape
        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        # Texts that are filled up have a mask even where nothing is left to fill: all of them are alike to a compiler.
        is_whole = batch.text_pad_multiple == 1 and all(len(each) == embeds.shape[1] for each in batch.cond["embeds"])
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents, count, channels, height, width),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=None if is_whole else mask,
            img_shapes=[[(1, height // 2, width // 2)]] * count,
            return_dict=False,
        )[0]
        frames: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return frames.squeeze(2)

    def generate_image(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> Image:
        embeds, mask = pad_text_embeds(cond["embeds"])
        negative_embeds, negative_mask = pad_text_embeds(negative_cond["embeds"])
        scale = self.default_guidance_scale if prompt.cfg_scale is None else prompt.cfg_scale
        return run_flow_sampling_pipeline(
            self,
            pipe,
            prompt,
            generator,
            sampler,
            true_cfg_scale=scale,
            prompt_embeds=embeds,
            prompt_embeds_mask=mask,
            negative_prompt_embeds=negative_embeds if scale > 1 else None,
            negative_prompt_embeds_mask=negative_mask,
        )


def pad_text_embeds(embeds: Tensor | Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Texts in one tensor (B, as long as the longest and so many tokens, width), and a mask of what is text."""
    marks = [each.new_ones(len(each), dtype=torch.long) for each in embeds]
    texts, mask = pad_sequence(list(embeds), batch_first=True), pad_sequence(marks, batch_first=True)
    more = -texts.shape[1] % multiple
    return pad(texts, (0, 0, 0, more)), pad(mask, (0, more))
