"""Mochi 1: video and text streams of different width, latents of 1/6 of the frames, text of T5; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle, OriginalModule
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import NO_SHIFT
from ...registry import copy_class_name
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
from ..shared_facts import T5_TOKENIZER, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

MOCHI_TEXT_TOKENS = 256
"""Maximum tokens of the prompt, as in diffusers' pipeline."""


def _match_mochi(read: ConfigReader) -> FamilyMatch:
    config, vae = read_required(read, "transformer/config.json"), read_required(read, "vae/config.json")
    if vae.get("scaling_factor", 1.0) != 1.0 or not vae.get("latents_mean"):
        raise ModelError("its VAE has no mean and deviation of latents; use the VAE of Mochi 1")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks")


_VIDEO_QKV, _TEXT_QKV = (
    tuple(f"transformer_blocks.{{}}.attn1.{name}" for name in names)
    for names in (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))
)
MOCHI_KEYS = KeyStyle(
    "mochi",
    (
        OriginalModule("blocks.{}.attn.qkv_x", _VIDEO_QKV),
        OriginalModule("blocks.{}.attn.qkv_y", _TEXT_QKV, output_ratios=(2, 2, 2)),
        OriginalModule("blocks.{}.attn.proj_x", ("transformer_blocks.{}.attn1.to_out.0",)),
        OriginalModule("blocks.{}.attn.proj_y", ("transformer_blocks.{}.attn1.to_add_out",)),
    ),
    is_read_by_diffusers=False,
    is_comfy_format_in_diffusers=False,
    unread_in_comfyui={"diffusers": "loads nothing of this layout"},
)


FACTS = FamilyFacts(
    title="Mochi 1",
    pipeline=PipelineFacts(
        class_name="MochiPipeline",
        kind="video",
        num_parameters=10_027_677_744,
        hub_id="genmo/mochi-1-preview",
        frames=FrameRule(stride=6, fps=30.0),
    ),
    detection=DetectionFacts(match_configs=_match_mochi),
    lora=FamilyLora(
        # The attention of video and text.
        targets=(
            *("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
            *("attn1.add_q_proj", "attn1.add_k_proj", "attn1.add_v_proj", "attn1.to_add_out"),
        ),
        key_style=MOCHI_KEYS,
        format="comfy",
        modelspec_architecture="mochi-1",
        modelspec_implementation="https://github.com/genmoai/mochi",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states", "encoder_hidden_states"),
        unsupported_strategies={
            "tp": "the positions of Mochi differ from head to head",
            "cp": "the attention of Mochi has a mask for the padding of texts",
        },
        attention_modes=(),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": T5_TOKENIZER},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="uniform", shift=NO_SHIFT, reason="uniform, as in its authors' trainer"
    ),
    sampling=SamplingFacts(num_inference_steps=64, guidance_scale=4.5, image_size=(848, 480)),
    options=FamilyOptions(components={"vae": "vae", "t5xxl": "text_encoder"}),
    notes="10B; diffusers folders",
)


class Mochi(Family):
    facts = FACTS

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        processor = _build_attention_processor()
        for block in denoiser.transformer_blocks:
            block.attn1.processor = processor
        denoiser.rope.__class__ = _build_position_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("mochi_1", "mochi-1")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess(velocity_sign=-1)

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        # The text output of the last block is discarded.
        return (f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}.attn1.add_q_proj",)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        embeds = list[Any]()
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            # One at a time: the pipeline takes all texts for empty if the last one is.
            for prompt in prompts:
                states, mask = pipe._get_t5_prompt_embeds(
                    [prompt], max_sequence_length=MOCHI_TEXT_TOKENS, device=pipe.text_encoder.device
                )
                # Of an empty text nothing counts; the one token that stands for it is masked in ``predict``.
                embeds.append(text_encoding.drop_padding(states, mask)[0] if prompt else states[0, :1])
        return {"embeds": embeds}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        width = pipe.transformer.config.text_embed_dim
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, prompts, width, MOCHI_TEXT_TOKENS)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        # One token is that of the end.
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, MOCHI_TEXT_TOKENS - 1)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_clip_moments

        return encode_clip_moments(pipe.vae, as_clips(pixels))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_clip_latents

        return decode_clip_latents(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        embeds, mask = _pad_texts(pipe, batch.cond["embeds"], batch.text_pad_multiple)
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            encoder_hidden_states=embeds,
            timestep=1000 - timesteps,
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]
        return -predicted  # the model's velocity runs from noise to video, as its timesteps do

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        # The pipeline needs both texts to have one length.
        embeds, mask = _pad_texts(pipe, [*cond["embeds"], *negative_cond["embeds"]], MOCHI_TEXT_TOKENS)
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=embeds[:1],
            prompt_attention_mask=mask[:1],
            negative_prompt_embeds=embeds[1:],
            negative_prompt_attention_mask=mask[1:],
        )


