"""AuraFlow (and Pony V7): a few double-stream and many single-stream blocks, text of Pile-T5; flow matching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import CONVERTED_BY_COMFYUI_KEYS
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
from ..model_configs import ConfigReader, read_required
from ..shared_facts import DENOISER_PREFIXES, JOINT_ATTENTION_LORA_TARGET_MODULES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

AURA_FLOW_MAX_SEQUENCE_LENGTH = 256
"""Tokens of the padded prompt, as in diffusers' pipeline."""


def _match_aura_flow(read: ConfigReader) -> FamilyMatch:
    positions = read_required(read, "transformer/config.json").get("pos_embed_max_size", 1024)
    match = match_flow_model(read, 1, f"the transformer has {positions} image positions")
    return replace(match, max_side=math.isqrt(positions) * match.size_multiple)


FACTS = FamilyFacts(
    title="AuraFlow",
    pipeline=PipelineFacts(class_name="AuraFlowPipeline", num_parameters=6_858_605_568, hub_id="fal/AuraFlow-v0.3"),
    detection=DetectionFacts(
        match_configs=_match_aura_flow,
        keys=("double_layers.0.attn.w2q.weight", "cond_seq_linear.weight", "positional_encoding"),
        diffusers_keys={
            "double_layers.0.attn.w2q.weight": "joint_transformer_blocks.0.attn.to_q.weight",
            "cond_seq_linear.weight": "context_embedder.weight",
            "positional_encoding": "pos_embed.pos_embed",
        },
        shape_checks={
            ("positional_encoding", 1): ("transformer", "pos_embed_max_size"),
            ("cond_seq_linear.weight", 0): ("transformer", "caption_projection_dim"),
            ("cond_seq_linear.weight", 1): ("transformer", "joint_attention_dim"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("auraflow", "is_auraflow"),
            diffusion_pipe=("auraflow",),
            simpletuner=("auraflow",),
            simpletuner_flavours={
                "v0.3": "fal/AuraFlow-v0.3",
                "v0.2": "fal/AuraFlow-v0.2",
                "v0.1": "fal/AuraFlow",
                "pony": "purplesmartai/pony-v7-base",
            },
            simpletuner_default="v0.3",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.pile_t5xl.transformer.",),
        },
    ),
    lora=FamilyLora(
        # The attention of all blocks.
        targets=JOINT_ATTENTION_LORA_TARGET_MODULES,
        targets_of="SimpleTuner",
        key_style=CONVERTED_BY_COMFYUI_KEYS,
        format="diffusers",
        modelspec_architecture="auraflow",
    ),
    blocks=BlockFacts(
        # Text and image are one stream after the four double-stream blocks, which every pipeline stage computes.
        lists=("single_transformer_blocks",),
        activation_args=("hidden_states",),
        fused_layers={
            r"\.ff(_context)?\.linear_[12]$": ("colwise", (1,)),
            r"\.ff(_context)?\.out_projection$": ("rowwise", (1,)),
        },
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "fal/AuraFlow-v0.3:tokenizer"},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=3.5),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
)


class AuraFlow(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("auraflow", "auraflow")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            embeds, *_ = pipe.encode_prompt(
                list(prompts),
                do_classifier_free_guidance=False,
                device=pipe.text_encoder.device,
                max_sequence_length=AURA_FLOW_MAX_SEQUENCE_LENGTH,
            )
        return {"embeds": embeds}  # padding is zero; the transformer has no mask

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        shape = len(prompts), AURA_FLOW_MAX_SEQUENCE_LENGTH, pipe.transformer.config.joint_attention_dim
        return {"embeds": torch.empty(shape, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        max_tokens = AURA_FLOW_MAX_SEQUENCE_LENGTH - 1  # minus the end token
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, max_tokens)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        predicted: Tensor = denoiser(
            noisy_latents, encoder_hidden_states=batch.cond["embeds"], timestep=timesteps / 1000, return_dict=False
        )[0]
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        import torch

        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        masks = {
            f"{prefix}prompt_attention_mask": torch.ones(kwargs[f"{prefix}prompt_embeds"].shape[:2])
            for prefix in ("", "negative_")
        }
        return {**kwargs, **masks}  # required, and unused
