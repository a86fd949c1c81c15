"""Wan 2.2 TI2V 5B as a model of text to video: Wan 2.1's transformer over latents of 1/16 of the frame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config.network_args import GENERAL_NETWORK
from ...dataset.frame_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
from ..base import BaseModelInfo
from ..facts import DetectionFacts, FamilyMatch, PipelineFacts, SamplingFacts, SingleFileFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import match_flow_model
from ..training_noise import WEIGHTED, TrainingNoiseFacts
from .wan import FACTS as WAN_FACTS
from .wan import Wan


def _match_wan22_ti2v(read: ConfigReader) -> FamilyMatch | None:
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    if not index.get("expand_timesteps") or index.get("boundary_ratio") is not None:
        return None
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks and a time for each token")


FACTS = replace(
    WAN_FACTS,
    title="Wan 2.2 TI2V",
    pipeline=PipelineFacts(
        class_name="WanPipeline",
        kind="video",
        num_parameters=4_999_787_712,
        hub_id="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        frames=FrameRule(stride=4, fps=24.0),
    ),
    # Files of ai-toolkit are not imported: it trains this model with the first frame of each clip given.
    detection=DetectionFacts(match_configs=_match_wan22_ti2v),
    lora=replace(
        WAN_FACTS.lora,
        targets_of="",
        modelspec_architecture="wan2.2-ti2v-5b",
        modelspec_implementation="https://github.com/Wan-Video/Wan2.2",
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(3.0),
        reason="as Wan 2.1, since no trainer's guide has another",
        other_trainers={"ai-toolkit": WEIGHTED},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0, image_size=(1280, 704)),
    # Only diffusers' folders are tried, and no command of musubi-tuner is for this model.
    single_files=SingleFileFacts(),
    options=replace(WAN_FACTS.options, network=GENERAL_NETWORK, musubi_versions={}),
    notes="5B, text to video; diffusers folders",
)


class WanTI2V(Wan):
    """The denoiser is given the timestep of each sample, where the pipeline gives each token the same one.

    Tokens have times of their own only where a first frame is given; one per sample takes gigabytes less.
    """

    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan22_ti2v", "wan2.2-ti2v-5b")
