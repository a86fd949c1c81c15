"""Kandinsky 6 video: frames and sound in one transformer, from text or the first frame; trained on frames or both.

A given first frame is one more latent frame after those that are predicted, at the position of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_ONLY_KEYS
from ...config.schema import ModelConfig
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
from ...problems import Problem
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
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import CLIP_L_TOKENIZER, match_flow_model, require_newer_diffusers
from ..trained_sound import SILENT_STEPS, TrainedSound
from .kandinsky5_image import MAX_SIDE_POSITIONS, rename_channels

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...dataset.clip_encoding import SoundTrack

MAX_TOKENS = 1024
"""Maximum tokens of the prompt with the end of its template, as in diffusers' pipeline."""
FRAME_RATE = 24.0
SAMPLE_RATE, LATENT_SAMPLES, SOUND_CHANNELS = 44_100, 1024, 40
"""Samples of sound per second, those of one latent, and the channels of a latent."""
ATTENTION_LAYERS = ("to_query", "to_key", "to_value", "out_layer")


def list_targets(stream: str) -> tuple[str, ...]:
    """List the linear layers of the blocks of a stream, ``video`` or ``audio``, and of its text, without modulation."""
    text, block = f"{stream}_text_transformer_blocks.*", f"{stream}_dec_block"
    attentions = (f"{text}.attn", f"{block}.self_attention", f"{block}.cross_attention")
    layers = (f"{name}.{layer}" for name in attentions for layer in ATTENTION_LAYERS)
    return (*layers, *(f"{name}.feed_forward.net.{layer}" for name in (text, block) for layer in ("0.proj", "2")))


def _match_kandinsky6_video(read: ConfigReader) -> FamilyMatch:
    require_newer_diffusers()
    config = read_required(read, "transformer/config.json")
    if config.get("out_visual_dim") != config.get("in_visual_dim"):
        raise ModelError("it is distilled: its transformer predicts several velocities at once; use its base model")
    if not config.get("visual_cond", True):
        raise ModelError("its transformer has no input for the mask of a first frame; it is no published Kandinsky 6")
    reason = f"the transformer has {config.get('num_visual_blocks')} blocks of frames and sound"
    match = match_flow_model(rename_channels(read, config), 1, reason)
    return replace(match, max_side=MAX_SIDE_POSITIONS * match.size_multiple)


def _validate_options(read: ConfigReader, options: ModelConfig) -> Iterator[Problem]:
    if (
        options.image_to_video
        and read_required(read, "transformer/config.json").get("visual_token_type_num_embeddings", 0) < 2
    ):
        yield Problem(
            "image_to_video", "this Kandinsky 6 makes clips from text alone", "use one from images, or remove it"
        )


FACTS = FamilyFacts(
    title="Kandinsky 6 video",
    pipeline=PipelineFacts(
        class_name="Kandinsky6TI2VAPipeline",
        kind="video",
        num_parameters=30_136_326_248,
        hub_id="kandinskylab/Kandinsky-6.0-Lite-5s-Diffusers",
        frames=FrameRule(stride=4, fps=FRAME_RATE),
    ),
    detection=DetectionFacts(match_configs=_match_kandinsky6_video),
    lora=FamilyLora(
        # Every linear layer of the blocks of text and frames but those of modulation.
        targets=list_targets("video"),
        key_style=DIFFUSERS_ONLY_KEYS,
        format="diffusers",
        modelspec_architecture="kandinsky-6-video",
        modelspec_implementation="https://github.com/kandinskylab/kandinsky-6",
    ),
    blocks=BlockFacts(
        # The few blocks before them pass on the text.
        lists=("visual_transformer_blocks",),
        activation_args=("vis", "aud"),
        unsharded_args=("aud",),
        token_args={"vis_rope": ((0, ("vis",)),)},
        text_attention_calls=(1,),
        text_attention_layers=("cross_attention.to_key", "cross_attention.to_value"),
        unsupported_strategies={
            "pp": "the blocks of Kandinsky 6 pass on sound beside frames, and there is none without train_audio",
        },
        attention_modes=(),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer_repo_ids={"tokenizer": "Qwen/Qwen2.5-VL-7B-Instruct", "tokenizer_2": CLIP_L_TOKENIZER},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(3.0),
        reason="as Kandinsky 5, less than the 5 of its pipeline, since no trainer's guide has another",
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0, image_size=(864, 480)),
    options=FamilyOptions(
        components={"vae": "vae", "text_encoder": "text_encoder", "clip_l": "text_encoder_2"},
        extra=("image_to_video", "train_audio"),
        validate=_validate_options,
    ),
    notes="Lite (3B) and Pro (29B), 5 s; from text, or from the first frame (`--image_to_video`); with sound "
    "(`--train_audio`); diffusers folders; LoRA in diffusers: `transformer.load_lora_adapter`",
)


