"""Wan 2.1: videos from text, with UMT5 by cross-attention and a video VAE of its own; flow matching."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...config.network_args import NetworkFacts
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
    SingleFileFacts,
    TextFacts,
    TrainerNames,
)
from ..family_noise_levels import NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import DENOISER_PREFIXES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

FRAME_STRIDE = 4
"""Frames per latent frame of the VAE, after the first."""
WAN_FRAMES = FrameRule(stride=FRAME_STRIDE, fps=16.0)
WAN_TEXT_TOKENS = 512
"""The transformer always gets as many tokens of text: zeros after those of the prompt, which it attends to."""


def _match_wan(read: ConfigReader) -> FamilyMatch | None:
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    if index.get("boundary_ratio") is not None or index.get("expand_timesteps"):
        return None  # Wan 2.2
    if config.get("image_dim"):
        raise ModelError("it is a Wan 2.1 with an image encoder in a pipeline without one; use its own folder")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks")


_ORIGINAL_PARTS = {
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    "to_out.0": "o",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "proj_out": "head.head",
}


def rename_to_original(modules: Iterable[str]) -> Mapping[str, str]:
    """Map modules to their names in the files of the authors' repository."""
    renames = {}
    for module in modules:
        name = module
        for part, original in _ORIGINAL_PARTS.items():
            name = name.replace(part, original)
        renames[module] = name
    return renames


WAN_KEYS = KeyStyle("wan", rename=rename_to_original, has_original_names_in_diffusers=True)

_UMT5_PATTERNS = {
    r"^(shared|encoder\.embed_tokens)\.": "token_embedding.",
    r"^encoder\.final_layer_norm\.": "norm.",
    r"^encoder\.block\.": "blocks.",
    r"\.layer\.0\.layer_norm\.": ".norm1.",
    r"\.layer\.1\.layer_norm\.": ".norm2.",
    r"\.layer\.0\.SelfAttention\.relative_attention_bias\.": ".pos_embedding.embedding.",
    r"\.layer\.0\.SelfAttention\.": ".attn.",
    r"\.layer\.1\.DenseReluDense\.wi_0\.": ".ffn.gate.0.",
    r"\.layer\.1\.DenseReluDense\.wi_1\.": ".ffn.fc1.",
    r"\.layer\.1\.DenseReluDense\.wo\.": ".ffn.fc2.",
}
"""The names of the text encoder's modules in files of the authors' repository."""


