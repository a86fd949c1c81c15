"""InstructPix2Pix and its like of Stable Diffusion XL: UNets that read the picture to be edited beside the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base import BaseModelInfo
from ..facts import FamilyFacts, FamilyMatch, TrainerNames
from ..model_configs import ConfigReader, ModelError
from ..shared_facts import match_unet_model
from .channel_inputs import ONE_CONTROL, UNetChannelInput, encode_preview_control, load_preview_control
from .sd1_sd2 import SD1_FACTS, StableDiffusion1, is_sd2
from .sdxl import FACTS as SDXL_FACTS
from .sdxl import StableDiffusionXL, match_sdxl

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ...dataloader.batch import Cond
    from ...dataloader.sample_prompts import Prompt

EDITING_CHANNELS = 4 + 4
"""The noisy latents, and those of the picture to be edited."""


def _match_sd1(read: ConfigReader) -> FamilyMatch | None:
    if is_sd2(read):
        raise ModelError("its UNet is that of Stable Diffusion 2; InstructPix2Pix is of Stable Diffusion 1 or XL")
    return match_unet_model(read, in_channels=EDITING_CHANNELS)


def _match_sdxl(read: ConfigReader) -> FamilyMatch | None:
    if (read("model_index.json") or {}).get("is_cosxl_edit"):
        raise ModelError("it is CosXL Edit, whose noise levels cannot be trained; use a model of InstructPix2Pix")
    return match_sdxl(read, EDITING_CHANNELS)


def _build_facts(facts: FamilyFacts, title: str, match: Any, class_name: str, hub_id: str) -> FamilyFacts:
    """Build the facts of an editing model from those of its text-to-image model."""
    more_weights = (EDITING_CHANNELS - 4) * 320 * 3 * 3  # of the first convolution
    return replace(
        facts,
        title=title,
        pipeline=replace(
            facts.pipeline,
            class_name=class_name,
            kind="edit",
            num_parameters=facts.pipeline.num_parameters + more_weights,
            hub_id=hub_id,
        ),
        detection=replace(facts.detection, match_configs=match, trainer_names=TrainerNames()),
        control=ONE_CONTROL,
        options=replace(facts.options, kohya_objective=None, extra=(*facts.options.extra, "conditioning_dropout_prob")),
    )


PIX2PIX_FACTS = _build_facts(
    SD1_FACTS,
    "InstructPix2Pix",
    _match_sd1,
    "StableDiffusionInstructPix2PixPipeline",
    "timbrooks/instruct-pix2pix",
)
PIX2PIX_XL_FACTS = _build_facts(
    SDXL_FACTS,
    "InstructPix2Pix XL",
    _match_sdxl,
    "StableDiffusionXLInstructPix2PixPipeline",
    "diffusers/sdxl-instructpix2pix-768",
)


class UNetEditing(UNetChannelInput):
    """A UNet whose input has the latents of the picture to be edited, as the VAE returns them, without its scale."""

    def encode_control(self, pipe: Any, control: Tensor, pixels: Tensor) -> Tensor:
        return super().encode_control(pipe, control, pixels) / float(pipe.vae.config.scaling_factor)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        image = encode_preview_control(self, pipe, load_preview_control(self, prompt))
        return {**super().build_sampling_kwargs(pipe, prompt, cond, negative_cond), "image": image}

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {}  # they are among build_sampling_kwargs

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Keep the latents of the picture in the dtype of the UNet; the pipeline of XL casts them to the VAE's."""
        prepare, dtype = sampling_pipe.prepare_image_latents, sampling_pipe.unet.dtype
        sampling_pipe.prepare_image_latents = lambda *args, **kwargs: prepare(*args, **kwargs).to(dtype)
        return sampling_pipe


class InstructPix2Pix(UNetEditing, StableDiffusion1):
    facts = PIX2PIX_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sd_v1", "stable-diffusion-v1/instruct-pix2pix")


class InstructPix2PixXL(UNetEditing, StableDiffusionXL):
    facts = PIX2PIX_XL_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sdxl_base_v1-0", "stable-diffusion-xl-v1-base/instruct-pix2pix")