class Kandinsky6Video(Family):
    """The transformer leaves out all that belongs to sound where it gets none, as in its pipeline."""

    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("kandinsky6_video", "kandinsky-6-video")

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Return the layers of sound and between sound and frames, and the table of kinds of frames."""
        names = [name for name, _ in denoiser.named_modules()]
        return tuple(name for name in names if _belongs_to_sound(name) or name == "visual_token_type_embeddings")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from .. import text_encoding

        (template, start), rows, pooled = _get_template(), list[Any](), list[Any]()
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer_2):
            for prompt in prompts:  # one at a time, without the padding that the pipeline masks
                ids = pipe.tokenizer.tokenizer(template.format(prompt), truncation=False, verbose=False).input_ids
                states, clip, _ = pipe._get_prompt_embeds(
                    [prompt],
                    *(pipe.tokenizer, pipe.text_encoder, pipe.tokenizer_2, pipe.text_encoder_2),
                    max_sequence_length=min(len(ids) - start, MAX_TOKENS),
                    device=pipe.text_encoder.device,
                )
                rows.append(states[0])
                pooled.append(clip)
        return {"embeds": rows, "pooled": torch.cat(pooled)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from .. import text_encoding

        config, (template, start) = pipe.transformer.config, _get_template()
        texts = [template.format(prompt) for prompt in prompts]
        embeds = text_encoding.build_meta_text_embeds(
            pipe.tokenizer.tokenizer, texts, config.in_text_dim, MAX_TOKENS, start
        )
        return {"embeds": embeds, "pooled": torch.empty(len(prompts), config.in_text_dim2, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        template, start = _get_template()
        texts = {template.format(prompt): prompt for prompt in prompts}
        found = text_encoding.find_truncated_prompts(pipe.tokenizer.tokenizer, list(texts), MAX_TOKENS + start)
        return [texts[text] for text in found]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_vae_moments

        return encode_vae_moments(pipe.vae, as_clips(pixels), applies_shift=False)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_vae_latents

        return decode_vae_latents(pipe.vae, latents, applies_shift=False)

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
        reference: Tensor | None = None,
    ) -> Tensor:
        """Run the denoiser, with the latents of a given first frame after those of the clip."""
        import torch
        from torch.nn.functional import pad

        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        is_unpadded = all(len(row) == embeds.shape[1] for row in batch.cond["embeds"])
        num_frames, options = latents.shape[2], dict[str, Any]()
        given = latents if reference is None else torch.cat([latents, reference.to(latents)], dim=2)
        # The latents of a condition, which no published model gets, and the mask of frames that are given.
        states = pad(given.permute(0, 2, 3, 4, 1), (0, latents.shape[1] + 1))
        if reference is not None:
            states[:, num_frames:, ..., -1] = 1
            options = _build_reference_options(states, pipe.transformer.config.patch_size)
        predicted: Tensor = denoiser(
            hidden_states=states,
            audio_hidden_states=None if batch.noisy_sound is None else batch.noisy_sound.to(latents.dtype),
            encoder_hidden_states=embeds,
            pooled_projections=batch.cond["pooled"],
            timestep=timesteps,
            encoder_attention_mask=None if is_unpadded else mask.bool()[:, None, None],
            return_dict=False,
            **options,
        )[0]
        return predicted[:, :num_frames].permute(0, 4, 1, 2, 3)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"guidance_scale": self.facts.sampling.get_guidance_scale(prompt.cfg_scale)}
        for prefix, each in (("", cond), ("negative_", negative_cond)):
            kwargs[f"{prefix}prompt_embeds"] = each["embeds"][0].unsqueeze(0)
            kwargs[f"{prefix}pooled_prompt_embeds"] = each["pooled"]
        has_sound = bool(self.facts.pipeline.frames and self.facts.pipeline.frames.sound_rate)
        return {**kwargs, "frame_rate": FRAME_RATE, "sample_audio": has_sound}


def _build_reference_options(states: Tensor, patch_size: Sequence[int]) -> dict[str, Any]:
    """Build the positions and kinds of frames (B, frames, height, width, channels) of which the last is given."""
    import torch

    positions = [
        torch.arange(length // patch, device=states.device)
        for length, patch in zip(states.shape[1:4], patch_size, strict=True)
    ]
    positions[0] = torch.cat([positions[0][:-1], positions[0][:1]])  # that of the first frame
    kinds = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    kinds[:, -1] = 1
    return {"visual_rope_pos": tuple(positions), "visual_token_type_ids": kinds}


def _belongs_to_sound(name: str) -> bool:
    """Whether a module is of the stream of sound or between the streams: ``audio_dec_block``, ``va_modulation`` ..."""
    return any(part.startswith(("audio_", "va_", "av_")) for part in name.split("."))


def _get_template() -> tuple[str, int]:
    """Return the text around every prompt, and the number of its tokens before the prompt."""
    from diffusers.pipelines.kandinsky6 import pipeline_kandinsky6_ti2va

    return pipeline_kandinsky6_ti2va._PROMPT_TEMPLATE, pipeline_kandinsky6_ti2va._QWEN_CROP_START


IMAGE_FACTS = replace(
    FACTS,
    title="Kandinsky 6 video from images",
    sampling=replace(FACTS.sampling, frame_images=("image_path",)),
)


class Kandinsky6VideoFromImage(Kandinsky6Video):
    """The model with the first frame of each clip given; an image is trained as from text."""

    facts = IMAGE_FACTS

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """The latents of the first frame alone: the VAE normalizes groups of channels over all frames of a clip."""
        from ..vae import as_clips

        return {"first": self.encode_moments(pipe, as_clips(pixels)[:, :, :1]).mean_and_std[:, 0]}

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        reference = None if noisy_latents.shape[2] == 1 else batch.frame_cond["first"]
        return self.predict_clips(pipe, denoiser, noisy_latents, timesteps, batch, reference=reference)


def _add_sound(facts: FamilyFacts) -> FamilyFacts:
    """The facts of the model trained with sound: its layers get a LoRA, too, and its decoder is loaded for previews."""
    pipeline, blocks, rule = facts.pipeline, facts.blocks, facts.pipeline.frames or FrameRule()
    rate, between = SAMPLE_RATE / LATENT_SAMPLES, ("va_cross_attention", "av_cross_attention")
    targets = (*list_targets("audio"), *(f"{name}.{layer}" for name in between for layer in ATTENTION_LAYERS))
    refused = dict.fromkeys(("tp", "pp", "cp", "compile", "cuda_graphs", "deepspeed"), SILENT_STEPS)
    return replace(
        facts,
        title=f"{facts.title} with sound",
        pipeline=replace(
            pipeline,
            frames=replace(rule, sound_rate=rate, sound_channels=SOUND_CHANNELS, rounds_sound_up=True),
            frame_encoders=("audio_vae", "vocoder"),
        ),
        lora=replace(facts.lora, targets=(*facts.lora.targets, *targets)),
        blocks=replace(blocks, unsupported_strategies={**blocks.unsupported_strategies, **refused}),
    )


class _WithSound(TrainedSound, Kandinsky6Video):
    """The methods of the model trained with sound; the class stands before that of the model without."""

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        unused = super(TrainedSound, self).get_unused_layers(denoiser)
        return tuple(name for name in unused if not _belongs_to_sound(name))

    def encode_sound(self, pipe: Any, samples: Tensor, rate: int, num_frames: int) -> Tensor:
        from ..sound import encode_mmaudio_latents, resample

        rule, own_rate = self.facts.pipeline.frames or FrameRule(), pipe.audio_vae.config.sample_rate
        own = resample(samples, rate, own_rate)[:, own_rate:]
        return encode_mmaudio_latents(pipe.audio_vae, own, rule.count_sound_latents(num_frames))

    def decode_sampled_sound(self, pipe: Any, output: Any) -> SoundTrack:
        from ...dataset.clip_encoding import SoundTrack
        from ..sound import decode_mmaudio_latents

        samples = decode_mmaudio_latents(pipe.audio_vae, pipe.vocoder, output.audio)
        return SoundTrack(samples[0].cpu().numpy(), pipe.audio_vae.config.sample_rate)


class Kandinsky6VideoWithSound(_WithSound, Kandinsky6Video):
    """The model trained on clips with their sound."""

    facts = _add_sound(FACTS)


class Kandinsky6VideoFromImageWithSound(_WithSound, Kandinsky6VideoFromImage):
    """The model with the first frame of each clip given, and trained with their sound."""

    facts = _add_sound(IMAGE_FACTS)
