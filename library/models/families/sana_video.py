"""Sana Video: linear attention and convolutions over frames, latents of Wan 2.1's VAE, text of Gemma 2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import DetectionFacts, FamilyMatch, PipelineFacts, SamplingFacts, SingleFileFacts, TrainerNames
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .sana import FACTS as SANA_FACTS
from .sana import Sana

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Moments


def _match_sana_video(read: ConfigReader) -> FamilyMatch:
    config, vae = read_required(read, "transformer/config.json"), read_required(read, "vae/config.json")
    if vae.get("_class_name", "AutoencoderKLWan") != "AutoencoderKLWan":
        raise ModelError(f"its VAE is {vae['_class_name']}, which cannot be trained yet; use SANA-Video 480p")
    if config.get("guidance_embeds"):
        raise ModelError("it is distilled to few steps, which a LoRA would lose; use SANA-Video 480p")
    patch = config.get("patch_size", [1, 2, 2])
    if patch[0] != 1 or patch[1] != patch[2]:
        raise ModelError(f"its transformer has patches of {patch} latents")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks", patch_size=patch[1])


FACTS = replace(
    SANA_FACTS,
    title="Sana Video",
    pipeline=PipelineFacts(
        class_name="SanaVideoPipeline",
        kind="video",
        num_parameters=2_056_862_144,
        hub_id="Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
        frames=FrameRule(stride=4, fps=16.0),
    ),
    detection=DetectionFacts(
        match_configs=_match_sana_video,
        trainer_names=TrainerNames(
            simpletuner=("sanavideo",),
            simpletuner_flavours={"2b-480p": "Efficient-Large-Model/SANA-Video_2B_480p_diffusers"},
            simpletuner_default="2b-480p",
        ),
    ),
    single_files=SingleFileFacts(),
    lora=replace(
        SANA_FACTS.lora,
        modelspec_architecture="sana-video",
        modelspec_implementation="https://github.com/NVlabs/Sana",
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(3.0), reason="as Sana, since the pipeline's shift of 8 is for sampling"
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=6.0, image_size=(832, 480)),
    notes="2B, 480p, text to video; diffusers folders",
)


class SanaVideo(Sana):
    """Captions get the instruction of its own pipeline; a score of motion is part of the caption, if it has one."""

    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sana_video", "sana-video")

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_clip_moments

        return encode_clip_moments(pipe.vae, as_clips(pixels))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_clip_latents

        return decode_clip_latents(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        predicted: Tensor = denoiser(
            noisy_latents,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            timestep=timesteps,
            return_dict=False,
        )[0]
        return predicted


def _build_pipeline_class() -> Any:
    """diffusers' pipeline, which calls the number of frames as others do and takes all sizes that the model does."""
    import functools

    from diffusers import SanaVideoPipeline

    pipeline: Any = SanaVideoPipeline

    class FramesPipeline(pipeline):  # type: ignore[misc]
        @functools.wraps(pipeline.__call__)
        def __call__(self, *args: Any, num_frames: int | None = None, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs, **({} if num_frames is None else {"frames": num_frames}))

        def check_inputs(self, prompt: Any, height: int, width: int, *args: Any, **kwargs: Any) -> None:
            super().check_inputs(prompt, 32, 32, *args, **kwargs)  # it wants multiples of 32

    return copy_class_name(FramesPipeline, pipeline)
