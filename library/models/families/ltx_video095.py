"""LTX-Video 0.9.5 to 0.9.8, from text, or with the first frame given: positions of tokens in pixels and seconds.

A given frame is clean where the others are noisy, and its tokens have timestep 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...diffusion.timestep_shift import DynamicShift
from ..base import BaseModelInfo, Family
from ..clean_first_frame import CleanFirstFrame
from ..facts import TrainerNames
from ..family_noise_levels import LOGIT_NORMAL, TrainingNoiseFacts
from .ltx_video import FACTS as LTX_FACTS
from .ltx_video import FRAME_RATE, FRAME_STRIDE, LTXVideo, match_ltx_video

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch

FACTS = replace(
    LTX_FACTS,
    title="LTX-Video 0.9.5",
    pipeline=replace(
        LTX_FACTS.pipeline,
        class_name="LTXConditionPipeline",
        num_parameters=13_042_569_344,
        hub_id="Lightricks/LTX-Video-0.9.7-dev",
    ),
    detection=replace(
        LTX_FACTS.detection,
        match_configs=match_ltx_video,
        trainer_names=TrainerNames(
            simpletuner=("ltxvideo",),
            simpletuner_flavours={
                "0.9.5": "Lightricks/LTX-Video-0.9.5",
                "0.9.7-dev": "Lightricks/LTX-Video-0.9.7-dev",
            },
            simpletuner_default="0.9.5",
        ),
    ),
    lora=replace(LTX_FACTS.lora, modelspec_architecture="ltxv-0.9.5"),
    training_noise=TrainingNoiseFacts(
        shift=DynamicShift((1024, 0.95), (4096, 2.05)),
        reason="by the number of latents, as Lightricks' own trainer draws them",
        other_trainers={"diffusion-pipe": LOGIT_NORMAL},
    ),
    options=replace(LTX_FACTS.options, extra=("image_to_video",)),
    notes="0.9.5 to 0.9.8 (2B and 13B), from text, or from the first frame (`--image_to_video`); diffusers folders",
)


class LTXVideo095(LTXVideo):
    facts = FACTS
    max_tokens = 256

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("ltx_video_0.9.5", "ltxv-0.9.5")

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return Family.decode_sampled_latents(self, pipe, latents, height, width)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        return self.predict_tokens(pipe, denoiser, noisy_latents, timesteps[:, None], batch)

    def predict_tokens(
        self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch
    ) -> Tensor:
        """Run the denoiser; ``timesteps`` (B, 1) are one for all tokens of a sample, or (B, tokens) one for each."""
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        sizes, device = noisy_latents.shape[2:], noisy_latents.device
        numbers = pipe._prepare_video_ids(len(noisy_latents), *sizes, device=device)
        positions = pipe._scale_video_ids(numbers, pipe.vae_spatial_compression_ratio, FRAME_STRIDE, device=device)
        positions = positions.float()
        positions[:, 0] *= 1.0 / FRAME_RATE
        predicted: Tensor = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents),
            encoder_hidden_states=embeds,
            timestep=timesteps,
            encoder_attention_mask=mask,
            video_coords=positions,
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, *sizes)
        return unpacked


IMAGE_FACTS = replace(
    FACTS,
    title="LTX-Video 0.9.5 from images",
    blocks=replace(
        FACTS.blocks,
        unsupported_strategies={
            **FACTS.blocks.unsupported_strategies,
            "cp": "its tokens have times of their own where a first frame is given",
        },
    ),
    sampling=replace(FACTS.sampling, frame_images=("image_path",)),
)


class LTXVideo095FromImage(CleanFirstFrame, LTXVideo095):
    """The model with the first frame of each clip given."""

    facts = IMAGE_FACTS

    def predict_with_token_times(
        self, pipe: Any, denoiser: nn.Module, latents: Tensor, timesteps: Tensor, token_times: Tensor, *, batch: Batch
    ) -> Tensor:
        return self.predict_tokens(pipe, denoiser, latents, token_times, batch)
