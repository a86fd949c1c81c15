"""SkyReels V2 from text or the first frame: Wan 2.1's architecture, trained by others at 24 frames per second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config.network_args import GENERAL_NETWORK
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
from ..base import BaseModelInfo
from ..facts import DetectionFacts, FamilyMatch, PipelineFacts, SamplingFacts
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .wan import FACTS as WAN_FACTS
from .wan import Wan
from .wan_i2v import CONDITION_CHANNELS, WanI2V
from .wan_i2v import FACTS as WAN_IMAGE_FACTS


def _match_skyreels_v2(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("inject_sample_info"):
        raise ModelError("it continues videos (diffusion forcing), which cannot be trained yet; use SkyReels V2 T2V")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks")


FACTS = replace(
    WAN_FACTS,
    title="SkyReels V2",
    pipeline=PipelineFacts(
        class_name="SkyReelsV2Pipeline",
        kind="video",
        num_parameters=14_288_491_584,
        hub_id="Skywork/SkyReels-V2-T2V-14B-540P-Diffusers",
        frames=FrameRule(stride=4, fps=24.0),
    ),
    # Files have the names and sizes of Wan 2.1 14B, for which they are taken without --family.
    detection=DetectionFacts(
        match_configs=_match_skyreels_v2,
        keys=WAN_FACTS.detection.keys,
        diffusers_keys=WAN_FACTS.detection.diffusers_keys,
        shape_checks=WAN_FACTS.detection.shape_checks,
    ),
    lora=replace(
        WAN_FACTS.lora,
        targets_of="",
        modelspec_architecture="skyreels-v2",
        modelspec_implementation="https://github.com/SkyworkAI/SkyReels-V2",
    ),
    training_noise=TrainingNoiseFacts(shift=FixedShift(3.0), reason="as Wan 2.1, since no trainer's guide has another"),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=6.0, image_size=(960, 544)),
    # No command of musubi-tuner is for this model.
    options=replace(WAN_FACTS.options, network=GENERAL_NETWORK, musubi_versions={}),
    notes="text to video; single files with `--family skyreels_v2`",
)


def _match_skyreels_v2_i2v(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    reason = f"the transformer has {config.get('num_layers')} blocks and is given its first frame"
    return match_flow_model(read, 2, reason, more_channels=CONDITION_CHANNELS)


IMAGE_FACTS = replace(
    WAN_IMAGE_FACTS,
    title="SkyReels V2 I2V",
    pipeline=replace(
        WAN_IMAGE_FACTS.pipeline,
        class_name="SkyReelsV2ImageToVideoPipeline",
        hub_id="Skywork/SkyReels-V2-I2V-14B-540P-Diffusers",
        frames=FACTS.pipeline.frames,
    ),
    detection=DetectionFacts(match_configs=_match_skyreels_v2_i2v),
    single_files=replace(WAN_IMAGE_FACTS.single_files, renames={}),
    lora=replace(
        WAN_IMAGE_FACTS.lora,
        targets_of="",
        modelspec_architecture="skyreels-v2-i2v",
        modelspec_implementation=FACTS.lora.modelspec_implementation,
    ),
    training_noise=FACTS.training_noise,
    sampling=replace(WAN_IMAGE_FACTS.sampling, image_size=FACTS.sampling.image_size),
    options=replace(WAN_IMAGE_FACTS.options, network=GENERAL_NETWORK, musubi_versions={}),
    notes="from the first frame; diffusers folders",
)


class SkyReelsV2I2V(WanI2V):
    facts = IMAGE_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("skyreels_v2_i2v", "skyreels-v2-i2v")


class SkyReelsV2(Wan):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("skyreels_v2", "skyreels-v2")
