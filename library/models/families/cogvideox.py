"""CogVideoX 1.0: video and text in one sequence of tokens, text of T5; v-prediction with zero terminal SNR."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_ONLY_KEYS
from ...dataset.clip_windows import FrameRule
from ..base import BaseModelInfo, Family
from ..facts import (
    BlockFacts,
    DetectionFacts,
    FamilyFacts,
    FamilyLora,
    FamilyMatch,
    FamilyOptions,
    PipelineFacts,
    SamplingFacts,
    TextFacts,
)
from ..model_configs import ConfigReader, ModelError, get_downscale_factor, read_required
from ..shared_facts import T5_TOKENIZER, read_prediction_type

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...diffusion.process import NoiseProcess

COGVIDEOX_TEXT_TOKENS = 226
"""Tokens of the prompt, which the model always gets padded to as many, as in diffusers' pipeline."""

logger = logging.getLogger(__name__)


def match_cogvideox(read: ConfigReader, temporal_patch: int | None) -> FamilyMatch | None:
    """Check a CogVideoX whose patches have as many latent frames: None for version 1.0, 2 for version 1.5."""
    config, vae = read_required(read, "transformer/config.json"), read_required(read, "vae/config.json")
    if config.get("patch_size_t") != temporal_patch:
        return None
    if config.get("use_learned_positional_embeddings"):
        raise ModelError("its positions are learned for one size of clips; use CogVideoX text to video")
    channels, latent_channels = config.get("in_channels", 16), vae.get("latent_channels", 16)
    if channels != latent_channels:
        raise ModelError(
            f"its transformer has {channels} input channels instead of {latent_channels}; models that make videos from "
            "images or are controlled cannot be trained"
        )
    reason = f"the transformer has {config.get('num_layers', 30)} blocks"
    size_multiple = get_downscale_factor(vae) * int(config.get("patch_size", 2))
    max_side = None
    if temporal_patch is not None:
        max_side = get_downscale_factor(vae) * min(config.get("sample_height", 60), config.get("sample_width", 90))
    return FamilyMatch(reason, size_multiple, read_prediction_type(read), max_side=max_side)


def _match_cogvideox(read: ConfigReader) -> FamilyMatch | None:
    config = read_required(read, "transformer/config.json")
    if config.get("patch_size_t") not in (None, 2):
        raise ModelError(f"its transformer has patches of {config['patch_size_t']} latent frames instead of 1 or 2")
    return match_cogvideox(read, None)


FACTS = FamilyFacts(
    title="CogVideoX",
    pipeline=PipelineFacts(
        class_name="CogVideoXPipeline",
        kind="video",
        num_parameters=5_570_283_072,
        hub_id="THUDM/CogVideoX-5b",
        # Its VAE decodes an even number of latent frames to other numbers of frames.
        frames=FrameRule(stride=8, fps=8.0, latents_per_stride=2),
    ),
    detection=DetectionFacts(match_configs=_match_cogvideox),
    lora=FamilyLora(
        # The attention, which text and video share, as in diffusers' example of training it.
        targets=("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
        key_style=DIFFUSERS_ONLY_KEYS,
        format="diffusers",
        modelspec_architecture="cogvideox",
        modelspec_implementation="https://github.com/THUDM/CogVideo",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states", "encoder_hidden_states"),
        unsupported_strategies={
            "cp": "the feed-forward layers of CogVideoX see the text and the video one after the other",
        },
        attention_modes=(),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": T5_TOKENIZER},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=6.0, image_size=(720, 480)),
    options=FamilyOptions(components={"vae": "vae", "t5xxl": "text_encoder"}),
    notes="1.0, 2B and 5B; diffusers folders",
)


class CogVideoX(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("cogvideox", "cogvideox")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import build_discrete_process

        # Its scheduler shifts the signal-to-noise ratios, which diffusers' DDPM scheduler does not.
        scheduler = pipe.scheduler
        if not type(scheduler).__name__.startswith("CogVideoX"):
            scheduler = _build_own_scheduler(scheduler)
        return build_discrete_process(scheduler.alphas_cumprod, scheduler.config.prediction_type)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        embeds, _ = text_encoding.encode_with_t5(
            pipe, prompts, "text_encoder", COGVIDEOX_TEXT_TOKENS, masks_padding=False
        )
        return {"embeds": embeds}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        # One token is that of the end.
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, COGVIDEOX_TEXT_TOKENS - 1)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_vae_moments

        return encode_vae_moments(pipe.vae, as_clips(pixels))

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, latents.transpose(1, 2))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        frames, *sides = noisy_latents.shape[2:]
        height, width = (side * pipe.vae_scale_factor_spatial for side in sides)
        has_rotations = pipe.transformer.config.use_rotary_positional_embeddings
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents.transpose(1, 2),
            encoder_hidden_states=batch.cond["embeds"],
            timestep=timesteps,
            image_rotary_emb=pipe._prepare_rotary_positional_embeddings(height, width, frames, noisy_latents.device)
            if has_rotations
            else None,
            return_dict=False,
        )[0]
        return predicted.transpose(1, 2)

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Sample with the model's own DDIM, since no other sampler has its noise schedule."""
        name = type(sampling_pipe.scheduler).__name__
        if name != "DDIMScheduler" and not name.startswith("CogVideoX"):
            logger.info("previews: CogVideoX's own DDIM replaces %s, which has not its noise schedule", name)
        sampling_pipe.scheduler = _build_own_scheduler(sampling_pipe.scheduler)
        return sampling_pipe


def _build_own_scheduler(scheduler: Any) -> Any:
    """Build CogVideoX's DDIM with the settings of this scheduler."""
    from diffusers import CogVideoXDDIMScheduler

    own: Any = CogVideoXDDIMScheduler
    return own.from_config(scheduler.config)
