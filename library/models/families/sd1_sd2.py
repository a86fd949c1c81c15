"""Stable Diffusion 1.x and 2.x: UNet with one CLIP or OpenCLIP text encoder; epsilon or v prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import LDM_KEYS
from ...config.network_args import NetworkFacts
from ...config.schema import ModelConfig
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
    SingleFileFacts,
    TextEncoderLora,
    TextFacts,
    TrainerNames,
)
from ..model_configs import ConfigReader, read_required
from ..shared_facts import (
    CLIP_L_TOKENIZER,
    CLIP_LORA_TARGET_MODULES,
    DENOISER_PREFIXES,
    KOHYA_UNET_OBJECTIVE,
    UNET_CONV_LORA_TARGET_MODULES,
    UNET_LORA_TARGET_MODULES,
    UNET_UNSUPPORTED_SHAPES,
    UNET_VAE_PREFIXES,
    match_unet_model,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond


def _match_sd1(read: ConfigReader) -> FamilyMatch | None:
    return None if is_sd2(read) else match_unet_model(read)


def _match_sd2(read: ConfigReader) -> FamilyMatch | None:
    return match_unet_model(read) if is_sd2(read) else None


def is_sd2(read: ConfigReader) -> bool:
    """Whether the UNet is one of Stable Diffusion 2."""
    unet = read_required(read, "unet/config.json")
    return unet.get("cross_attention_dim") == 1024 or bool(unet.get("use_linear_projection"))


def _validate_clip_skip(read: ConfigReader, options: ModelConfig) -> Iterator[Problem]:
    layers = (read("text_encoder/config.json") or {}).get("num_hidden_layers", 12)
    if options.clip_skip == 0:
        text = "0 is the input of the first layer in sd-scripts; 1 is the last layer, 2 the one before it"
        yield Problem("clip_skip", text)
    elif (options.clip_skip or 1) > layers:
        yield Problem("clip_skip", f"{options.clip_skip}; the text encoder has {layers} layers, and 1 or 2 are usual")


SD1_FACTS = FamilyFacts(
    title="Stable Diffusion 1",
    pipeline=PipelineFacts(
        class_name="StableDiffusionPipeline",
        denoisers=("unet",),
        num_parameters=859_520_964,
    ),
    detection=DetectionFacts(
        match_configs=_match_sd1,
        keys=("input_blocks.0.0.weight", "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"),
        shape_checks={
            ("input_blocks.0.0.weight", 0): ("unet", "block_out_channels", 0),
            ("input_blocks.0.0.weight", 1): ("unet", "in_channels"),
            ("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", 1): ("unet", "cross_attention_dim"),
        },
        unsupported_shapes=UNET_UNSUPPORTED_SHAPES,
        trainer_names=TrainerNames(
            ai_toolkit=("sd1",),
            kohya_gui=("",),
            onetrainer=("STABLE_DIFFUSION_15",),
            simpletuner=("sd1x",),
            simpletuner_flavours={
                "1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
                "1.4": "CompVis/stable-diffusion-v1-4",
                "dreamshaper": "Lykon/dreamshaper-8",
            },
            simpletuner_default="dreamshaper",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "unet": DENOISER_PREFIXES,
            "vae": UNET_VAE_PREFIXES,
            "text_encoder": ("cond_stage_model.transformer.",),
        },
    ),
    lora=FamilyLora(
        targets=UNET_LORA_TARGET_MODULES,
        targets_of="sd-scripts",
        conv_targets=UNET_CONV_LORA_TARGET_MODULES,
        preset_targets=(
            "conv_in",
            "conv_out",
            "time_embedding.linear_1",
            "time_embedding.linear_2",
        ),
        text_encoders={"text_encoder": TextEncoderLora(CLIP_LORA_TARGET_MODULES, "lora_te")},
        other_key_styles=(LDM_KEYS,),
        modelspec_architecture="stable-diffusion-v1",
    ),
    blocks=BlockFacts(has_skip_connections=True),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": CLIP_L_TOKENIZER},
        embedding_keys={"text_encoder": "clip_l"},
    ),
    sampling=SamplingFacts(num_inference_steps=30, guidance_scale=7.5, image_size=(512, 512)),
    options=FamilyOptions(
        components={"vae": "vae", "clip_l": "text_encoder"},
        extra=("clip_skip", "max_token_length", "weighted_captions"),
        validate=_validate_clip_skip,
        network=NetworkFacts(unet_blocks=(12, 1, 12)),
        kohya_objective=KOHYA_UNET_OBJECTIVE,
    ),
)

SD2_FACTS = replace(
    SD1_FACTS,
    title="Stable Diffusion 2",
    pipeline=replace(SD1_FACTS.pipeline, num_parameters=865_910_724),
    detection=replace(
        SD1_FACTS.detection,
        match_configs=_match_sd2,
        trainer_names=TrainerNames(
            ai_toolkit=("sd2", "is_v2"),
            kohya_gui=("v2",),
            onetrainer=(
                "STABLE_DIFFUSION_20",
                "STABLE_DIFFUSION_20_BASE",
                "STABLE_DIFFUSION_21",
                "STABLE_DIFFUSION_21_BASE",
            ),
            simpletuner=("sd2x",),
            simpletuner_flavours={
                "2.1": "stabilityai/stable-diffusion-2-1",
                "2.0": "stabilityai/stable-diffusion-2-0",
                "pseudoflex-v2": "bghira/pseudo-flex-v2",
                "pseudojourney": "bghira/pseudo-journey-v2",
                "digitaldiffusion": "Junglerally/Digital-Diffusion",
            },
            simpletuner_default="pseudoflex-v2",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "unet": DENOISER_PREFIXES,
            "vae": UNET_VAE_PREFIXES,
            "text_encoder": ("cond_stage_model.model.",),
        },
    ),
    lora=replace(SD1_FACTS.lora, modelspec_architecture="stable-diffusion-v2"),
    text=replace(SD1_FACTS.text, tokenizer_repo_ids={"tokenizer": "stabilityai/stable-diffusion-2:tokenizer"}),
    options=replace(SD1_FACTS.options, components={"vae": "vae", "text_encoder": "text_encoder"}, is_version_2=True),
)


class StableDiffusion1(Family):
    """Stable Diffusion 1.x, whose text encoder is CLIP."""

    facts = SD1_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sd_v1", "stable-diffusion-v1")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from ..text_encoding import encode_with_clip

        return {"embeds": encode_with_clip(pipe, prompts, self.model_config)}

    def get_unused_text_layers(self, encoder: Any, component: str) -> tuple[str, ...]:
        from .. import text_encoding

        return text_encoding.get_last_layer_names(encoder, (self.model_config.clip_skip or 1) - 1)

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_captions(pipe.tokenizer, prompts, self.model_config)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        predicted: Tensor = denoiser(
            noisy_latents, timesteps, encoder_hidden_states=batch.cond["embeds"], return_dict=False
        )[0]
        return predicted


class StableDiffusion2(StableDiffusion1):
    """Stable Diffusion 2.x, whose text encoder is OpenCLIP's."""

    facts = SD2_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        if pipe.scheduler.config.prediction_type == "v_prediction":
            return BaseModelInfo("sd_v2_v", "stable-diffusion-v2-768-v")
        return BaseModelInfo("sd_v2", "stable-diffusion-v2-512")