def _pad_texts(pipe: Any, texts: Tensor | Sequence[Tensor], multiple: int) -> tuple[Tensor, Tensor]:
    """Pad texts; an empty one, which has one token, is masked whole where the model was trained so."""
    from ..text_encoding import pad_text_embeds

    embeds, mask = pad_text_embeds(texts, multiple)
    for number, text in enumerate(texts):
        if len(text) == 1 and pipe.config.force_zeros_for_empty_prompt:
            mask[number] = 0
    return embeds, mask.bool()


def _build_position_class() -> Any:
    """diffusers' rotary positions of Mochi, which autocast does not round, without switching autocast off.

    Its own switches it off for the device type of its frequencies, which the meta device has not.
    """
    from diffusers.models.transformers.transformer_mochi import MochiRoPE

    positions: Any = MochiRoPE

    class RotaryPositions(positions):  # type: ignore[misc]
        def _create_rope(self, freqs: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
            axes = zip(pos.float().unbind(1), freqs.float().unbind(0), strict=True)
            first, *others = (places[:, None, None] * frequencies for places, frequencies in axes)
            angles = sum(others, first)
            return angles.cos(), angles.sin()

    return copy_class_name(RotaryPositions, positions)


def _build_attention_processor() -> Any:
    """diffusers' attention of Mochi with a mask of the text's padding, over the whole batch at once.

    Its own takes the tokens out that are not masked, whose number is not known before, for one sample after another.
    """
    import torch
    from torch.nn.functional import pad, scaled_dot_product_attention

    def rotate(tokens: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        even, odd = tokens.float().view(*tokens.shape[:-1], -1, 2).unbind(-1)
        pairs = (even * cosines - odd * sines, even * sines + odd * cosines)
        return torch.stack(pairs, dim=-1).flatten(-2).to(tokens.dtype)

    class TextMaskProcessor:
        def __call__(
            self,
            attn: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            attention_mask: Tensor,
            image_rotary_emb: Any = None,
        ) -> tuple[Tensor, Tensor]:
            sizes = [hidden_states.shape[1], encoder_hidden_states.shape[1]]
            streams = (
                (hidden_states, (attn.to_q, attn.to_k, attn.to_v)),
                (encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)),
            )
            video, text = (
                [layer(tokens).unflatten(2, (attn.heads, -1)) for layer in layers] for tokens, layers in streams
            )
            video[0], video[1] = attn.norm_q(video[0]), attn.norm_k(video[1])
            text[0], text[1] = attn.norm_added_q(text[0]), attn.norm_added_k(text[1])
            if image_rotary_emb is not None:
                video[0], video[1] = rotate(video[0], *image_rotary_emb), rotate(video[1], *image_rotary_emb)
            pairs = zip(video, text, strict=True)
            query, key, value = (torch.cat(pair, dim=1).transpose(1, 2) for pair in pairs)
            mask = pad(attention_mask.bool(), (sizes[0], 0), value=True)[:, None, None]
            states = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
            video_output, text_output = torch.split(states, sizes, dim=1)
            video_output = attn.to_out[1](attn.to_out[0](video_output))
            return video_output, attn.to_add_out(text_output) if hasattr(attn, "to_add_out") else text_output

    return TextMaskProcessor()
