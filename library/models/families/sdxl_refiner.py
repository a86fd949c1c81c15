"""The refiner of Stable Diffusion XL: it reads the second text encoder only, and the aesthetic score of an image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_KEYS
from ...config.network_args import NetworkFacts
from ..base import BaseModelInfo
from ..facts import FamilyMatch, SingleFileFacts, TrainerNames
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError
from ..shared_facts import (
    CLIP_G_TOKENIZER,
    DENOISER_PREFIXES,
    UNET_VAE_PREFIXES,
    match_unet_model,
)
from .channel_inputs import encode_preview_control, load_picture
from .sdxl import FACTS as SDXL_FACTS
from .sdxl import StableDiffusionXL, is_refiner

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

AESTHETIC_SCORE = 6.0
"""The score that training images have, as images of previews in diffusers."""
PREVIEW_STRENGTH = 0.3
"""The part of the noise levels in which the picture of a preview is refined, as in diffusers' pipeline."""


def _match_refiner(read: ConfigReader) -> FamilyMatch | None:
    if not is_refiner(read):
        raise ModelError(
            "its UNet is not that of the refiner; StableDiffusionXLPipeline is the class of the base model"
        )
    if not (read("model_index.json") or {}).get("requires_aesthetics_score"):
        raise ModelError("its model_index.json lacks requires_aesthetics_score, without which diffusers cannot run it")
    return match_unet_model(read)


FACTS = replace(
    SDXL_FACTS,
    title="Stable Diffusion XL refiner",
    pipeline=replace(
        SDXL_FACTS.pipeline,
        class_name="StableDiffusionXLImg2ImgPipeline",
        kind="edit",
        num_parameters=2_259_526_660,
        hub_id="stabilityai/stable-diffusion-xl-refiner-1.0",
    ),
    detection=replace(SDXL_FACTS.detection, match_configs=_match_refiner, trainer_names=TrainerNames()),
    single_files=SingleFileFacts(
        prefixes={
            "unet": DENOISER_PREFIXES,
            "vae": UNET_VAE_PREFIXES,
            "text_encoder_2": ("conditioner.embedders.0.model.",),
        },
    ),
    lora=replace(
        SDXL_FACTS.lora,
        targets_of="",
        text_encoders={},  # ComfyUI and diffusers name its layers differently
        key_style=DIFFUSERS_KEYS,
        modelspec_architecture="stable-diffusion-xl-v1-refiner",
    ),
    text=replace(
        SDXL_FACTS.text,
        components=("text_encoder_2", "tokenizer_2"),
        tokenizer_repo_ids={"tokenizer_2": CLIP_G_TOKENIZER},
    ),
    sampling=replace(SDXL_FACTS.sampling, frame_images=("image_path",)),
    options=replace(
        SDXL_FACTS.options,
        components={"vae": "vae", "clip_g": "text_encoder_2"},
        network=NetworkFacts(unet_blocks=(12, 1, 12)),
        kohya_objective=None,
    ),
    training_noise=TrainingNoiseFacts(max_timestep=200),
    notes="for the last fifth of the noise levels",
)


class StableDiffusionXLRefiner(StableDiffusionXL):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sdxl_refiner_v1-0", "stable-diffusion-xl-v1-refiner")

    def list_text_encoders(self, pipe: Any) -> list[tuple[Any, Any]]:
        return [(pipe.tokenizer_2, pipe.text_encoder_2)]

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        sizes = batch.size_conditioning[:, :4]  # original size and crop; the score is instead of the target size
        scored = torch.cat([sizes, torch.full_like(sizes[:, :1], AESTHETIC_SCORE)], dim=1)
        return super().predict(pipe, denoiser, noisy_latents, timesteps, replace(batch, size_conditioning=scored))

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        image = encode_preview_control(self, pipe, load_picture(self, prompt))
        steps = prompt.num_inference_steps or self.facts.sampling.num_inference_steps
        strength = max(PREVIEW_STRENGTH, 1 / steps)  # of one step at least
        return {
            **super().build_sampling_kwargs(pipe, prompt, cond, negative_cond),
            "image": image,
            "strength": strength,
        }

    def build_frame_image_kwargs(self, pipe: Any, first: Image | None, last: Image | None) -> dict[str, Any]:
        return {}  # it is among build_sampling_kwargs
