"""Z-Image: one stream of text and picture, Qwen3's text of any length; flow matching with time running backwards."""

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
from .flow_facts import Z_IMAGE
from .sampling import draw_flow

LENGTH = 512
"""Tokens of text with the marks of who speaks, as in diffusers' pipeline."""


class ZImage(Family):
    facts = Z_IMAGE
    denoiser = "transformer"
    text_parts = ("text_encoder", "tokenizer")
    tokenizers = {"tokenizer": "Tongyi-MAI/Z-Image-Turbo:tokenizer"}  # noqa: RUF012
    # The linear layers of the main blocks; the refiners before them and the modulation stay as they are.
    lora_targets = tuple(
        f"layers.*.{end}" for end in (
            "attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0", "feed_forward.w1",
            "feed_forward.w2", "feed_forward.w3",
        )
    )  # fmt: skip
    lora_prefix = "lora_unet"
    lora_other_names = ("z_image",)
    lora_format = "diffusers"
    block_lists = ("layers",)
    block_flow = ("x",)
    block_tokens = {"attn_mask": ((1, ("x",)),), "freqs_cis": ((1, ("x",)),)}  # noqa: RUF012
    texts_vary = True
    text_steps = 32
    picture_size = (1024, 1024)
    picture_steps = 9
    picture_scale = 0.0

    def process(self, pipe: Any) -> Process:
        return FlowMatching.from_scheduler(pipe.scheduler.config)

    def titles(self, pipe: Any) -> Titles:
        return Titles("z_image", "z-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        embeds, _ = pipe.encode_prompt(list(prompts), pipe.text_encoder.device, do_classifier_free_guidance=False,
                                       max_sequence_length=LENGTH)  # fmt: skip
        return {"embeds": embeds}

    def outline_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        said = [pipe.tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True,
                                                   enable_thinking=True) for each in messages]  # fmt: skip
        return {"embeds": clip_text.sized(pipe.tokenizer, said, pipe.transformer.config.cap_feat_dim, LENGTH)}

    def too_long(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        said = {}
        for prompt in prompts:
            message = [{"role": "user", "content": prompt}]
            text = pipe.tokenizer.apply_chat_template(message, tokenize=False, enable_thinking=True)
            end = text.rfind(prompt)
            said[text[: end + len(prompt)] if end >= 0 else text] = prompt
        return [said[text] for text in clip_text.too_long(pipe.tokenizer, list(said), LENGTH)]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        return kl_latents.moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        return kl_latents.decode(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, batch: Batch) -> Tensor:
        pictures = list(noisy.unsqueeze(2).unbind(0))  # each (C, 1, H, W): one frame
        predicted = denoiser(pictures, 1 - t / 1000, batch.cond["embeds"], return_dict=False)[0]
        return -torch.stack(predicted).squeeze(2)  # the model's time runs from noise to picture, and so does its speed

    def draw(
        self, pipe: Any, prompt: Prompt, cond: Cond, negative: Cond, generator: torch.Generator, sampler: str | None
    ) -> Image:
        return draw_flow(
            self, pipe, prompt, generator, sampler,
            guidance_scale=self.picture_scale if prompt.scale is None else prompt.scale,
            prompt_embeds=cond["embeds"], negative_prompt_embeds=negative["embeds"],
        )  # fmt: skip
