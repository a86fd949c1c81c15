"""PRXPixel: PRX without a VAE, which predicts the clean pixels from noise of twice the deviation; Qwen3-VL's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..base import BaseModelInfo
from ..facts import (
    DetectionFacts,
    FamilyFacts,
    FamilyMatch,
    FamilyOptions,
    PipelineFacts,
    SamplingFacts,
    TextFacts,
    TrainerNames,
)
from ..family_noise_levels import UNIFORM, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required, read_scheduler_config
from .prx import FACTS as PRX_FACTS
from .prx import PRX

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...diffusion.process import NoiseProcess

PATCH_SIZE = 16
"""Pixels of a token in each direction."""
MIN_SIGMA = 0.05
"""The least noise level by which diffusers' pipeline divides to get the velocity."""


def _match_prx_pixel(read: ConfigReader) -> FamilyMatch:
    config, scheduler = read_required(read, "transformer/config.json"), read_scheduler_config(read)
    if (config.get("in_channels"), config.get("patch_size")) != (3, PATCH_SIZE):
        raise ModelError(f"its transformer does not have 3 channels and patches of {PATCH_SIZE} pixels")
    if "FlowMatch" not in scheduler.get("_class_name", ""):
        raise ModelError(f"its scheduler is {scheduler.get('_class_name')}; only flow matching is supported")
    return FamilyMatch(f"the transformer has {config.get('depth')} blocks and reads pixels", PATCH_SIZE, "flow")


FACTS = FamilyFacts(
    title="PRXPixel",
    pipeline=PipelineFacts(
        class_name="PRXPixelPipeline", has_vae=False, num_parameters=7_003_535_872, hub_id="Photoroom/prxpixel-t2i"
    ),
    detection=DetectionFacts(match_configs=_match_prx_pixel, trainer_names=TrainerNames(ai_toolkit=("prx_pixel",))),
    lora=PRX_FACTS.lora,
    blocks=PRX_FACTS.blocks,
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Photoroom/prxpixel-t2i:tokenizer"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(other_trainers={"ai-toolkit": UNIFORM}),
    sampling=SamplingFacts(num_inference_steps=28, guidance_scale=5.0),
    options=FamilyOptions(components={"text_encoder": "text_encoder"}),
    notes="7B, without a VAE; from folders and the hub; LoRA in peft: diffusers has no loader for it",
)


class PRXPixel(PRX):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("prx_pixel", "prx-pixel")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from dataclasses import replace

        from ...diffusion.process import FlowMatchingProcess

        process = FlowMatchingProcess.from_scheduler(pipe.scheduler.config, PATCH_SIZE)
        return replace(process, noise_scale=float(pipe.config.noise_scale), min_sigma=MIN_SIGMA)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        encoder = pipe.text_encoder
        tokens = pipe.tokenizer(
            list(map(_clean_text, prompts)),
            padding="max_length",
            max_length=pipe.config.prompt_max_tokens,
            truncation=True,
            return_tensors="pt",
        )
        ids, mask = (each.to(encoder.device) for each in (tokens.input_ids, tokens.attention_mask.bool()))
        states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        # An empty text has no token in Qwen's tokenizer; attention needs none, as the image attends to itself.
        return {"embeds": [row[is_text] for row, is_text in zip(states, mask, strict=True)]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        width, longest = pipe.transformer.config.context_in_dim, pipe.config.prompt_max_tokens
        ids = pipe.tokenizer(list(map(_clean_text, prompts)), truncation=False, verbose=False).input_ids
        return {"embeds": [torch.empty(min(len(row), longest), width, device="meta") for row in ids]}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        texts = dict(zip(map(_clean_text, prompts), prompts, strict=True))
        found = text_encoding.find_truncated_prompts(pipe.tokenizer, list(texts), pipe.config.prompt_max_tokens)
        return [texts[text] for text in found]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        import torch

        from ...dataloader.batch import Moments

        return Moments.from_mean_and_std(pixels, torch.zeros_like(pixels))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        return latents.float()

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        clean = super().predict(pipe, denoiser, noisy_latents, timesteps, batch)
        sigma = (timesteps.float() / 1000).clamp(min=MIN_SIGMA).view(-1, 1, 1, 1)
        return (noisy_latents.float() - clean.float()) / sigma


def _clean_text(text: str) -> str:
    """diffusers' cleaning of captions without ftfy, which repairs wrong encodings and may not be installed."""
    import html

    return html.unescape(html.unescape(text)).strip()
