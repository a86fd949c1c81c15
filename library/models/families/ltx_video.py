"""LTX-Video: latents of 1/32 of the frame and 1/8 of the frames, text of T5 by cross-attention; flow matching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
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
from ..family_noise_levels import LOGIT_NORMAL, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, get_downscale_factor, read_required
from ..shared_facts import T5_TOKENIZER, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

LTX_MAX_SEQUENCE_LENGTH = 128
"""Tokens of the prompt, which the text encoder always gets padded to as many, as in diffusers' pipeline."""
FRAME_STRIDE = 8
"""Frames per latent frame of the VAE."""
FRAME_RATE = 25.0
"""Frames per second, by which the transformer's positions count the time; the default of diffusers' pipeline."""


def match_ltx_video(read: ConfigReader) -> FamilyMatch:
    """Check an LTX-Video of any version."""
    config = read_required(read, "transformer/config.json")
    patch_size = int(config.get("patch_size", 1))
    if patch_size != 1 or config.get("patch_size_t", 1) != 1:
        raise ModelError(f"its transformer has patches of {patch_size} x {patch_size} latents instead of single ones")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks", patch_size)


OUTER_NAMES = {"proj_in": "patchify_proj", "time_embed": "adaln_single"}
"""The original names of modules outside of the blocks; the layers of the blocks have the same names there."""


def rename_outer_modules(names: Mapping[str, str], modules: Iterable[str]) -> Mapping[str, str]:
    """Map modules to names in which the first part is another one."""
    parts = {module: module.partition(".") for module in modules}
    return {module: names.get(first, first) + dot + rest for module, (first, dot, rest) in parts.items()}


LTX_KEYS = KeyStyle(
    "ltx_video",
    rename=partial(rename_outer_modules, OUTER_NAMES),
    is_read_by_diffusers=False,
    has_original_names_in_diffusers=True,
)

FACTS = FamilyFacts(
    title="LTX-Video",
    pipeline=PipelineFacts(
        class_name="LTXPipeline",
        kind="video",
        num_parameters=1_923_385_472,
        hub_id="Lightricks/LTX-Video",
        frames=FrameRule(stride=FRAME_STRIDE, fps=FRAME_RATE),
    ),
    # Files of other trainers are not imported: they name single files of versions that are not here.
    detection=DetectionFacts(match_configs=match_ltx_video),
    lora=FamilyLora(
        # The linear layers of the blocks.
        targets=(
            *(f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v")),
            *("attn1.to_out.0", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2"),
        ),
        targets_of="diffusion-pipe",
        key_style=LTX_KEYS,
        format="diffusers",
        modelspec_architecture="ltxv",
        modelspec_implementation="https://github.com/Lightricks/LTX-Video",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states",),
        token_args={"image_rotary_emb": ((1, ("hidden_states",)),) * 2},
        text_attention_calls=(1,),
        text_attention_layers=("attn2.to_k", "attn2.to_v"),
        head_args={"image_rotary_emb": 2},
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": T5_TOKENIZER},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        reason="by the number of latents, as Lightricks' own trainer draws them",
        other_trainers={"diffusion-pipe": LOGIT_NORMAL},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=3.0, image_size=(704, 480)),
    options=FamilyOptions(components={"vae": "vae", "t5xxl": "text_encoder"}),
    notes="0.9.0 and 0.9.1; diffusers folders",
)


class LTXVideo(Family):
    facts = FACTS
    max_tokens = LTX_MAX_SEQUENCE_LENGTH

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("ltx_video", "ltxv")

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        pipe.vae_spatial_compression_ratio = get_downscale_factor(read_required(read, "vae/config.json"))

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config, patch_size=1)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            embeds, mask = pipe._get_t5_prompt_embeds(
                list(prompts), max_sequence_length=self.max_tokens, device=pipe.text_encoder.device
            )
        return {"embeds": text_encoding.drop_padding(embeds, mask)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        width = pipe.transformer.config.caption_channels
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, prompts, width, self.max_tokens)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        # One token is that of the end.
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, self.max_tokens - 1)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_clip_moments

        return encode_clip_moments(pipe.vae, as_clips(pixels))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_clip_latents

        # The decoder of 0.9.1 and later gets a noise level: none, as in the pipeline.
        timestep = latents.new_zeros(len(latents)) if pipe.vae.config.timestep_conditioning else None
        return decode_clip_latents(pipe.vae, latents, timestep)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        ratio = pipe.vae_spatial_compression_ratio
        sides = height // ratio, width // ratio
        num_frames = latents.shape[1] // (sides[0] * sides[1])
        return self.decode_latents(pipe, pipe._unpack_latents(latents, num_frames, *sides))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        num_frames, height, width = noisy_latents.shape[2:]
        pixels_per_latent = pipe.vae_spatial_compression_ratio
        predicted: Tensor = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents),
            encoder_hidden_states=embeds,
            timestep=timesteps,
            encoder_attention_mask=mask,
            num_frames=num_frames,
            height=height,
            width=width,
            rope_interpolation_scale=(FRAME_STRIDE / FRAME_RATE, pixels_per_latent, pixels_per_latent),
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, num_frames, height, width)
        return unpacked

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        # The pipeline needs both texts to have one length.
        embeds, mask = pad_text_embeds([*cond["embeds"], *negative_cond["embeds"]], self.max_tokens)
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=embeds[:1],
            prompt_attention_mask=mask[:1],
            negative_prompt_embeds=embeds[1:],
            negative_prompt_attention_mask=mask[1:],
        )
