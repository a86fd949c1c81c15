"""Cosmos Predict2: images from text, and clips from a first frame, by one transformer with T5 11B; flow matching.

The published models are conditioned as those of Karras et al. 2022 are: their pipelines have noise levels of 0.002 to
80 that are added to the clip, and scale inputs and outputs of the transformer.  With ``s = level / (1 + level)`` the
input is ``(1 - s) x_0 + s e``, and the loss of the authors, whose weight is ``1 / s^2``, that of the velocity
``e - x_0``: rectified flow with a weight of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...config.network_args import GENERAL_NETWORK
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import NO_SHIFT, FixedShift
from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import DetectionFacts, FamilyMatch, FamilyOptions, PipelineFacts, SamplingFacts, SingleFileFacts, TextFacts
from ..family_noise_levels import LOGIT_NORMAL, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .anima import ANIMA_KEYS, Anima
from .anima import FACTS as ANIMA_FACTS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

COSMOS_TEXT_TOKENS = 512
"""The transformer always gets as many tokens of text: zeros after those of the prompt, which it attends to."""
GIVEN_FRAME_LEVEL = 0.0001
"""The noise level that is told of the given frame, which has none."""
CLIP_LATENT_FRAMES = 24
"""The latent frames of the clips that the authors train; their noise levels are multiplied by the root of this."""


def _match_cosmos2_text2image(read: ConfigReader) -> FamilyMatch:
    return _match_cosmos2(read, more_channels=0)


def _match_cosmos2_video2world(read: ConfigReader) -> FamilyMatch:
    return _match_cosmos2(read, more_channels=1)


def _match_cosmos2(read: ConfigReader, *, more_channels: int) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("extra_pos_embed_type"):
        raise ModelError("its transformer learned positions, as those of Cosmos 1 did; use Cosmos Predict2")
    if config.get("use_crossattn_projection") or config.get("img_context_dim_in"):
        raise ModelError("its transformer is that of Cosmos Predict2.5, which cannot be trained yet")
    reason = f"the transformer has {config.get('num_layers')} blocks"
    match = match_flow_model(read, 1, reason, more_channels=more_channels)
    positions = [size // patch for size, patch in zip(config["max_size"], config["patch_size"], strict=True)]
    return replace(match, max_side=max(positions) * match.size_multiple)


COSMOS2_KEYS = KeyStyle(
    "cosmos2",
    rename=ANIMA_KEYS.rename,
    is_read_by_diffusers=False,
    is_comfy_format_in_diffusers=False,
    has_lokr_in_diffusers=True,
    unread_in_comfyui=dict.fromkeys(("diffusers", "comfy"), "loads nothing of this layout"),
)
"""Names as those of Anima, which diffusers converts for no pipeline of Cosmos."""

FACTS = replace(
    ANIMA_FACTS,
    title="Cosmos Predict2 Text2Image",
    pipeline=PipelineFacts(
        class_name="Cosmos2TextToImagePipeline",
        num_parameters=14_265_265_152,
        hub_id="nvidia/Cosmos-Predict2-2B-Text2Image",
    ),
    detection=DetectionFacts(match_configs=_match_cosmos2_text2image),
    single_files=SingleFileFacts(),
    lora=replace(
        ANIMA_FACTS.lora,
        # The linear layers of the blocks except the modulation, as in its authors' trainer.
        targets_of="",
        key_style=COSMOS2_KEYS,
        format="kohya",
        modelspec_architecture="cosmos-predict2-text2image",
        modelspec_implementation="https://github.com/nvidia-cosmos/cosmos-predict2",
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "google-t5/t5-11b"},
        has_variable_length=True,
        denoiser_pad_multiple=COSMOS_TEXT_TOKENS,
    ),
    training_noise=TrainingNoiseFacts(
        shift=NO_SHIFT,
        reason="as its authors train: the logarithm of their noise levels is normal",
        other_trainers={"diffusion-pipe": LOGIT_NORMAL},
    ),
    sampling=SamplingFacts(num_inference_steps=35, guidance_scale=7.0, image_size=(1360, 768)),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}, network=GENERAL_NETWORK),
    notes="2B and 14B; diffusers folders; no guardrail",
)


class Cosmos2TextToImage(Anima):
    """The transformer, its latents and its objective are those of Anima, which was made from it."""

    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class(self.facts.pipeline.class_name)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("cosmos2_text2image", "cosmos-predict2-text2image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            tokens = pipe.tokenizer(
                list(prompts),
                padding="max_length",
                max_length=COSMOS_TEXT_TOKENS,
                truncation=True,
                return_tensors="pt",
            )
        device = pipe.text_encoder.device
        mask = tokens.attention_mask.to(device)
        embeds = pipe.text_encoder(tokens.input_ids.to(device), attention_mask=mask).last_hidden_state
        return {"embeds": text_encoding.drop_padding(embeds, mask)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        width = pipe.transformer.config.text_embed_dim
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, prompts, width, COSMOS_TEXT_TOKENS)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        # One token is that of the end.
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, COSMOS_TEXT_TOKENS - 1)


VIDEO_FACTS = replace(
    FACTS,
    title="Cosmos Predict2 Video2World",
    pipeline=PipelineFacts(
        class_name="Cosmos2VideoToWorldPipeline",
        kind="video",
        num_parameters=14_265_285_632,
        hub_id="nvidia/Cosmos-Predict2-2B-Video2World",
        frames=FrameRule(stride=4, fps=16.0),
    ),
    detection=DetectionFacts(match_configs=_match_cosmos2_video2world),
    lora=replace(FACTS.lora, modelspec_architecture="cosmos-predict2-video2world"),
    # The frames of a clip have times of their own, which are spread to their tokens; those of an image have one.
    blocks=replace(
        FACTS.blocks,
        token_args={
            **FACTS.blocks.token_args,
            "temb": ((1, ("hidden_states",)),),
            "embedded_timestep": ((1, ("hidden_states",)),),
        },
        token_arg_dims={"temb": 3, "embedded_timestep": 3},
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(CLIP_LATENT_FRAMES**0.5),
        reason="as its authors train, whose noise levels are multiplied by the root of 24 latent frames",
        other_trainers={"diffusion-pipe": LOGIT_NORMAL},
    ),
    sampling=replace(FACTS.sampling, image_size=(1280, 704), frame_images=("image_path",)),
    notes="2B and 14B, from the first frame; diffusers folders; no guardrail",
)


class Cosmos2VideoToWorld(Cosmos2TextToImage):
    """The first frame of a clip is given as clean latents in its own place; an image is trained as from text."""

    facts = VIDEO_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("cosmos2_video2world", "cosmos-predict2-video2world")

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_clip_moments

        return encode_clip_moments(pipe.vae, as_clips(pixels))

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """The latents of the first frame, which do not depend on later frames."""
        return {"first": moments.mean_and_std[:, 0, :, :1].clone()}  # which may be all of the moments of an image

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_clip_latents

        return decode_clip_latents(pipe.vae, latents)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        num_frames, height, width = noisy_latents.shape[2:]
        latents, times, mask = noisy_latents, timesteps / 1000, torch.zeros_like(noisy_latents[:, :1])
        if num_frames > 1:
            latents = torch.cat([batch.frame_cond["first"].to(noisy_latents), noisy_latents[:, :, 1:]], dim=2)
            times = times.view(-1, 1, 1, 1, 1).repeat(1, 1, num_frames, 1, 1)
            times[:, :, 0] = GIVEN_FRAME_LEVEL / (GIVEN_FRAME_LEVEL + 1)
            mask[:, :, 0] = 1
        predicted: Tensor = denoiser(
            hidden_states=latents,
            timestep=times,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], COSMOS_TEXT_TOKENS)[0],
            condition_mask=mask,
            padding_mask=noisy_latents.new_zeros(1, 1, 8 * height, 8 * width),
            return_dict=False,
        )[0]
        return predicted

    def select_trained_frames(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss[:, :, 1:] if loss.shape[2] > 1 else loss

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        # Positions in time do not depend on the rate in the models of the authors, as they do in diffusers' pipeline.
        return {**super().build_sampling_kwargs(pipe, prompt, cond, negative_cond), "fps": None}


class UncheckedContent:
    """A stand-in for the guardrail that the pipelines of Cosmos want; it checks nothing."""

    def to(self, device: Any) -> None:
        return

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def _build_pipeline_class(name: str) -> Any:
    """diffusers' pipeline, which also works without a guardrail: its models are a package and several GB."""
    import diffusers

    pipeline: Any = getattr(diffusers, name)

    class UncheckedPipeline(pipeline):  # type: ignore[misc]
        def __init__(
            self,
            text_encoder: Any,
            tokenizer: Any,
            transformer: Any,
            vae: Any,
            scheduler: Any,
            safety_checker: Any = None,
        ):
            super().__init__(text_encoder, tokenizer, transformer, vae, scheduler, safety_checker or UncheckedContent())

    return copy_class_name(UncheckedPipeline, pipeline)
