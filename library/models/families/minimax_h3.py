"""MiniMax H3: text, sound and pictures in one sequence of tokens, trained on pictures or on both; text of Qwen3-VL.

Clips without sound, and all clips without ``train_audio``, have no tokens of sound, as in SimpleTuner and
diffusion-pipe.  Sound has noise levels of its own, which follow from those of the frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle, OriginalModule
from ...adapters.token_layout import OTHER_TOKENS, TokenLayout
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
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
    TrainerNames,
)
from ..family_noise_levels import LOGIT_NORMAL, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, get_downscale_factor, read_required
from ..shared_facts import MASKED_ATTENTION_MODES
from .minimax_h3_denoiser import TEXT_MASK

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...dataset.clip_encoding import SoundTrack
    from ...diffusion.process import NoiseProcess

FRAMES = FrameRule(stride=17, fps=24.0, shortest=22, latents_per_stride=5, shortest_latents=7)
"""The autoencoder makes five latent frames of 17 and drops the last three; it decodes no fewer than seven."""
LATENTS_PER_SECOND, STEREO = 40.0, 2
"""Latents per second of the left and of the right side of sound."""
CHANNELS_PER_SIDE = 32
"""The channels of a latent of sound."""
FRAME_SHIFT = 12.0
"""The shift of noise levels of frames in diffusers' pipeline, by which those of sound follow from them."""


def _match_minimax_h3(read: ConfigReader) -> FamilyMatch:
    config, vae = read_required(read, "transformer/config.json"), read_required(read, "vae/config.json")
    channels, latent_channels = config.get("in_channels", 24), vae.get("latent_channels", 24)
    if channels != latent_channels:
        raise ModelError(f"its transformer has {channels} input channels, and its VAE {latent_channels}")
    length, drop = vae.get("clip_length", 17), vae.get("token_drop", 3)
    if (length, drop) != (17, 3):
        raise ModelError(f"its VAE encodes {length} frames at once and drops {drop} latents; that of H3 17 and 3")
    patch = config.get("patch_size", [1, 2, 2])
    if patch[0] != 1 or patch[1] != patch[2]:
        raise ModelError(f"its transformer has patches of {patch} latents")
    reason = f"the transformer has {config.get('num_layers', 50)} blocks of MiniMax H3"
    return FamilyMatch(reason, get_downscale_factor(vae) * patch[1], "flow")


MINIMAX_H3_KEYS = KeyStyle(
    "minimax_h3",
    (
        OriginalModule(
            "blocks.{}.attn.qkv_proj",
            tuple(f"transformer_blocks.{{}}.attn.{name}" for name in ("to_q", "to_k", "to_v")),
            output_ratios=(4, 4, 4),  # the heads are wider than the model
            input_ratio=3,
        ),
        OriginalModule("blocks.{}.attn.out_proj", ("transformer_blocks.{}.attn.to_out.0",)),
        OriginalModule("blocks.{}.mlp.fc1", ("transformer_blocks.{}.ff.net.0.proj",), swaps_halves=True),
        OriginalModule("blocks.{}.mlp.fc2", ("transformer_blocks.{}.ff.net.2",)),
        OriginalModule("blocks.{}.adaln_proj.linear", ("transformer_blocks.{}.adaln_proj.linear",)),
    ),
    unread_in_comfyui={"diffusers": "loads nothing of this layout"},
)

