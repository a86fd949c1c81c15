"""Kandinsky 5 video, from text or the first frame: the transformer of Kandinsky 5 image over HunyuanVideo's VAE."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
from ...registry import copy_class_name
from ..base import BaseModelInfo, Family
from ..facts import DetectionFacts, FamilyMatch, PipelineFacts, SamplingFacts, SingleFileFacts, TrainerNames
from ..family_noise_levels import NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .kandinsky5_image import FACTS as IMAGE_FACTS
from .kandinsky5_image import MAX_SIDE_POSITIONS, Kandinsky5Image, rename_channels

NUM_EVENED_FRAMES = 4
"""The first latent frames whose mean and deviation the pipeline from images draws to those of the frames after them."""

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Moments


def _match_kandinsky5_video(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("attention_type", "regular") != "regular":
        raise ModelError("its attention is sparse (nabla), which cannot be trained yet; use a model of 5 s clips (SD)")
    if not config.get("visual_cond"):
        raise ModelError("its transformer has no input for a first frame; it is no published Kandinsky 5 video")
    reason = f"the transformer has {config.get('num_visual_blocks')} blocks"
    match = match_flow_model(rename_channels(read, config), 1, reason)
    return replace(match, max_side=MAX_SIDE_POSITIONS * match.size_multiple)


FACTS = replace(
    IMAGE_FACTS,
    title="Kandinsky 5 video",
    pipeline=PipelineFacts(
        class_name="Kandinsky5T2VPipeline",
        kind="video",
        num_parameters=19_311_325_248,
        hub_id="kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
        frames=FrameRule(stride=4, fps=24.0),
    ),
    detection=DetectionFacts(
        match_configs=_match_kandinsky5_video,
        trainer_names=TrainerNames(
            simpletuner=("kandinsky5-video",),
            simpletuner_flavours={
                "t2v-lite-sft-5s": "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
                "t2v-lite-pretrain-5s": "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers",
            },
            simpletuner_default="t2v-lite-sft-5s",
        ),
    ),
    single_files=SingleFileFacts(),
    lora=replace(
        IMAGE_FACTS.lora,
        # Every linear layer of the blocks but those of modulation.
        targets=(
            *(
                f"{attention}.{name}"
                for attention in ("self_attention", "cross_attention")
                for name in ("to_query", "to_key", "to_value", "out_layer")
            ),
            *("feed_forward.in_layer", "feed_forward.out_layer"),
        ),
        targets_of="musubi-tuner",
        modelspec_architecture="kandinsky-5-video",
        modelspec_implementation="https://github.com/kandinskylab/kandinsky-5",
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(3.0),
        reason="as Kandinsky 5 image, less than the 5 of musubi-tuner's guide",
        other_trainers={"musubi-tuner": NoiseLevels("shift", 5.0, origin="its guide")},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0, image_size=(768, 512)),
    notes="Lite and Pro, 5 s text to video (SD); diffusers folders",
)


class Kandinsky5Video(Kandinsky5Image):
    """The text is encoded as that of Kandinsky 5 image, by its own pipeline."""

    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return Family.get_pipeline_class(self)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("kandinsky5_video", "kandinsky-5-video")

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips

        return super().encode_moments(pipe, as_clips(pixels))

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, latents.permute(0, 4, 1, 2, 3))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        return self.predict_clips(pipe, denoiser, noisy_latents, timesteps, batch)

    def predict_clips(
        self,
        pipe: Any,
        denoiser: nn.Module,
        latents: Tensor,
        timesteps: Tensor,
        batch: Batch,
        *,
        num_given_frames: int = 0,
    ) -> Tensor:
        """Run the denoiser; the mask in the last channel tells it how many of the first latent frames are given.

        The channels between the latents and the mask are zeros in every published model, also from images.
        """
        from torch.nn.functional import pad

        states = pad(latents.permute(0, 2, 3, 4, 1), (0, latents.shape[1] + 1))
        states[:, :num_given_frames, ..., -1] = 1
        height, width = (side * pipe.vae_scale_factor_spatial for side in latents.shape[3:])
        predicted = self.call_denoiser(
            denoiser, states, timesteps, batch, scale_factor=pipe._get_scale_factor(height, width)
        )
        return predicted.permute(0, 4, 1, 2, 3)


IMAGE_TO_VIDEO_FACTS = replace(
    FACTS,
    title="Kandinsky 5 I2V",
    pipeline=replace(
        FACTS.pipeline,
        class_name="Kandinsky5I2VPipeline",
        hub_id="kandinskylab/Kandinsky-5.0-I2V-Lite-5s-Diffusers",
    ),
    detection=replace(
        FACTS.detection,
        trainer_names=TrainerNames(
            simpletuner=("kandinsky5-video",),
            simpletuner_flavours={
                "i2v-lite-5s": "kandinskylab/Kandinsky-5.0-I2V-Lite-5s-Diffusers",
                "i2v-pro-sft-5s": "kandinskylab/Kandinsky-5.0-I2V-Pro-sft-5s-Diffusers",
            },
            variant_pattern="i2v",
        ),
    ),
    lora=replace(FACTS.lora, modelspec_architecture="kandinsky-5-i2v"),
    sampling=replace(FACTS.sampling, frame_images=("image_path",)),
    notes="Lite and Pro, 5 s from the first frame; diffusers folders",
)


class Kandinsky5I2V(Kandinsky5Video):
    """The first frame of a clip is given as clean latents in its own place; an image is trained as from text."""

    facts = IMAGE_TO_VIDEO_FACTS

    def get_pipeline_class(self) -> Any:
        return _build_image_pipeline_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("kandinsky5_i2v", "kandinsky-5-i2v")

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """The latents of the first frame alone: the VAE normalizes groups of channels over all frames of a clip."""
        from ..vae import as_clips

        return {"first": self.encode_moments(pipe, as_clips(pixels)[:, :, :1]).mean_and_std[:, 0]}

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        if noisy_latents.shape[2] == 1:
            return super().predict(pipe, denoiser, noisy_latents, timesteps, batch)
        latents = torch.cat([batch.frame_cond["first"].to(noisy_latents), noisy_latents[:, :, 1:]], dim=2)
        return self.predict_clips(pipe, denoiser, latents, timesteps, batch, num_given_frames=1)

    def select_trained_frames(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss[:, :, 1:] if loss.shape[2] > 1 else loss


def _build_image_pipeline_class() -> Any:
    """diffusers' pipeline, which also samples clips of at most 13 frames: there, their first frames become NaN.

    The VAE gets the given frame in its own dtype, where there it gets that of the transformer.
    """
    from diffusers import Kandinsky5I2VPipeline

    pipeline: Any = Kandinsky5I2VPipeline

    class GivenFramePipeline(pipeline):  # type: ignore[misc]
        def prepare_latents(self, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
            return super().prepare_latents(*args, dtype=self.vae.dtype, **kwargs).to(dtype)

        def normalize_first_frame(self, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
            if latents.shape[1] <= NUM_EVENED_FRAMES:  # no frames are left to whose statistics these could be drawn
                return latents
            return super().normalize_first_frame(latents, *args, **kwargs)

    return copy_class_name(GivenFramePipeline, pipeline)
