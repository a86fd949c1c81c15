"""Stable Diffusion 3 and 3.5: MMDiT with two CLIP text encoders and T5; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, cast

from ...adapters.original_module_names import (
    IMAGE_STREAM,
    T5_KEYS,
    TEXT_STREAM,
    KeyStyle,
    OriginalModule,
    build_stream_modules,
)
from ...config.network_args import NetworkFacts
from ...diffusion.timestep_shift import NO_SHIFT
from ...randomness import Purpose
from ..base import BaseModelInfo, T5Family
from ..facts import (
    BlockFacts,
    DetectionFacts,
    FamilyFacts,
    FamilyLora,
    FamilyMatch,
    FamilyOptions,
    KohyaObjective,
    PipelineFacts,
    SamplingFacts,
    SingleFileFacts,
    TextEncoderLora,
    TextFacts,
    TrainerNames,
)
from ..family_noise_levels import LOGIT_NORMAL, UNIFORM, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import (
    CLIP_G_PREFIXES,
    CLIP_G_TOKENIZER,
    CLIP_L_PREFIXES,
    CLIP_L_TOKENIZER,
    CLIP_LORA_TARGET_MODULES,
    DENOISER_PREFIXES,
    JOINT_BLOCK_LORA_TARGET_MODULES,
    T5_LORA_TARGET_MODULES,
    T5_PREFIXES,
    T5_TOKENIZER,
    match_flow_model,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond


CLIP_TOKENS = 77
"""The tokens of the two CLIP encoders, which come before those of T5."""


def _match_sd3(read: ConfigReader) -> FamilyMatch:
    depth = read_required(read, "transformer/config.json").get("num_layers")
    return match_flow_model(read, 1, f"the transformer has {depth} joint blocks")


_STREAM_NAMES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
_LAYOUT: tuple[OriginalModule, ...] = (
    *build_stream_modules("joint_blocks.{}.x_block.", "transformer_blocks", IMAGE_STREAM, _STREAM_NAMES),
    *build_stream_modules("joint_blocks.{}.context_block.", "transformer_blocks", TEXT_STREAM, _STREAM_NAMES),
    OriginalModule(
        "joint_blocks.{}.x_block.attn2.qkv",
        tuple(f"transformer_blocks.{{}}.attn2.{part}" for part in ("to_q", "to_k", "to_v")),
    ),
    OriginalModule("joint_blocks.{}.x_block.attn2.proj", ("transformer_blocks.{}.attn2.to_out.0",)),
    OriginalModule("x_embedder.proj", ("pos_embed.proj",)),
    OriginalModule("context_embedder", ("context_embedder",)),
    OriginalModule("t_embedder.mlp.0", ("time_text_embed.timestep_embedder.linear_1",)),
    OriginalModule("t_embedder.mlp.2", ("time_text_embed.timestep_embedder.linear_2",)),
    OriginalModule("y_embedder.mlp.0", ("time_text_embed.text_embedder.linear_1",)),
    OriginalModule("y_embedder.mlp.2", ("time_text_embed.text_embedder.linear_2",)),
    OriginalModule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swaps_scale_shift=True),
    OriginalModule("final_layer.linear", ("proj_out",)),
)

SD3_KEYS = KeyStyle("sd3", _LAYOUT, is_read_by_diffusers=False)


FACTS = FamilyFacts(
    title="Stable Diffusion 3",
    pipeline=PipelineFacts(class_name="StableDiffusion3Pipeline", num_parameters=8_056_627_520),
    detection=DetectionFacts(
        match_configs=_match_sd3,
        keys=("joint_blocks.0.x_block.attn.qkv.weight", "context_embedder.weight", "x_embedder.proj.weight"),
        diffusers_keys={
            "joint_blocks.0.x_block.attn.qkv.weight": "transformer_blocks.0.attn.to_q.weight",
            "joint_blocks.0.x_block.attn.ln_q.weight": "transformer_blocks.0.attn.norm_q.weight",
            "joint_blocks.0.x_block.attn2.qkv.weight": "transformer_blocks.0.attn2.to_q.weight",
            "x_embedder.proj.weight": "pos_embed.proj.weight",
        },
        shape_checks={
            ("context_embedder.weight", 0): ("transformer", "caption_projection_dim"),
            ("context_embedder.weight", 1): ("transformer", "joint_attention_dim"),
            ("x_embedder.proj.weight", 1): ("transformer", "in_channels"),
            ("joint_blocks.0.x_block.attn.ln_q.weight", None): ("transformer", "qk_norm"),
            ("joint_blocks.0.x_block.attn2.qkv.weight", None): ("transformer", "dual_attention_layers"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("sd3", "is_v3"),
            diffusion_pipe=("sd3",),
            kohya_gui=("sd3_checkbox",),
            onetrainer=("STABLE_DIFFUSION_3", "STABLE_DIFFUSION_35"),
            simpletuner=("sd3",),
            simpletuner_flavours={
                "medium": "stabilityai/stable-diffusion-3.5-medium",
                "large": "stabilityai/stable-diffusion-3.5-large",
            },
            simpletuner_default="medium",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("first_stage_model.",),
            "text_encoder": CLIP_L_PREFIXES,
            "text_encoder_2": CLIP_G_PREFIXES,
            "text_encoder_3": T5_PREFIXES,
        },
    ),
    lora=FamilyLora(
        # Every linear layer of the joint blocks, including the second attention of 3.5-medium.
        targets=JOINT_BLOCK_LORA_TARGET_MODULES,
        targets_of="sd-scripts",
        text_encoders={
            "text_encoder": TextEncoderLora(CLIP_LORA_TARGET_MODULES, "lora_te1"),
            "text_encoder_2": TextEncoderLora(CLIP_LORA_TARGET_MODULES, "lora_te2"),
            "text_encoder_3": TextEncoderLora(T5_LORA_TARGET_MODULES, "lora_te3", T5_KEYS),
        },
        key_style=SD3_KEYS,
        format="diffusers",
        modelspec_architecture="stable-diffusion-3",
    ),
    blocks=BlockFacts(lists=("transformer_blocks",)),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"),
        tokenizer_repo_ids={
            "tokenizer": CLIP_L_TOKENIZER,
            "tokenizer_2": CLIP_G_TOKENIZER,
            "tokenizer_3": T5_TOKENIZER,
        },
        t5_encoder="text_encoder_3",
    ),
    training_noise=TrainingNoiseFacts(
        shift=NO_SHIFT,
        reason="logit-normal, as its authors and OneTrainer train",
        other_trainers={
            "sd-scripts": UNIFORM,
            "ai-toolkit": NoiseLevels("uniform", origin="its example; by default sigmoid"),
            "OneTrainer": LOGIT_NORMAL,
        },
    ),
    sampling=SamplingFacts(num_inference_steps=28, guidance_scale=7.0),
    options=FamilyOptions(
        components={"vae": "vae", "clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"},
        extra=(
            *("t5xxl_max_token_length", "apply_t5_attn_mask", "apply_lg_attn_mask"),
            *("clip_l_dropout_rate", "clip_g_dropout_rate", "t5_dropout_rate"),
            *("pos_emb_random_crop_rate", "enable_scaled_pos_embed"),
        ),
        network=NetworkFacts(
            modules=("networks.lora_sd3",),
            args=("train_t5xxl", "train_block_indices"),
            layer_type_ranks=tuple(
                (f"{stream}_{argument}_dim", f"{stream}_block_{name}")
                for stream in ("context", "x")
                for argument, name in (("attn", "attn"), ("mlp", "mlp"), ("mod", "adaLN"))
            ),
            outer_layer_ranks=(
                "emb_dims",
                (
                    *("context_embedder", "t_embedder", "x_embedder", "y_embedder"),
                    *("final_layer_adaLN_modulation", "final_layer_linear"),
                ),
            ),
        ),
        kohya_objective=KohyaObjective(
            defaults={"timestep_sampling": "sigma", "discrete_flow_shift": 1.0, "model_prediction_type": "x0"},
            ignored=("ip_noise_gamma",),
        ),
    ),
)


class StableDiffusion3(T5Family):
    facts = FACTS

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        # The last block has no queries for the text.
        return (f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}.attn.add_q_proj",)

    def get_non_block_lora_targets(self, denoiser: Any) -> tuple[str, ...]:
        names = (f"{embedder}_embedder.linear_{number}" for embedder in ("timestep", "text") for number in (1, 2))
        embedders = (f"time_text_embed.{name}" for name in names)
        return "pos_embed.proj", "context_embedder", *embedders, "norm_out.linear", "proj_out"

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        variant = _get_sd3_variant(pipe.transformer.config)
        names = ("apply_lg_attn_mask", "apply_t5_attn_mask")
        metadata = {f"ss_{name}": getattr(self.model_config, name) for name in names}
        return BaseModelInfo(variant, f"stable-diffusion-3-{variant}", metadata)

    def encode_t5_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        length, is_masked = self.max_sequence_length, self.model_config.apply_t5_attn_mask
        embeds, _ = text_encoding.encode_with_t5(pipe, prompts, "text_encoder_3", length, masks_padding=is_masked)
        return {"embeds": embeds}  # the transformer has no mask, as in sd-scripts

    def encode_clip_prompts(self, pipe: Any, prompts: Sequence[str], t5_cond: Cond) -> Cond:
        """CLIP's tokens come before those of T5 and are padded with zeros to their width."""
        import torch
        from torch.nn.functional import pad

        from .. import text_encoding

        with ExitStack() as stack:
            stack.enter_context(text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer, pipe.tokenizer_2))
            if self.model_config.apply_lg_attn_mask:
                for encoder, tokenizer in (
                    (pipe.text_encoder, pipe.tokenizer),
                    (pipe.text_encoder_2, pipe.tokenizer_2),
                ):
                    build_mask = text_encoding.find_padding_after_end(tokenizer.eos_token_id)
                    stack.enter_context(text_encoding.mask_calls(encoder, build_mask))
            states, pooled = zip(
                *(
                    pipe._get_clip_prompt_embeds(list(prompts), device=pipe.text_encoder.device, clip_model_index=index)
                    for index in range(2)
                ),
                strict=True,
            )
        t5_embeds = cast("Tensor", t5_cond["embeds"])
        clip_embeds = torch.cat(states, dim=-1)
        clip_embeds = pad(clip_embeds, (0, t5_embeds.shape[-1] - clip_embeds.shape[-1]))
        cond: Cond = {"embeds": torch.cat([clip_embeds, t5_embeds], dim=-2), "pooled": torch.cat(pooled, dim=-1)}
        if self.model_config.clip_l_dropout_rate or self.model_config.clip_g_dropout_rate:
            # Text encoders are gone when training drops what one of the two returned; rows say where the other begins.
            cond["clip_l_width"] = t5_embeds.new_full((len(prompts), 1), states[0].shape[-1], dtype=torch.float32)
        return cond

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        max_tokens = self.max_sequence_length - 1  # minus the end token
        return text_encoding.find_truncated_prompts(pipe.tokenizer_3, prompts, max_tokens)

    @property
    def max_sequence_length(self) -> int:
        return self.model_config.t5xxl_max_token_length or 256

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        embeds, pooled = self._drop_text(batch)
        with self._choose_positions(pipe.transformer.pos_embed, noisy_latents, batch):
            predicted: Tensor = denoiser(
                hidden_states=noisy_latents,
                timestep=timesteps,
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        return predicted

    def _drop_text(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Zero what single text encoders return for some samples, in training."""
        import torch

        from ...diffusion.noise import copy_async

        embeds, pooled = cast("Tensor", batch.cond["embeds"]), cast("Tensor", batch.cond["pooled"])
        options = self.model_config
        rates = options.clip_l_dropout_rate, options.clip_g_dropout_rate, options.t5_dropout_rate
        if batch.build_draws is None or not any(rates):
            return embeds, pooled
        draws = batch.build_draws(Purpose.TEXT_DROPOUT)
        drawn = [[draw.random() >= rate for rate in rates] for draw in draws]
        keeps_l, keeps_g, keeps_t5 = copy_async(torch.tensor(drawn), embeds).unbind(1)

        def mask_clip(width: int) -> Tensor:
            """Build the factors (B, width) of features, of which those of CLIP-L come first."""
            if "clip_l_width" not in batch.cond:
                return embeds.new_ones(len(embeds), width)
            is_l = torch.arange(width, device=embeds.device) < cast("Tensor", batch.cond["clip_l_width"])
            return torch.where(is_l, keeps_l.unsqueeze(1), keeps_g.unsqueeze(1))

        clip, t5 = embeds[:, :CLIP_TOKENS], embeds[:, CLIP_TOKENS:]
        kept = [clip * mask_clip(clip.shape[-1]).unsqueeze(1), t5 * keeps_t5[:, None, None]]
        return torch.cat(kept, dim=1), pooled * mask_clip(pooled.shape[-1])

    def _choose_positions(self, patch_embed: Any, latents: Tensor, batch: Batch) -> AbstractContextManager[None]:
        from ..sd3_positions import PositionCrops, replace_positions

        options = self.model_config
        is_random = options.pos_emb_random_crop_rate and batch.build_draws is not None
        sides = batch.resolution_sides if options.enable_scaled_pos_embed else ()
        if not is_random and not sides:
            return nullcontext()
        draws = batch.build_draws(Purpose.POSITION_CROP) if is_random and batch.build_draws else None
        crops = PositionCrops(options.pos_emb_random_crop_rate, draws, sides)
        return replace_positions(patch_embed, crops.build_embeds(patch_embed, *latents.shape[-2:]))


def _get_sd3_variant(config: Any) -> str:
    """sd-scripts' name of the variant; only 3.5-medium has blocks with two attentions."""
    if config.qk_norm is None:
        return "medium"
    return "5-medium" if config.dual_attention_layers else "5-large"
