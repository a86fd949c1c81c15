"""Stable Diffusion 1.x and 2.x: UNet with one CLIP or OpenCLIP text encoder; epsilon or v prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...adapters.original_module_names import LDM_KEYS
from ...config.network_args import NetworkFacts
from ...config.schema import ModelConfig
from ...problems import Problem
from ..base import BaseModelInfo, Family
from ..facts import FamilyFacts, FamilyMatch
from ..model_configs import ConfigReader, read_required
from ..shared_facts import (
    CLIP_L_TOKENIZER,
    CLIP_LORA_TARGET_MODULES,
    DENOISER_PREFIXES,
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
    return None if _is_sd2(read) else match_unet_model(read)


def _match_sd2(read: ConfigReader) -> FamilyMatch | None:
    return match_unet_model(read) if _is_sd2(read) else None


def _is_sd2(read: ConfigReader) -> bool:
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
    name="sd1",
    title="Stable Diffusion 1",
    pipeline_class="StableDiffusionPipeline",
    denoiser_name="unet",
    components=("unet", "vae", "text_encoder", "tokenizer"),
    num_parameters=859_520_964,
    lora_targets_of="sd-scripts",
    match_configs=_match_sd1,
    component_options={"vae": "vae", "clip_l": "text_encoder"},
    text_encoders=("text_encoder",),
    extra_options=("clip_skip", "max_token_length"),
    network=NetworkFacts(unet_blocks=(12, 1, 12)),
    modelspec_architecture="stable-diffusion-v1",
    validate_options=_validate_clip_skip,
    single_file_prefixes={
        "unet": DENOISER_PREFIXES,
        "vae": UNET_VAE_PREFIXES,
        "text_encoder": ("cond_stage_model.transformer.",),
    },
    single_file_keys=("input_blocks.0.0.weight", "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"),
    unsupported_shapes=UNET_UNSUPPORTED_SHAPES,
    shape_checks={
        ("input_blocks.0.0.weight", 0): ("unet", "block_out_channels", 0),
        ("input_blocks.0.0.weight", 1): ("unet", "in_channels"),
        ("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", 1): ("unet", "cross_attention_dim"),
    },
)

SD2_FACTS = replace(
    SD1_FACTS,
    name="sd2",
    title="Stable Diffusion 2",
    num_parameters=865_910_724,
    match_configs=_match_sd2,
    component_options={"vae": "vae"},
    is_version_2=True,
    modelspec_architecture="stable-diffusion-v2",
    single_file_prefixes={
        "unet": DENOISER_PREFIXES,
        "vae": UNET_VAE_PREFIXES,
        "text_encoder": ("cond_stage_model.model.",),
    },
)


class StableDiffusion1(Family):
    """Stable Diffusion 1.x."""

    facts = SD1_FACTS
    denoiser_name = "unet"
    has_skip_connections = True
    text_components = ("text_encoder", "tokenizer")
    tokenizer_repo_ids = {"tokenizer": CLIP_L_TOKENIZER}
    lora_target_modules: ClassVar[tuple[str, ...]] = UNET_LORA_TARGET_MODULES
    conv_lora_target_modules = UNET_CONV_LORA_TARGET_MODULES
    preset_lora_target_modules: ClassVar[tuple[str, ...]] = (
        "conv_in",
        "conv_out",
        "time_embedding.linear_1",
        "time_embedding.linear_2",
    )
    lora_other_key_styles = (LDM_KEYS,)
    text_lora_target_modules = {"text_encoder": CLIP_LORA_TARGET_MODULES}
    text_lora_prefixes = {"text_encoder": "lora_te"}
    default_image_size = (512, 512)
    default_num_inference_steps = 30
    default_guidance_scale = 7.5

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

        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, self.model_config.max_token_length)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        predicted: Tensor = denoiser(
            noisy_latents, timesteps, encoder_hidden_states=batch.cond["embeds"], return_dict=False
        )[0]
        return predicted


class StableDiffusion2(StableDiffusion1):
    """Stable Diffusion 2.x, whose text encoder is OpenCLIP's."""

    facts = SD2_FACTS
    tokenizer_repo_ids = {"tokenizer": "stabilityai/stable-diffusion-2:tokenizer"}

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        if pipe.scheduler.config.prediction_type == "v_prediction":
            return BaseModelInfo("sd_v2_v", "stable-diffusion-v2-768-v")
        return BaseModelInfo("sd_v2", "stable-diffusion-v2-512")
