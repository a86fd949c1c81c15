"""HunyuanVideo: double and single streams, text of LLaVA's Llama 3 and of CLIP; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import IMAGE_STREAM, TEXT_STREAM
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
    SingleFileFacts,
    TextFacts,
    TrainerNames,
)
from ..family_noise_levels import LOGIT_NORMAL, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import (
    CLIP_L_PREFIXES,
    CLIP_L_TOKENIZER,
    DENOISER_PREFIXES,
    MASKED_ATTENTION_MODES,
    match_flow_model,
)
from .hunyuan_image_keys import SINGLE_PARTS
from .hunyuan_video_keys import COMFYUI_KEYS, HUNYUAN_VIDEO_KEYS, LAYOUT, build_video_vae_patterns

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

MAX_TOKENS = 256
"""Tokens of the prompt with the end of its template, as in diffusers' pipeline."""
I2V_FILES = "whose weights have the same names and sizes; set --family hunyuan_video_i2v"
EMBEDDED_GUIDANCE = 6.0
"""The guidance embedding of previews, the default of diffusers' pipeline."""


def _match_hunyuan_video(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("image_condition_type"):
        raise ModelError("its transformer is that of I2V in a pipeline from text alone; use its own folder")
    blocks = f"{config.get('num_layers')} double and {config.get('num_single_layers')} single blocks"
    match = match_flow_model(read, 1, f"the transformer has {blocks}")
    return replace(match, has_guidance_embeds=bool(config.get("guidance_embeds", True)))


FACTS = FamilyFacts(
    title="HunyuanVideo",
    pipeline=PipelineFacts(
        class_name="HunyuanVideoPipeline",
        kind="video",
        num_parameters=12_821_012_544,
        hub_id="hunyuanvideo-community/HunyuanVideo",
        frames=FrameRule(stride=4, fps=24.0),
    ),
    detection=DetectionFacts(
        match_configs=_match_hunyuan_video,
        keys=("double_blocks.0.img_attn_qkv.weight", "single_blocks.0.linear1.weight", "vector_in.in_layer.weight"),
        diffusers_keys={
            "double_blocks.0.img_attn_qkv.weight": "context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight",
            "single_blocks.0.linear1.weight": "single_transformer_blocks.0.proj_mlp.weight",
            "vector_in.in_layer.weight": "time_text_embed.text_embedder.linear_1.weight",
            "img_in.proj.weight": "x_embedder.proj.weight",
            "txt_in.input_embedder.weight": "context_embedder.proj_in.weight",
            "guidance_in.mlp.0.weight": "time_text_embed.guidance_embedder.linear_1.weight",
        },
        shape_checks={
            ("img_in.proj.weight", 1): ("transformer", "in_channels"),
            ("txt_in.input_embedder.weight", 1): ("transformer", "text_embed_dim"),
            ("vector_in.in_layer.weight", 1): ("transformer", "pooled_projection_dim"),
            ("guidance_in.mlp.0.weight", None): ("transformer", "guidance_embeds"),
            ("clean_x_embedder.proj.weight", None): ("transformer", "has_clean_x_embedder"),  # of FramePack
        },
        unsupported_file_names=dict.fromkeys(("i2v", "image_to_video"), f"HunyuanVideo I2V, {I2V_FILES}"),
        trainer_names=TrainerNames(diffusion_pipe=("hunyuan-video",), onetrainer=("HUNYUAN_VIDEO",)),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.llama.transformer.",),
            "text_encoder_2": CLIP_L_PREFIXES,
        },
        layout=LAYOUT,
        build_vae_patterns=build_video_vae_patterns,
    ),
    lora=FamilyLora(
        # The linear layers of the blocks but those of modulation; those that refine the text have some of the same
        # names.
        targets=(
            *(
                f"transformer_blocks.*.{layer}"
                for layer in (*IMAGE_STREAM, *TEXT_STREAM)
                if not layer.startswith("norm1")
            ),
            *(f"single_transformer_blocks.*.{layer}" for layer in (*SINGLE_PARTS, "proj_out")),
        ),
        targets_of="musubi-tuner",
        optional_targets=(
            *("transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm1_context.linear"),
            "single_transformer_blocks.*.norm.linear",
        ),
        key_style=HUNYUAN_VIDEO_KEYS,
        other_key_styles=(COMFYUI_KEYS,),
        format="comfy",
        modelspec_architecture="hunyuan-video",
        modelspec_implementation="https://github.com/Tencent-Hunyuan/HunyuanVideo",
    ),
    blocks=BlockFacts(
        token_layouts={
            r"^single_transformer_blocks\.": TokenLayout(segments=(OTHER_TOKENS, "encoder_hidden_states")),
        },
        lists=("transformer_blocks", "single_transformer_blocks"),
        activation_args=("hidden_states", "encoder_hidden_states"),
        token_args={
            "attention_mask": ((3, ("hidden_states", "encoder_hidden_states")),),
            "freqs_cis": ((0, ("hidden_states",)),) * 2,
            "image_rotary_emb": ((0, ("hidden_states",)),) * 2,
        },
        single_stream_lists=("single_transformer_blocks",),
        # One matrix for the output of the attention and of the MLP.
        fused_layers={r"single_transformer_blocks\.\d+\.proj_out$": ("rowwise", (1, 4))},
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer_repo_ids={
            "tokenizer": "hunyuanvideo-community/HunyuanVideo:tokenizer",
            "tokenizer_2": CLIP_L_TOKENIZER,
        },
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(3.0),
        reason="as musubi-tuner's guide recommends for details, in place of its 7",
        other_trainers={
            "musubi-tuner": NoiseLevels("shift", 7.0, origin="its guide"),
            "diffusion-pipe": LOGIT_NORMAL,
        },
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=1.0, image_size=(1280, 720)),
    options=FamilyOptions(
        # musubi-tuner's text_encoder1 is t5xxl here.
        components={
            **{"vae": "vae", "t5xxl": "text_encoder", "text_encoder": "text_encoder"},
            "clip_l": "text_encoder_2",
        },
        extra=("guidance_scale",),
    ),
    notes="text to video",
)