FACTS = FamilyFacts(
    title="Wan 2.1",
    pipeline=PipelineFacts(
        class_name="WanPipeline",
        kind="video",
        num_parameters=14_288_491_584,
        hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        frames=WAN_FRAMES,
    ),
    detection=DetectionFacts(
        match_configs=_match_wan,
        keys=("blocks.0.self_attn.norm_q.weight", "text_embedding.0.weight", "blocks.0.ffn.0.weight"),
        diffusers_keys={
            "blocks.0.self_attn.norm_q.weight": "blocks.0.attn1.norm_q.weight",
            "text_embedding.0.weight": "condition_embedder.text_embedder.linear_1.weight",
            "blocks.0.ffn.0.weight": "blocks.0.ffn.net.0.proj.weight",
            "ref_conv.weight": "patch_embedding.ref_conv.weight",
        },
        shape_checks={
            ("patch_embedding.weight", 1): ("transformer", "in_channels"),
            ("text_embedding.0.weight", 1): ("transformer", "text_dim"),
            ("blocks.0.ffn.0.weight", 0): ("transformer", "ffn_dim"),
            ("img_emb.proj.1.weight", None): ("transformer", "image_dim"),
            ("vace_patch_embedding.weight", None): ("transformer", "vace_in_channels"),
            ("ref_conv.weight", None): ("transformer", "in_dim_ref_conv"),
            ("pose_patch_embedding.weight", None): ("transformer", "motion_encoder_size"),
        },
        unsupported_shapes={
            ("ref_conv.weight", 1, 48): "Wan 2.2 Fun-Control 5B, which is not supported yet",
            ("control_adapter.conv.weight", 1, 1536): "Wan Fun-Control-Camera, which is not supported yet",
        },
        unsupported_file_names=dict.fromkeys(
            ("high_noise", "low_noise"),
            "one of the two transformers of Wan 2.2 A14B; for low noise give the file of the other as --dit_high_noise,"
            " or set --model_version t2v-A14B and the one that it is as --noise_experts",
        ),
        trainer_names=TrainerNames(
            ai_toolkit=("wan21",),
            diffusion_pipe=("wan",),
            simpletuner=("wan",),
            simpletuner_flavours={
                "t2v-480p-1.3b-2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
                "t2v-480p-14b-2.1": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
            },
            simpletuner_default="t2v-480p-1.3b-2.1",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.umt5xxl.transformer.",),
        },
        text_patterns=_UMT5_PATTERNS,
    ),
    lora=FamilyLora(
        # The linear layers of the blocks.
        targets=(
            *(f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v")),
            *("attn1.to_out.0", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2"),
        ),
        targets_of="musubi-tuner",
        key_style=WAN_KEYS,
        modelspec_architecture="wan2.1",
        modelspec_implementation="https://github.com/Wan-Video/Wan2.1",
    ),
    blocks=BlockFacts(
        lists=("blocks",),
        activation_args=("hidden_states",),
        token_args={"rotary_emb": ((1, ("hidden_states",)),) * 2},
        text_attention_calls=(1,),
        text_attention_layers=("attn2.to_k", "attn2.to_v"),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "google/umt5-xxl"},
        has_variable_length=True,
        denoiser_pad_multiple=WAN_TEXT_TOKENS,
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(3.0),
        reason="as musubi-tuner's guide recommends",
        other_trainers={"musubi-tuner": NoiseLevels("shift", 3.0, origin="its guide")},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0, image_size=(832, 480)),
    options=FamilyOptions(
        components={"vae": "vae", "text_encoder": "text_encoder"},
        network=NetworkFacts(modules=("networks.lora_wan",)),
        musubi_versions={
            "t2v-1.3B": {"ffn_dim": 8960},
            "t2v-14B": {"ffn_dim": 13824},
            "t2i-14B": {"ffn_dim": 13824},
        },
    ),
    notes="text to video",
)


class Wan(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan", "wan2.1")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        texts = list(map(_clean_text, prompts))
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            tokens = pipe.tokenizer(
                texts,
                padding="max_length",
                max_length=WAN_TEXT_TOKENS,
                truncation=True,
                return_attention_mask=True,
                return_tensors="pt",
            )
        device = pipe.text_encoder.device
        mask = tokens.attention_mask.to(device)
        embeds = pipe.text_encoder(tokens.input_ids.to(device), mask).last_hidden_state
        return {"embeds": text_encoding.drop_padding(embeds, mask)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        texts, width = list(map(_clean_text, prompts)), pipe.transformer.config.text_dim
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, WAN_TEXT_TOKENS)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        # One token is that of the end.
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, WAN_TEXT_TOKENS - 1)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_clip_moments

        return encode_clip_moments(pipe.vae, as_clips(pixels))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_clip_latents

        return decode_clip_latents(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            timestep=timesteps,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], WAN_TEXT_TOKENS)[0],
            return_dict=False,
        )[0]
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        # Where a latent is one frame, as in the demo model, the pipeline rounds every number of frames up by one.
        has_frame_latents = pipe.vae_scale_factor_temporal == 1
        if has_frame_latents:
            logging.getLogger(type(pipe).__module__).addFilter(is_not_about_rounding)
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=pad_text_embeds(cond["embeds"], WAN_TEXT_TOKENS)[0],
            negative_prompt_embeds=pad_text_embeds(negative_cond["embeds"], WAN_TEXT_TOKENS)[0],
            **({"num_frames": (prompt.num_frames or 1) - 1} if has_frame_latents else {}),
        )


def is_not_about_rounding(record: logging.LogRecord) -> bool:
    """Filter out what a pipeline says of every number of frames where a latent is one frame."""
    return "Rounding to the nearest number" not in str(record.msg)


def _clean_text(text: str) -> str:
    """Resolve HTML entities and join white space, as the pipeline does; it also repairs wrong encodings, with ftfy."""
    from html import unescape

    return " ".join(unescape(unescape(text)).split())
