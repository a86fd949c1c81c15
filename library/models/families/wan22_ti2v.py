"""Wan 2.2 TI2V 5B, from text, or with the first frame given: Wan 2.1's transformer over latents of 1/16 of the frame.

A given frame is clean where the others are noisy, and its tokens have timestep 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...config.network_args import GENERAL_NETWORK
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
from ..base import BaseModelInfo
from ..clean_first_frame import CleanFirstFrame
from ..facts import DetectionFacts, FamilyMatch, PipelineFacts, SamplingFacts, TrainerNames
from ..family_noise_levels import WEIGHTED, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import match_flow_model
from .wan import FACTS as WAN_FACTS
from .wan import WAN_TEXT_TOKENS, Wan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch


def _match_wan22_ti2v(read: ConfigReader) -> FamilyMatch | None:
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    if not index.get("expand_timesteps") or index.get("boundary_ratio") is not None:
        return None
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks and a time for each token")


def _build_vae_patterns(config: Mapping[str, Any]) -> dict[str, str]:
    """Build the patterns of the VAE's keys in diffusers, and what its authors' file has there."""
    count = int(config["num_res_blocks"])
    return {
        r"^quant_conv\.": "conv1.",
        r"^post_quant_conv\.": "conv2.",
        r"\.conv_in\.": ".conv1.",
        r"\.norm_out\.": ".head.0.",
        r"\.conv_out\.": ".head.2.",
        r"\.norm1\.": ".residual.0.",
        r"\.resnets\.(\d)\.conv1\.": r".resnets.\1.residual.2.",
        r"\.norm2\.": ".residual.3.",
        r"\.resnets\.(\d)\.conv2\.": r".resnets.\1.residual.6.",
        r"\.conv_shortcut\.": ".shortcut.",
        r"\.mid_block\.resnets\.0\.": ".middle.0.",
        r"\.mid_block\.attentions\.0\.": ".middle.1.",
        r"\.mid_block\.resnets\.1\.": ".middle.2.",
        r"\.(down|up)_blocks\.(\d)\.resnets\.": r".\1samples.\2.\1samples.",
        r"\.down_blocks\.(\d)\.downsampler\.": rf".downsamples.\1.downsamples.{count}.",
        r"\.up_blocks\.(\d)\.upsampler\.": rf".upsamples.\1.upsamples.{count + 1}.",
    }


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
    detection=DetectionFacts(
        match_configs=_match_wan22_ti2v,
        keys=WAN_FACTS.detection.keys,
        diffusers_keys=WAN_FACTS.detection.diffusers_keys,
        shape_checks=WAN_FACTS.detection.shape_checks,
        trainer_names=TrainerNames(
            ai_toolkit=("wan22_5b",),
            diffusion_pipe=("wan",),
            simpletuner=("wan",),
            simpletuner_flavours={"ti2v-5b-2.2": "Wan-AI/Wan2.2-TI2V-5B-Diffusers"},
            variant_pattern="ti2v",
        ),
    ),
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
    # Of previews, and where a first frame is given; other samples have one time for all tokens, which is not split.
    blocks=replace(
        WAN_FACTS.blocks,
        token_args={**WAN_FACTS.blocks.token_args, "temb": ((1, ("hidden_states",)),)},
        token_arg_dims={"temb": 4},  # of three axes, the second is that of the six modulations
    ),
    # No command of musubi-tuner is for this model.
    single_files=replace(WAN_FACTS.single_files, build_vae_patterns=_build_vae_patterns),
    options=replace(WAN_FACTS.options, network=GENERAL_NETWORK, musubi_versions={}, extra=("image_to_video",)),
    notes="5B, text to video, or from the first frame (`--image_to_video`)",
)


class WanTI2V(Wan):
    """The denoiser is given the timestep of each sample, where the pipeline gives each token the same one.

    Tokens have times of their own only where a first frame is given; one per sample takes gigabytes less.
    """

    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan22_ti2v", "wan2.2-ti2v-5b")


IMAGE_FACTS = replace(
    FACTS,
    title="Wan 2.2 TI2V from images",
    pipeline=replace(FACTS.pipeline, class_name="WanImageToVideoPipeline"),
    sampling=replace(FACTS.sampling, frame_images=("image_path",)),
)


class WanTI2VFromImage(CleanFirstFrame, WanTI2V):
    """The model with the first frame of each clip given."""

    facts = IMAGE_FACTS

    def count_frame_tokens(self, pipe: Any, height: int, width: int) -> int:
        _, *patch = pipe.transformer.config.patch_size
        return (height // int(patch[0])) * (width // int(patch[1]))

    def predict_with_token_times(
        self, pipe: Any, denoiser: nn.Module, latents: Tensor, timesteps: Tensor, token_times: Tensor, *, batch: Batch
    ) -> Tensor:
        from ..text_encoding import pad_text_embeds

        predicted: Tensor = denoiser(
            hidden_states=latents,
            timestep=token_times,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], WAN_TEXT_TOKENS)[0],
            return_dict=False,
        )[0]
        return predicted
