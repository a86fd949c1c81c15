"""LTX-2 and LTX-2.3: pictures and sound in one transformer, trained on pictures or on both; text of Gemma 3.

Without sound, the authors' own trainer leaves out the attention between the streams; so does ``predict``, which gives
the stream of sound one empty token.  What that stream makes of it reaches neither the prediction nor a gradient.
With sound, both streams have the same noise level, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import DynamicShift
from ..base import BaseModelInfo
from ..clean_first_frame import CleanFirstFrame
from ..facts import (
    BlockFacts,
    FamilyFacts,
    FamilyMatch,
    FamilyOptions,
    PipelineFacts,
    SamplingFacts,
    TextFacts,
    TrainerNames,
)
from ..family_noise_levels import LOGIT_NORMAL, WEIGHTED, TrainingNoiseFacts
from ..model_configs import CONNECTOR_TOKENS, ConfigReader, ModelError, get_downscale_factor, read_required
from ..trained_sound import SILENT_STEPS, TrainedSound
from .ltx_video import FACTS as LTX_FACTS
from .ltx_video import FRAME_STRIDE, OUTER_NAMES, LTXVideo, match_ltx_video, rename_outer_modules

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt
    from ...dataset.clip_encoding import SoundTrack

FRAME_RATE = 24.0
"""Frames per second, by which the transformer's positions count the time; the default of diffusers' pipeline."""
GUIDED_BLOCKS = {False: 29, True: 28}
"""The block without whose attention a preview is guided, of LTX-2 and of LTX-2.3, as the authors recommend."""
_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
SOUND_CHANNELS, SOUND_BANDS = 8, 16
"""Channels of the latents of sound, and bands of each, which are the channels of a token."""
SOUND_RATE = 25.0
"""Latents of sound per second: 16000 samples, in spectrograms of 100 frames, of which a latent has four."""


def _match_ltx2(read: ConfigReader) -> FamilyMatch:
    """Check an LTX-2 or LTX-2.3."""
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    encoder = (index.get("text_encoder") or ["", ""])[1]
    if encoder != "Gemma3ForConditionalGeneration" or not config.get("use_prompt_adaln_single", True):
        raise ModelError("it is LTX-2.5 or later; LTX-2 and LTX-2.3 can be trained, whose text encoder is Gemma 3")
    if config.get("rope_type", "interleaved") != "split":
        raise ModelError("its transformer has interleaved rotary positions; those of LTX-2 and LTX-2.3 are split")
    connectors = read_required(read, "connectors/config.json")
    if not connectors.get("video_connector_num_learnable_registers", 128):
        raise ModelError("its connectors have no learnable registers; those of LTX-2 and LTX-2.3 pad texts with them")
    match = match_ltx_video(read)
    return replace(match, reason=f"{match.reason} of {'LTX-2.3' if _is_version_2_3(config) else 'LTX-2'}")


def _is_version_2_3(transformer_config: Any) -> bool:
    """Whether the transformer is that of LTX-2.3, whose attention to the text depends on the noise level."""
    return bool(transformer_config.get("cross_attn_mod"))


LTX2_KEYS = KeyStyle(
    "ltx2",
    rename=partial(
        rename_outer_modules,
        {
            **OUTER_NAMES,
            **{f"audio_{name}": f"audio_{original}" for name, original in OUTER_NAMES.items()},
            "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
            "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
            "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
            "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
            "prompt_adaln": "prompt_adaln_single",
            "audio_prompt_adaln": "audio_prompt_adaln_single",
        },
    ),
    is_read_by_diffusers=False,
    has_original_names_in_diffusers=True,
)

_SOUND_TOKEN_LAYERS = (
    *(f"{attention}.{name}" for attention in ("audio_attn1", "audio_attn2") for name in _PROJECTIONS),
    *("audio_to_video_attn.to_k", "audio_to_video_attn.to_v", "video_to_audio_attn.to_q"),
    *("video_to_audio_attn.to_out.0", "audio_ff.net.0.proj", "audio_ff.net.2"),
)
"""The layers that see the tokens of sound, which context parallelism leaves whole on every rank."""

FACTS = replace(
    LTX_FACTS,
    title="LTX-2",
    pipeline=PipelineFacts(
        class_name="LTX2Pipeline",
        kind="video",
        num_parameters=18_988_838_144,
        hub_id="Lightricks/LTX-2",
        frames=FrameRule(stride=FRAME_STRIDE, fps=FRAME_RATE),
    ),
    detection=replace(
        LTX_FACTS.detection,
        match_configs=_match_ltx2,
        trainer_names=TrainerNames(ai_toolkit=("ltx2",)),  # all others name single files
    ),
    lora=replace(
        LTX_FACTS.lora,
        # The linear layers of LTX-Video's blocks, which are those of the stream of pictures.
        targets_of="",
        key_style=LTX2_KEYS,
        modelspec_architecture="ltx-2",
        modelspec_implementation="https://github.com/Lightricks/LTX-2",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states", "audio_hidden_states"),
        unsharded_args=("audio_hidden_states",),
        sound_args=("audio_hidden_states",),
        # Positions of the pictures' tokens, and their times, of which there is one where no frame is given.
        token_args={
            **dict.fromkeys(("video_rotary_emb", "ca_video_rotary_emb"), ((2, ("hidden_states",)),) * 2),
            **dict.fromkeys(("temb", "temb_ca_scale_shift", "temb_ca_gate"), ((1, ("hidden_states",)),)),
        },
        head_args={"query_rotary_emb": 1, "key_rotary_emb": 1},
        # Of sound to itself, of pictures and of sound to the text, and of pictures to sound.
        text_attention_calls=(1, 2, 3, 4),
        text_attention_layers=("attn2.to_k", "attn2.to_v", *_SOUND_TOKEN_LAYERS),
        gathered_attention_calls=(5,),  # of sound to pictures
        skipped_attention_calls={"all_perturbed": (0, 1)},
        fused_layers={r"\.to_gate_logits$": ("colwise", (1,))},
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "connectors"),
        tokenizer_repo_ids={"tokenizer": "Lightricks/LTX-2:tokenizer"},
    ),
    training_noise=TrainingNoiseFacts(
        shift=DynamicShift((1024, 0.95), (4096, 2.05)),
        reason="by the number of latents, as Lightricks' own trainer draws nine tenths of them",
        other_trainers={"ai-toolkit": WEIGHTED, "diffusion-pipe": LOGIT_NORMAL},
    ),
    sampling=SamplingFacts(num_inference_steps=30, guidance_scale=3.0, image_size=(768, 512)),
    options=FamilyOptions(components={"vae": "vae"}, extra=("image_to_video", "train_audio")),
    notes="19B, and 2.3 (22B); from text, or from the first frame (`--image_to_video`); with sound (`--train_audio`); "
    "diffusers folders",
)


class LTX2(LTXVideo):
    """The stream of pictures is LTX-Video's, with positions in seconds and texts that connectors have prepared."""

    facts = FACTS
    max_tokens = CONNECTOR_TOKENS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        if _is_version_2_3(pipe.transformer.config):
            return BaseModelInfo("ltx2.3", "ltx-2.3")
        return BaseModelInfo("ltx2", "ltx-2")

    @classmethod
    def prepare_denoiser(cls, denoiser: nn.Module) -> None:
        """Name the projection that attention in LTX-2.3 computes first, for LoRA layers that are computed as one."""
        for module in denoiser.modules():
            if type(getattr(module, "processor", None)).__name__ == "LTX2PerturbedAttnProcessor":
                module.first_projection = "to_v"  # type: ignore[assignment]

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        pipe.vae_spatial_compression_ratio = get_downscale_factor(read_required(read, "vae/config.json"))

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Return the stream of sound, and the attention between the streams, with their weights outside of layers."""
        names = [name for name, _ in denoiser.named_modules()]
        tables = [name for name, _ in denoiser.named_parameters() if name.endswith("scale_shift_table")]
        return tuple(name for name in (*names, *tables) if _belongs_to_sound(name))

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from .. import text_encoding

        rows = []
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            for prompt in prompts:  # one at a time: the states of all layers are half a gigabyte
                states, mask = pipe._get_gemma_prompt_embeds(
                    [prompt], max_sequence_length=self.max_tokens, device=pipe.text_encoder.device
                )
                rows.append(pipe.connectors(states, mask, padding_side="left")[:2])
        embeds, sound_embeds = (torch.cat(each) for each in zip(*rows, strict=True))
        return {"embeds": embeds, "sound_embeds": sound_embeds}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        parts = {"embeds": pipe.connectors.video_connector, "sound_embeds": pipe.connectors.audio_connector}
        shape = len(prompts), self.max_tokens
        return {name: torch.empty(*shape, part.inner_dim, device="meta") for name, part in parts.items()}

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        from ..vae import get_latent_statistics

        mean, std = get_latent_statistics(pipe.vae, latents)  # with which the pipeline has scaled them already
        return self.decode_latents(pipe, (latents.to(std) - mean) / std)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        return self.predict_tokens(pipe, denoiser, noisy_latents, timesteps, batch)

    def predict_tokens(
        self,
        pipe: Any,
        denoiser: nn.Module,
        noisy_latents: Tensor,
        timesteps: Tensor,
        batch: Batch,
        *,
        token_times: Tensor | None = None,
    ) -> Tensor:
        """Run the denoiser; ``token_times`` (B, tokens) are the times of tokens that have their own."""
        num_frames, height, width = sizes = noisy_latents.shape[2:]
        count, device, model = len(noisy_latents), noisy_latents.device, pipe.transformer
        sound_embeds: Any = batch.cond["sound_embeds"]
        is_silent = batch.noisy_sound is None
        if batch.noisy_sound is None:
            sound, sound_embeds = noisy_latents.new_zeros(count, 1, model.config.audio_in_channels), sound_embeds[:, :1]
        else:
            sound = batch.noisy_sound.to(noisy_latents.dtype)
        predicted: Tensor = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents),
            audio_hidden_states=sound,
            encoder_hidden_states=batch.cond["embeds"],
            audio_encoder_hidden_states=sound_embeds,
            timestep=timesteps if token_times is None else token_times,
            audio_timestep=timesteps,
            sigma=timesteps,
            num_frames=num_frames,
            height=height,
            width=width,
            audio_num_frames=sound.shape[1],
            video_coords=model.rope.prepare_video_coords(count, *sizes, device, fps=FRAME_RATE),
            isolate_modalities=is_silent,
            use_cross_timestep=_is_version_2_3(model.config),
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, *sizes)
        return unpacked

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        import torch

        scale = self.facts.sampling.get_guidance_scale(prompt.cfg_scale)
        config, is_2_3 = pipe.transformer.config, _is_version_2_3(pipe.transformer.config)
        kwargs: dict[str, Any] = {"guidance_scale": scale, "frame_rate": FRAME_RATE, "use_cross_timestep": is_2_3}
        kwargs["spatio_temporal_guidance_blocks"] = [GUIDED_BLOCKS[is_2_3]]
        if scale <= 1:  # of a distilled model, which has no guidance of any kind
            kwargs |= {"audio_guidance_scale": 1.0, "modality_scale": 1.0, "audio_modality_scale": 1.0}
        if scale <= 1 or not config.perturbed_attn:  # whose blocks cannot leave out attention
            kwargs |= {"stg_scale": 0.0, "audio_stg_scale": 0.0}
        for prefix, each in (("", cond), ("negative_", negative_cond)):
            parts: Any = each["embeds"], each["sound_embeds"]
            embeds = torch.cat(parts, dim=-1)
            mask = embeds.new_ones(embeds.shape[:2], dtype=torch.long)
            kwargs |= {f"{prefix}prompt_embeds": embeds, f"{prefix}prompt_attention_mask": mask}
        return kwargs

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Sample with texts that the connectors have prepared, and leave the sound in latents, which nobody decodes."""
        config = sampling_pipe.transformer.config
        width = config.num_attention_heads * config.attention_head_dim
        width = config.caption_channels if config.use_prompt_embeddings else width

        def split_embeds(embeds: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
            return embeds[..., :width], embeds[..., width:], mask

        sampling_pipe.connectors = split_embeds
        if sampling_pipe.audio_vae is None:
            sampling_pipe.audio_vae = _build_sound_statistics(sampling_pipe.transformer)
        return sampling_pipe


def _belongs_to_sound(name: str) -> bool:
    """Whether a module or weight is of the stream of sound or between the streams: ``audio_ff``, ``video_a2v_...``."""
    return any("audio" in part or "a2v" in part or part.startswith("av_cross_attn") for part in name.split("."))


def _build_sound_statistics(transformer: Any) -> Any:
    """Build what the pipeline asks of the decoder of sound, where that is not loaded: latents as they are."""
    import torch

    sizes = SimpleNamespace(
        mel_bins=4 * SOUND_BANDS, latent_channels=transformer.config.audio_in_channels // SOUND_BANDS
    )
    return SimpleNamespace(config=sizes, latents_mean=torch.zeros(()), latents_std=torch.ones(()))


IMAGE_FACTS = replace(
    FACTS,
    title="LTX-2 from images",
    pipeline=replace(FACTS.pipeline, class_name="LTX2ImageToVideoPipeline"),
    sampling=replace(FACTS.sampling, frame_images=("image_path",)),
)


class LTX2FromImage(CleanFirstFrame, LTX2):
    """The model with the first frame of each clip given."""

    facts = IMAGE_FACTS

    def predict_with_token_times(
        self, pipe: Any, denoiser: nn.Module, latents: Tensor, timesteps: Tensor, token_times: Tensor, *, batch: Batch
    ) -> Tensor:
        return self.predict_tokens(pipe, denoiser, latents, timesteps, batch, token_times=token_times)

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Let the pipeline encode the first frame in the dtype of the VAE, which is not that of the texts."""
        prepare, dtype = sampling_pipe.prepare_latents, sampling_pipe.vae.dtype

        def prepare_latents(image: Tensor, *args: Any, **kwargs: Any) -> Any:
            return prepare(image.to(dtype), *args, **kwargs)

        sampling_pipe.prepare_latents = prepare_latents
        return super().adapt_sampling_pipeline(sampling_pipe)


_SOUND_ATTENTIONS = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_NO_ZEROS = f"DeepSpeed takes a missing gradient for zeros, and {SILENT_STEPS}"


def _add_sound(facts: FamilyFacts) -> FamilyFacts:
    """The facts of the model trained with sound: its layers get a LoRA, too, and its decoder is loaded for previews."""
    pipeline, blocks, rule = facts.pipeline, facts.blocks, facts.pipeline.frames or FrameRule()
    names = (f"{attention}.{name}" for attention in _SOUND_ATTENTIONS for name in _PROJECTIONS)
    refused = {**dict.fromkeys(("compile", "cuda_graphs"), SILENT_STEPS), "deepspeed": _NO_ZEROS}
    return replace(
        facts,
        title=f"{facts.title} with sound",
        pipeline=replace(
            pipeline,
            frames=replace(rule, sound_rate=SOUND_RATE, sound_channels=SOUND_CHANNELS * SOUND_BANDS),
            frame_encoders=("audio_vae", "vocoder"),
        ),
        lora=replace(facts.lora, targets=(*facts.lora.targets, *names, "audio_ff.net.0.proj", "audio_ff.net.2")),
        blocks=replace(blocks, unsupported_strategies={**blocks.unsupported_strategies, **refused}),
    )


class _WithSound(TrainedSound, LTX2):
    """The methods of the model trained with sound; the class stands before that of the model without."""

    def encode_sound(self, pipe: Any, samples: Tensor, rate: int, num_frames: int) -> Tensor:
        from ..sound import encode_sound_latents, resample

        rule, own_rate = self.facts.pipeline.frames or FrameRule(), pipe.audio_vae.config.sample_rate
        count = round(num_frames / rule.fps * own_rate)
        own = resample(samples, rate, own_rate)[:, own_rate : own_rate + count]
        return encode_sound_latents(pipe.audio_vae, own, rule.count_sound_latents(num_frames))

    def decode_sampled_sound(self, pipe: Any, output: Any) -> SoundTrack:
        from ...dataset.clip_encoding import SoundTrack
        from ..sound import decode_sound_latents

        samples = decode_sound_latents(pipe.audio_vae, pipe.vocoder, output.audio)
        return SoundTrack(samples[0].cpu().numpy(), pipe.vocoder.config.output_sampling_rate)


class LTX2WithSound(_WithSound, LTX2):
    """The model trained on clips with their sound."""

    facts = _add_sound(FACTS)


class LTX2FromImageWithSound(_WithSound, LTX2FromImage):
    """The model with the first frame of each clip given, and trained with their sound."""

    facts = _add_sound(IMAGE_FACTS)
