"""Wan 2.2 A14B: two transformers, one for high and one for low noise; from text, and from the first frame.

Both are trained in one run, each in the steps that are drawn for it, or one of them alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.schema import ModelConfig
from ...diffusion.expert_selection import HIGH_NOISE, LOW_NOISE, NoiseExperts, TrainedExperts
from ...diffusion.timestep_shift import FixedShift
from ...problems import Problem
from ..base import BaseModelInfo, Family
from ..facts import DetectionFacts, FamilyFacts, FamilyMatch, PipelineFacts, SamplingFacts, TrainerNames
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import DENOISER_PREFIXES, match_flow_model
from .wan import FACTS as WAN_FACTS
from .wan import WAN_FRAMES, Wan
from .wan_i2v import CONDITION_CHANNELS, WanI2V, takes_reference

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch

BOUNDARY, IMAGE_BOUNDARY = 0.875, 0.9
_BOTH = "a step trains one of the two experts, and the other is idle; train one with --noise_experts high_noise"


_NOISE_NAMES = r"(?<!s)(high|low)[-_ .]?noise"
"""``high_noise`` and its other spellings in the names of files."""
_NOISE_WORDS = (
    r"(?<![a-z])(high|low)(?![a-z])"
    r"(?![-_ .]?(?:res|quality|detail|vram|ram|mem|memory|rank|bit|bits|precision|motion|speed|fps|steps?)(?![a-z]))"
)
"""The words ``HIGH`` and ``LOW`` alone, unless they say how much there is of something else."""


def match_experts(read: ConfigReader, boundary: float, channels_per_latent: int, more_channels: int) -> FamilyMatch:
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    if index["boundary_ratio"] != boundary:
        raise ModelError(f"its boundary_ratio is {index['boundary_ratio']:g} instead of {boundary:g}")
    reason = f"there are two transformers of {config.get('num_layers')} blocks"
    return match_flow_model(read, channels_per_latent, reason, more_channels=more_channels)


def _match_t2v(read: ConfigReader) -> FamilyMatch | None:
    if read_required(read, "model_index.json").get("boundary_ratio") is None:
        return None  # Wan 2.1, or Wan 2.2 TI2V
    return match_experts(read, BOUNDARY, 1, 0)


def _match_i2v(read: ConfigReader) -> FamilyMatch | None:
    if read_required(read, "model_index.json").get("boundary_ratio") is None or takes_reference(read):
        return None  # Wan 2.1 I2V, or Wan 2.2 Fun-Control
    return match_experts(read, IMAGE_BOUNDARY, 2, CONDITION_CHANNELS)


def _validate_files(read: ConfigReader, options: ModelConfig) -> Iterator[Problem]:
    """A file whose name says that it is the other transformer is not taken for this one."""
    main = LOW_NOISE if options.noise_experts == "both" else options.noise_experts
    for option, expert in (("pretrained_model_name_or_path", main), ("dit_high_noise", HIGH_NOISE)):
        path = Path(getattr(options, option) or "")
        named = _find_named_expert(path.name) if path.suffix else None
        if named is not None and named[0] != expert:
            other, word = named
            yield Problem(option, f"is named ({word}) like the transformer for {other}", f"give that for {expert}")


def _find_named_expert(name: str) -> tuple[str, str] | None:
    """Find the expert that the name of a file stands for, and the word that says so; None if it names none or both."""
    for pattern in (_NOISE_NAMES, _NOISE_WORDS):
        found = {match[1].lower(): match[0] for match in re.finditer(pattern, name, re.IGNORECASE)}
        if found:
            experts = {"high": HIGH_NOISE, "low": LOW_NOISE}
            return (experts[next(iter(found))], next(iter(found.values()))) if len(found) == 1 else None
    return None


FACTS = replace(
    WAN_FACTS,
    title="Wan 2.2 A14B T2V",
    pipeline=PipelineFacts(
        class_name="WanPipeline",
        denoisers=("transformer", "transformer_2"),
        experts=NoiseExperts(BOUNDARY),
        kind="video",
        num_parameters=14_288_491_584,
        hub_id="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        frames=WAN_FRAMES,
    ),
    detection=DetectionFacts(
        match_configs=_match_t2v,
        keys=WAN_FACTS.detection.keys,
        diffusers_keys={
            **WAN_FACTS.detection.diffusers_keys,
            "img_emb.proj.1.weight": "condition_embedder.image_embedder.ff.net.0.proj.weight",
        },
        shape_checks={
            **WAN_FACTS.detection.shape_checks,
            ("img_emb.proj.1.weight", None): ("transformer", "image_dim"),  # of Wan 2.1 I2V
        },
        trainer_names=TrainerNames(
            ai_toolkit=("wan22_14b",), diffusion_pipe=("wan",), variant_pattern=r"2[._]?2.*(?<!i)t2v"
        ),
    ),
    lora=replace(
        WAN_FACTS.lora,
        modelspec_architecture="wan2.2-t2v-a14b",
        modelspec_implementation="https://github.com/Wan-Video/Wan2.2",
    ),
    blocks=replace(
        WAN_FACTS.blocks,
        unsupported_strategies={
            **WAN_FACTS.blocks.unsupported_strategies,
            **dict.fromkeys(("compile", "cuda_graphs", "deepspeed"), _BOTH),
        },
    ),
    training_noise=TrainingNoiseFacts(shift=FixedShift(3.0), reason="as Wan 2.1; both experts together"),
    sampling=SamplingFacts(num_inference_steps=40, guidance_scale=4.0, image_size=(832, 480)),
    # A single file has one of the two transformers.
    single_files=replace(
        WAN_FACTS.single_files, prefixes={**WAN_FACTS.single_files.prefixes, "transformer_2": DENOISER_PREFIXES}
    ),
    options=replace(
        WAN_FACTS.options,
        components={**WAN_FACTS.options.components, "dit_high_noise": "transformer"},
        musubi_versions={"t2v-A14B": {}},
        extra=("noise_experts", "expert_adapters", "timestep_boundary"),
        validate=_validate_files,
    ),
    notes="two experts, text to video",
)
IMAGE_FACTS = replace(
    FACTS,
    title="Wan 2.2 A14B I2V",
    pipeline=replace(
        FACTS.pipeline,
        class_name="WanImageToVideoPipeline",
        experts=NoiseExperts(IMAGE_BOUNDARY),
        num_parameters=14_288_901_184,
        hub_id="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    ),
    detection=replace(
        FACTS.detection,
        match_configs=_match_i2v,
        trainer_names=TrainerNames(
            ai_toolkit=("wan22_14b_i2v",), diffusion_pipe=("wan",), variant_pattern=r"2[._]?2.*(?<!t)i2v"
        ),
    ),
    lora=replace(FACTS.lora, modelspec_architecture="wan2.2-i2v-a14b"),
    sampling=replace(FACTS.sampling, guidance_scale=3.5, frame_images=("image_path",)),
    options=replace(FACTS.options, musubi_versions={"i2v-A14B": {}}),
    notes="two experts, from the first frame",
)


def select_expert(facts: FamilyFacts, expert: TrainedExperts, denoiser: str) -> FamilyFacts:
    """The facts of a run that trains one expert alone, and loads no other."""
    if facts.pipeline.experts is None:
        raise AssertionError("a model of experts")
    experts = replace(facts.pipeline.experts, trained=expert)
    return replace(
        facts,
        pipeline=replace(facts.pipeline, denoisers=(denoiser,), experts=experts),
        options=replace(facts.options, components=WAN_FACTS.options.components),
        blocks=replace(WAN_FACTS.blocks, unsupported_strategies=WAN_FACTS.blocks.unsupported_strategies),
    )


class JoinedExperts(Family):
    """The methods of a family whose denoiser is both experts."""

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        from ..expert_denoiser import join_experts

        join_experts(pipe)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        call: Any = partial(denoiser, expert=batch.expert) if batch.expert else denoiser
        return super().predict(pipe, call, noisy_latents, timesteps, batch)  # type: ignore[safe-super]

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        if (boundary := self.model_config.noise_boundary) is not None:
            sampling_pipe.register_to_config(boundary_ratio=boundary)
        return sampling_pipe


class FirstFrame(WanI2V):
    """The methods of a family that gets the first frame without an image encoder."""

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        """There is no image processor."""


class WanT2VExperts(JoinedExperts, Wan):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan22_t2v", "wan2.2-t2v-a14b")


class WanT2VHighNoise(Wan):
    facts = select_expert(FACTS, "high_noise", "transformer")

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan22_t2v", "wan2.2-t2v-a14b")


class WanT2VLowNoise(WanT2VHighNoise):
    facts = select_expert(FACTS, "low_noise", "transformer_2")


class WanI2VExperts(JoinedExperts, FirstFrame):
    facts = IMAGE_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan22_i2v", "wan2.2-i2v-a14b")


class WanI2VHighNoise(FirstFrame):
    facts = select_expert(IMAGE_FACTS, "high_noise", "transformer")

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan22_i2v", "wan2.2-i2v-a14b")


class WanI2VLowNoise(WanI2VHighNoise):
    facts = select_expert(IMAGE_FACTS, "low_noise", "transformer_2")
