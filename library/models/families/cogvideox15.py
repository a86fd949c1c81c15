"""CogVideoX 1.5: patches of two latent frames, before the first of which is a copy of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dataset.clip_windows import FrameRule
from ..base import BaseModelInfo
from ..facts import DetectionFacts, FamilyMatch, PipelineFacts, SamplingFacts
from ..model_configs import ConfigReader
from .cogvideox import FACTS as COGVIDEOX_FACTS
from .cogvideox import CogVideoX, match_cogvideox

if TYPE_CHECKING:
    from torch import Tensor

    from ...dataloader.batch import Moments


def _match_cogvideox15(read: ConfigReader) -> FamilyMatch | None:
    return match_cogvideox(read, 2)


FACTS = replace(
    COGVIDEOX_FACTS,
    title="CogVideoX 1.5",
    pipeline=PipelineFacts(
        class_name="CogVideoXPipeline",
        kind="video",
        num_parameters=5_570_676_352,
        hub_id="THUDM/CogVideoX1.5-5B",
        frames=FrameRule(stride=8, fps=16.0, latents_per_stride=2, shortest_latents=2),
    ),
    detection=DetectionFacts(match_configs=_match_cogvideox15),
    lora=replace(COGVIDEOX_FACTS.lora, modelspec_architecture="cogvideox-1.5"),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=6.0, image_size=(1360, 768)),
    notes="5B; diffusers folders",
)


class CogVideoX15(CogVideoX):
    """Clips have 8N + 1 frames, so 2N + 1 latent frames; with the copy, they are whole patches."""

    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("cogvideox_1.5", "cogvideox-1.5")

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        import torch

        from ...dataloader.batch import Moments

        moments = super().encode_moments(pipe, pixels).mean_and_std
        return Moments(torch.cat([moments[:, :, :, :1], moments], dim=3))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        return super().decode_latents(pipe, latents[:, :, 1:])