FACTS = FamilyFacts(
    title="MiniMax H3",
    pipeline=PipelineFacts(
        class_name="MiniMaxH3ModularPipeline",
        kind="video",
        num_parameters=33_122_992_896,
        hub_id="MiniMaxAI/MiniMax-H3",
        frames=FRAMES,
    ),
    detection=DetectionFacts(
        match_configs=_match_minimax_h3,
        # Files of ai-toolkit and diffusion-pipe name single files, most of them pruned.
        trainer_names=TrainerNames(
            ai_toolkit=("minimax_h3",),
            simpletuner=("minimaxh3",),
            simpletuner_flavours={"fl2va": "MiniMaxAI/MiniMax-H3"},
            simpletuner_default="fl2va",
        ),
    ),
    lora=FamilyLora(
        # The linear layers of the blocks but their modulation, which pruned models have in another size.
        targets=tuple(
            f"transformer_blocks.*.{layer}"
            for layer in ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
        ),
        optional_targets=("adaln_proj.linear",),
        key_style=MINIMAX_H3_KEYS,
        format="comfy",
        modelspec_architecture="minimax-h3",
        modelspec_implementation="https://huggingface.co/MiniMaxAI/MiniMax-H3",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states",),
        token_args={
            "adaln_indices": ((0, ("hidden_states",)),),
            "rotary_emb": ((0, ("hidden_states",)),) * 2,
        },
        token_layouts={
            r"^transformer_blocks\.": TokenLayout(
                is_padded_before=True, segments=("encoder_hidden_states", OTHER_TOKENS)
            ),
        },
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "MiniMaxAI/MiniMax-H3:tokenizer"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="sigma",
        shift=FixedShift(7.0),
        reason="uniform with a shift of 7, near the 8 of diffusion-pipe's example; the pipeline's 12 is for sampling",
        other_trainers={"diffusion-pipe": LOGIT_NORMAL},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=1.0, image_size=(1344, 768)),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}, extra=("train_audio",)),
    notes="33B, from text; with sound (`--train_audio`); diffusers folders",
)


