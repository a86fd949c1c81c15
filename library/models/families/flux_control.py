"""FLUX.1 Depth and Canny, whose tokens have those of a control image behind them, and FLUX.1 Fill, which inpaints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base import BaseModelInfo
from ..facts import FamilyMatch, SamplingFacts, TrainerNames
from ..family_noise_levels import AS_SAMPLED
from ..model_configs import ConfigReader
from ..shared_facts import match_flow_model
from .channel_inputs import (
    ONE_CONTROL,
    ONE_MASK,
    FluxChannelInput,
    binarize_mask,
    encode_preview_control,
    load_picture_and_mask,
    load_preview_control,
    pack_control,
)
from .flux import FACTS as FLUX_FACTS
from .flux import Flux

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ...dataloader.batch import Cond
    from ...dataloader.sample_prompts import Prompt

MASK_CHANNELS = 8 * 8
"""The pixels of the mask that a latent of the VAE covers; each is a channel."""


def _match_control(read: ConfigReader) -> FamilyMatch:
    match = match_flow_model(read, 2 * 4, "the transformer reads a control image beside the noise")
    return replace(match, has_guidance_embeds=True)


def _match_fill(read: ConfigReader) -> FamilyMatch:
    reason = "the transformer reads a mask and a masked picture beside the noise"
    return replace(match_flow_model(read, 2 * 4, reason, more_channels=4 * MASK_CHANNELS), has_guidance_embeds=True)


CONTROL_FACTS = replace(
    FLUX_FACTS,
    title="FLUX.1 Depth and Canny",
    pipeline=replace(
        FLUX_FACTS.pipeline,
        class_name="FluxControlPipeline",
        kind="edit",
        num_parameters=11_901_604_928,
        hub_id="black-forest-labs/FLUX.1-Canny-dev",
    ),
    detection=replace(
        FLUX_FACTS.detection, match_configs=_match_control, unsupported_shapes={}, trainer_names=TrainerNames()
    ),
    sampling=SamplingFacts(num_inference_steps=28, guidance_scale=30.0, is_guidance_embedded=True),
    control=ONE_CONTROL,
    options=replace(FLUX_FACTS.options, musubi_versions={}, kohya_objective=None),
    training_noise=AS_SAMPLED,
    notes="from an image of edges or depths",
)

FILL_FACTS = replace(
    CONTROL_FACTS,
    title="FLUX.1 Fill",
    pipeline=replace(
        CONTROL_FACTS.pipeline,
        class_name="FluxFillPipeline",
        num_parameters=11_902_391_360,
        hub_id="black-forest-labs/FLUX.1-Fill-dev",
    ),
    detection=replace(CONTROL_FACTS.detection, match_configs=_match_fill),
    sampling=replace(CONTROL_FACTS.sampling, frame_images=("image_path",)),
    control=ONE_MASK,
    notes="inpainting",
)


class FluxControl(FluxChannelInput, Flux):
    """The control image is in the latents of its mean; the guidance is an input, without negative prompts."""

    facts = CONTROL_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return replace(super().get_base_model_info(pipe), architecture="flux-1-control-dev")

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        control = encode_preview_control(self, pipe, load_preview_control(self, prompt))
        return self._build_text_kwargs(pipe, prompt, cond) | {"control_image": pack_control(pipe, control, control)}

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Keep the control image, which is encoded, in the dtype of the transformer and not of the VAE."""
        prepare, dtype = sampling_pipe.prepare_image, sampling_pipe.transformer.dtype
        sampling_pipe.prepare_image = lambda *args, **kwargs: prepare(*args, **{**kwargs, "dtype": dtype})
        return sampling_pipe

    def _build_text_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond) -> dict[str, Any]:
        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, cond)
        scale = kwargs["true_cfg_scale"] if prompt.embedded_guidance is None else prompt.embedded_guidance
        names = ("num_inference_steps", "prompt_embeds", "pooled_prompt_embeds")
        steps = prompt.num_inference_steps or self.facts.sampling.num_inference_steps
        return {**{name: kwargs[name] for name in names}, "num_inference_steps": steps, "guidance_scale": scale}

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {}  # they are among build_sampling_kwargs


class FluxFill(FluxControl):
    """The input has what the mask leaves of the picture, and the pixels of the mask, as channels behind the noise."""

    facts = FILL_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return replace(super().get_base_model_info(pipe), architecture="flux-1-fill-dev")

    def encode_control(self, pipe: Any, control: Tensor, pixels: Tensor) -> Tensor:
        import torch
        from torch.nn.functional import pixel_unshuffle

        mask = binarize_mask(control)
        left = self.encode_moments(pipe, pixels * (1 - mask)).mean_and_std[:, 0]
        return torch.cat([left, pixel_unshuffle(mask, mask.shape[-1] // left.shape[-1])], dim=1)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        picture, mask = load_picture_and_mask(self, prompt)
        return self._build_text_kwargs(pipe, prompt, cond) | {"image": picture, "mask_image": mask, "strength": 1.0}

    def build_frame_image_kwargs(self, pipe: Any, first: Image | None, last: Image | None) -> dict[str, Any]:
        return {}

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Let the pipeline encode pictures in float32, as in training, and take the mean."""
        from ..vae import disable_autocast

        vae, prepare, config = sampling_pipe.vae, sampling_pipe.prepare_mask_latents, sampling_pipe.vae.config

        def encode(image: Any) -> Any:
            with disable_autocast(vae):
                return vae.encode(image.to(vae.device, vae.dtype)).latent_dist.mode()

        def prepare_mask_latents(mask: Any, masked_image: Any, *args: Any) -> Any:
            return prepare(mask, encode(masked_image), *args)

        sampling_pipe.prepare_mask_latents = prepare_mask_latents
        # At the highest noise level nothing of the picture is left.
        sampling_pipe._encode_vae_image = lambda image, generator: (
            (encode(image) - config.shift_factor) * config.scaling_factor
        ).to(image.dtype)
        return sampling_pipe
