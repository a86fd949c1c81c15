"""The inpainting models of Stable Diffusion 1, 2 and XL: their UNets read a mask and a masked picture, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..base import BaseModelInfo
from ..facts import FamilyFacts, FamilyMatch, TrainerNames
from ..model_configs import ConfigReader
from ..shared_facts import match_unet_model
from .channel_inputs import ONE_MASK, UNetInpainting
from .sd1_sd2 import SD1_FACTS, SD2_FACTS, StableDiffusion1, StableDiffusion2, is_sd2
from .sdxl import FACTS as SDXL_FACTS
from .sdxl import StableDiffusionXL, match_sdxl

INPAINTING_CHANNELS = 4 + 1 + 4
"""The noisy latents, the mask, and the latents of what the mask leaves."""


def _match_sd1(read: ConfigReader) -> FamilyMatch | None:
    return None if is_sd2(read) else match_unet_model(read, in_channels=INPAINTING_CHANNELS)


def _match_sd2(read: ConfigReader) -> FamilyMatch | None:
    return match_unet_model(read, in_channels=INPAINTING_CHANNELS) if is_sd2(read) else None


def _match_sdxl(read: ConfigReader) -> FamilyMatch | None:
    return match_sdxl(read, INPAINTING_CHANNELS)


def _build_facts(facts: FamilyFacts, match: Any, class_name: str, hub_id: str) -> FamilyFacts:
    """Build the facts of an inpainting model from those of its text-to-image model."""
    more_weights = (INPAINTING_CHANNELS - 4) * 320 * 3 * 3  # of the first convolution
    return replace(
        facts,
        title=f"{facts.title} inpainting",
        pipeline=replace(
            facts.pipeline,
            class_name=class_name,
            kind="edit",
            num_parameters=facts.pipeline.num_parameters + more_weights,
            hub_id=hub_id,
        ),
        detection=replace(facts.detection, match_configs=match, trainer_names=TrainerNames()),
        sampling=replace(facts.sampling, frame_images=("image_path",)),
        control=ONE_MASK,
        options=replace(facts.options, is_version_2=False, kohya_objective=None),
    )


SD1_INPAINTING_FACTS = _build_facts(
    SD1_FACTS, _match_sd1, "StableDiffusionInpaintPipeline", "stable-diffusion-v1-5/stable-diffusion-inpainting"
)
SD2_INPAINTING_FACTS = _build_facts(
    SD2_FACTS, _match_sd2, "StableDiffusionInpaintPipeline", "stabilityai/stable-diffusion-2-inpainting"
)
SDXL_INPAINTING_FACTS = _build_facts(
    SDXL_FACTS,
    _match_sdxl,
    "StableDiffusionXLInpaintPipeline",
    "diffusers/stable-diffusion-xl-1.0-inpainting-0.1",
)


class StableDiffusion1Inpainting(UNetInpainting, StableDiffusion1):
    facts = SD1_INPAINTING_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sd_v1", "stable-diffusion-v1/inpainting")


class StableDiffusion2Inpainting(UNetInpainting, StableDiffusion2):
    facts = SD2_INPAINTING_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return replace(super().get_base_model_info(pipe), architecture="stable-diffusion-v2-512/inpainting")


class StableDiffusionXLInpainting(UNetInpainting, StableDiffusionXL):
    facts = SDXL_INPAINTING_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sdxl_base_v1-0", "stable-diffusion-xl-v1-base/inpainting")