class MiniMaxH3(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        from .minimax_h3_pipeline import build_h3_pipeline_class

        return build_h3_pipeline_class(self.facts.components)

    @classmethod
    def prepare_denoiser(cls, denoiser: nn.Module) -> None:
        from .minimax_h3_denoiser import prepare_for_batches

        prepare_for_batches(denoiser)

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        settings = read("audio_scheduler/scheduler_config.json")
        if settings is not None:
            pipe.audio_scheduler = type(pipe.audio_scheduler).from_config(settings)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("minimax_h3", "minimax-h3")

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        return ("audio_proj_in", "audio_proj_out")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return replace(FlowMatchingProcess.from_scheduler(pipe.scheduler.config), velocity_sign=-1)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .minimax_h3_pipeline import encode_h3_text

        return {"embeds": [encode_h3_text(pipe, prompt)[0] for prompt in prompts]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        width = pipe.transformer.config.text_dim
        input_ids = pipe.tokenizer(list(prompts), add_special_tokens=False, truncation=False, verbose=False).input_ids
        return {"embeds": [torch.empty(max(1, len(ids)), width, device="meta") for ids in input_ids]}

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_clip_moments

        clips = as_clips(pixels)
        mean, std = _get_pixel_statistics(pipe, clips)
        return encode_clip_moments(pipe.vae, (clips / 2 + 0.5 - mean) / std)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_clip_latents

        # The decoder needs the latent frames of the shortest clip: those of an image are repeated.
        is_image = latents.shape[2] == 1
        repeats = FRAMES.shortest_latents if is_image else 1
        pixels = decode_clip_latents(pipe.vae, latents.repeat(1, 1, repeats, 1, 1))
        mean, std = _get_pixel_statistics(pipe, pixels)
        pixels = (pixels * std + mean) * 2 - 1
        return pixels[:, :, :1] if is_image else pixels

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        return self.predict_with_sound(pipe, denoiser, noisy_latents, timesteps, batch)[0]

    def predict_with_sound(
        self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        import torch
        from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

        embeds, mask = _pad_texts_before(batch.cond["embeds"], batch.text_pad_multiple)
        count, sound = len(noisy_latents), batch.noisy_sound
        levels = [timesteps] if sound is None else [timesteps, self.convert_to_sound_timesteps(timesteps)]
        sequence = _describe_sequence(pipe, embeds.shape[1], noisy_latents, 0 if sound is None else sound.shape[1])
        rows: Tensor = patchify_video_latents(noisy_latents, pipe.patch_size)
        sound_channels = pipe.transformer.config.audio_in_channels
        sound_rows = noisy_latents.new_zeros(count, 0, sound_channels) if sound is None else _pack_sound(sound)
        frames, sounds = denoiser(
            hidden_states=rows.view(count, -1, rows.shape[-1]),
            audio_hidden_states=sound_rows,
            encoder_hidden_states=embeds,
            timestep=1 - torch.stack(levels, dim=1) / 1000,
            return_dict=False,
            **sequence,
            **({} if mask is None else {TEXT_MASK: mask}),
        )
        # The model's velocity runs from noise to data, as its times do.
        velocity = -_unpack_frames(frames, noisy_latents, pipe.patch_size)
        return velocity, None if sound is None else -_unpack_sound(sounds)

    def convert_to_sound_timesteps(self, timesteps: Tensor) -> Tensor:
        """Convert the noise levels of frames, whose shift is 12 in the pipeline, to those with the shift of sound."""
        from ...diffusion.process import apply_shift
        from .minimax_h3_pipeline import SOUND_SHIFT

        return apply_shift(apply_shift(timesteps / 1000, 1 / FRAME_SHIFT), SOUND_SHIFT) * 1000

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=cond["embeds"][0].unsqueeze(0),
            negative_prompt_embeds=negative_cond["embeds"][0].unsqueeze(0),
        )

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Give the pipeline a processor for pixels in -1..1, which decoded latents are here."""
        from diffusers.video_processor import VideoProcessor

        sampling_pipe.video_processor = VideoProcessor(vae_scale_factor=sampling_pipe.vae_spatial_compression_ratio)
        return sampling_pipe

    def generate_frames(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> list[Image]:
        return self.generate_clip(pipe, prompt, cond, negative_cond, generator=generator, sampler=sampler)[0]

    def generate_clip(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> tuple[list[Image], SoundTrack | None]:
        """Sample a clip; an image is the first frame of the shortest one."""
        from ..sampling import sample_clip

        sampling_kwargs = self.build_prompt_kwargs(pipe, prompt, cond, negative_cond)
        frames, sound = sample_clip(self, pipe, prompt, sampling_kwargs, generator=generator, sampler=sampler)
        return (frames[:1], None) if (prompt.num_frames or 1) == 1 else (frames, sound)


class MiniMaxH3WithSound(MiniMaxH3):
    """The model trained on clips with their sound."""

    facts = replace(
        FACTS,
        title="MiniMax H3 with sound",
        pipeline=replace(
            FACTS.pipeline,
            frames=replace(FRAMES, sound_rate=LATENTS_PER_SECOND, sound_channels=STEREO * CHANNELS_PER_SIDE),
            frame_encoders=("audio_vae",),
        ),
    )

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        return ()

    def encode_sound(self, pipe: Any, samples: Tensor, rate: int, num_frames: int) -> Tensor:
        import torch

        from ..sound import resample
        from ..vae import disable_autocast

        vae, rule = pipe.audio_vae, self.facts.pipeline.frames or FRAMES
        own_rate, count = vae.config.sampling_rate, rule.count_sound_latents(num_frames)
        own = resample(samples, rate, own_rate)[:, own_rate : own_rate + count * vae.hop_length]
        with torch.no_grad(), disable_autocast(vae):
            latents = vae.encode(own.unsqueeze(1).to(vae.device, vae.dtype)).latent_dist.mode()
        mean, std = (latents.new_tensor(values).view(1, -1, 1) for values in _get_sound_statistics(vae))
        normalized: Tensor = (latents - mean) / std
        return normalized.permute(2, 0, 1).flatten(1)  # (latents, channels): left, then right

    def decode_sampled_sound(self, pipe: Any, output: Any) -> SoundTrack | None:
        from ...dataset.clip_encoding import SoundTrack
        from ..vae import disable_autocast

        vae = pipe.audio_vae
        if vae is None:
            return None
        latents = output.audio.to(vae.device, vae.dtype)
        mean, std = (latents.new_tensor(values).view(1, -1, 1) for values in _get_sound_statistics(vae))
        with disable_autocast(vae):
            samples = vae.decode(latents * std + mean, return_dict=False)[0]
        return SoundTrack(samples[:, 0].float().cpu().numpy(), vae.config.sampling_rate)


def _get_pixel_statistics(pipe: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel of pixels in 0..1, as the autoencoder has them."""
    import torch

    from ..constant_copies import copy_constant

    values = (torch.tensor(each, dtype=like.dtype).view(1, -1, 1, 1, 1) for each in (pipe.pixel_mean, pipe.pixel_std))
    mean, std = (copy_constant(each, like.device) for each in values)
    return mean, std


def _get_sound_statistics(vae: Any) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean and deviation of each channel of the latents of sound."""
    config = vae.config
    return config.latents_mean or (0.0,) * config.latent_channels, config.latents_std or (1.0,) * config.latent_channels


def _pad_texts_before(texts: Tensor | Sequence[Tensor], multiple: int) -> tuple[Tensor, Tensor | None]:
    """Pad texts before their first token: (B, tokens, width), and the mask; None if none is padded."""
    from ..text_encoding import pad_text_embeds

    embeds, mask = pad_text_embeds([text.flip(0) for text in texts], multiple)
    is_padded = any(len(text) != embeds.shape[1] for text in texts)
    return embeds.flip(1), mask.flip(1) if is_padded else None


def _describe_sequence(pipe: Any, num_texts: int, latents: Tensor, num_sounds: int) -> dict[str, Tensor]:
    """Describe the tokens as the pipeline does: kinds and positions, noise levels, and where each modality is.

    What does not depend on the length of the text is copied to the device once.
    """
    import torch
    from diffusers.modular_pipelines.minimax_h3 import before_denoise
    from diffusers.utils.torch_utils import maybe_adjust_dtype_for_device

    from ..constant_copies import copy_constant

    step: Any = before_denoise.MiniMaxH3PrepareLayoutStep
    num_frames, height, width = latents.shape[2:]
    device = latents.device
    positions, tags, frames, sounds, *_ = step.build_packed_sequence(
        text_token_tags=torch.zeros(0, dtype=torch.long),
        num_latent_frames=num_frames,
        latent_height=height,
        latent_width=width,
        num_audio_latents=num_sounds,
        patch_size=pipe.patch_size,
        audio_channels=pipe.audio_channels,
        audio_tag=pipe.audio_tag,
        video_tag=pipe.video_tag,
    )
    levels = torch.zeros_like(tags)
    levels[sounds] = 1  # the second of each sample
    positions = positions.to(maybe_adjust_dtype_for_device(positions.dtype, device))
    positions, tags, levels, frames, sounds = (
        copy_constant(each, device) for each in (positions, tags, levels, frames, sounds)
    )
    texts = torch.arange(num_texts, device=device)
    times, *places = positions.unbind(1)
    return {
        "timestep_indices": torch.cat([torch.zeros_like(texts), levels]),
        "token_tags": torch.cat([torch.full_like(texts, pipe.text_tag), tags]),
        "position_ids": torch.stack(
            [  # the time of a clip begins where its text ends
                torch.cat([texts.to(times), times + num_texts]),
                *(torch.cat([torch.zeros_like(texts).to(each), each]) for each in places),
            ],
            dim=1,
        ),
        "video_indices": frames + num_texts,
        "audio_indices": sounds + num_texts,
        "text_indices": texts,
    }


def _unpack_frames(rows: Tensor, latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Bring the tokens of frames into the shape of latents (B, C, F, H, W)."""
    count, channels, *sides = latents.shape
    grid = (side // step for side, step in zip(sides, patch, strict=True))
    return rows.view(count, *grid, channels, *patch).permute((0, 4, 1, 5, 2, 6, 3, 7)).reshape(latents.shape)


def _pack_sound(sound: Tensor) -> Tensor:
    """Bring latents of sound (B, latents, left and right) into tokens: those of the left channel, then of the right."""
    return sound.view(*sound.shape[:2], STEREO, -1).transpose(1, 2).flatten(1, 2)


def _unpack_sound(rows: Tensor) -> Tensor:
    """Invert ``_pack_sound``."""
    return rows.view(len(rows), STEREO, -1, rows.shape[2]).transpose(1, 2).flatten(2)