class HunyuanVideo(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("hunyuan_video", "hunyuan-video")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        template = _get_template()
        pipe.tokenizer.padding_side = "right"
        longest = max(map(len, pipe.tokenizer(_format_prompts(prompts), truncation=False, verbose=False).input_ids))
        embeds, mask = pipe._get_llama_prompt_embeds(
            list(prompts),
            template,
            device=pipe.text_encoder.device,
            max_sequence_length=min(longest - template["crop_start"], MAX_TOKENS),
        )
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer_2):
            pooled = pipe._get_clip_prompt_embeds(list(prompts), device=pipe.text_encoder_2.device)
        return {"embeds": text_encoding.drop_padding(embeds, mask), "pooled": pooled}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from .. import text_encoding

        config, start = pipe.transformer.config, _get_template()["crop_start"]
        embeds = text_encoding.build_meta_text_embeds(
            pipe.tokenizer, _format_prompts(prompts), config.text_embed_dim, MAX_TOKENS, start
        )
        return {"embeds": embeds, "pooled": torch.empty(len(prompts), config.pooled_projection_dim, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        template = _get_template()
        prefix, _, _ = template["template"].partition("{}")
        texts = {prefix + prompt: prompt for prompt in prompts}
        found = text_encoding.find_truncated_prompts(pipe.tokenizer, [*texts], MAX_TOKENS + template["crop_start"] - 1)
        return [texts[text] for text in found]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_vae_moments

        return encode_vae_moments(pipe.vae, as_clips(pixels))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            timestep=timesteps,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask.to(embeds.dtype),
            pooled_projections=batch.cond["pooled"],
            guidance=timesteps.new_full(timesteps.shape, 1000 * self.model_config.guidance_scale),
            return_dict=False,
        )[0]
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        guidance = prompt.embedded_guidance
        kwargs: dict[str, Any] = {
            "true_cfg_scale": self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            "guidance_scale": EMBEDDED_GUIDANCE if guidance is None else guidance,
        }
        for prefix, texts in (("", cond), ("negative_", negative_cond)):
            kwargs[f"{prefix}prompt_embeds"], kwargs[f"{prefix}prompt_attention_mask"] = pad_text_embeds(
                texts["embeds"]
            )
            kwargs[f"{prefix}pooled_prompt_embeds"] = texts["pooled"]
        return kwargs


def _get_template() -> dict[str, Any]:
    """Return the text around every prompt, and the number of its first tokens, which are dropped."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    template: dict[str, Any] = DEFAULT_PROMPT_TEMPLATE
    return template


def _format_prompts(prompts: Sequence[str]) -> list[str]:
    return [_get_template()["template"].format(prompt) for prompt in prompts]
