"""Stable Diffusion XL: UNet with size conditioning and two CLIP text encoders; epsilon or v prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import LDM_KEYS
from ...config.network_args import NetworkFacts
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
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import (
    CLIP_G_TOKENIZER,
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


def is_refiner(read: ConfigReader) -> bool:
    """Whether the UNet gets five numbers beside the pooled text, where the base model gets six."""
    unet, encoder = read_required(read, "unet/config.json"), read("text_encoder_2/config.json") or {}
    width = encoder.get("projection_dim", 1280) + 5 * unet.get("addition_time_embed_dim", 256)
    return bool(unet.get("projection_class_embeddings_input_dim") == width)


def match_sdxl(read: ConfigReader, in_channels: int = 4) -> FamilyMatch | None:
    """Check a UNet with the size conditioning of Stable Diffusion XL."""
    unet = read_required(read, "unet/config.json")
    if unet.get("addition_embed_type") != "text_time":
        raise ModelError(
            "its UNet has no size conditioning (addition_embed_type text_time), as Stable Diffusion XL has"
        )
    if is_refiner(read):
        raise ModelError("its UNet is the refiner's, whose pipeline class is StableDiffusionXLImg2ImgPipeline")
    return match_unet_model(read, in_channels=in_channels)


FACTS = FamilyFacts(
    title="Stable Diffusion XL",
    pipeline=PipelineFacts(
        class_name="StableDiffusionXLPipeline",
        denoisers=("unet",),
        num_parameters=2_567_463_684,
    ),
    detection=DetectionFacts(
        match_configs=match_sdxl,
        keys=("input_blocks.0.0.weight", "label_emb.0.0.weight"),
        shape_checks={
            ("input_blocks.0.0.weight", 0): ("unet", "block_out_channels", 0),
            ("input_blocks.0.0.weight", 1): ("unet", "in_channels"),
            ("label_emb.0.0.weight", 1): ("unet", "projection_class_embeddings_input_dim"),
        },
        unsupported_shapes=UNET_UNSUPPORTED_SHAPES,
        trainer_names=TrainerNames(
            ai_toolkit=("sdxl", "is_xl"),
            diffusion_pipe=("sdxl",),
            kohya_gui=("sdxl", "sdxl_checkbox"),
            onetrainer=("STABLE_DIFFUSION_XL_10_BASE",),
            simpletuner=("sdxl",),
            simpletuner_flavours={
                "base-1.0": "stabilityai/stable-diffusion-xl-base-1.0",
                "base-0.9": "stabilityai/stable-diffusion-xl-base-0.9",
            },
            simpletuner_default="base-1.0",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "unet": DENOISER_PREFIXES,
            "vae": UNET_VAE_PREFIXES,
            "text_encoder": ("conditioner.embedders.0.transformer.",),
            "text_encoder_2": ("conditioner.embedders.1.model.",),
        },
    ),
    lora=FamilyLora(
        targets=UNET_LORA_TARGET_MODULES,
        targets_of="sd-scripts",
        conv_targets=UNET_CONV_LORA_TARGET_MODULES,
        text_encoders={
            "text_encoder": TextEncoderLora(CLIP_LORA_TARGET_MODULES, "lora_te1"),
            "text_encoder_2": TextEncoderLora(CLIP_LORA_TARGET_MODULES, "lora_te2"),
        },
        key_style=LDM_KEYS,
        modelspec_architecture="stable-diffusion-xl",
        modelspec_implementation="https://github.com/Stability-AI/generative-models",
    ),
    blocks=BlockFacts(has_skip_connections=True),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer_repo_ids={
            "tokenizer": CLIP_L_TOKENIZER,
            "tokenizer_2": CLIP_G_TOKENIZER,
        },
        embedding_keys={"text_encoder": "clip_l", "text_encoder_2": "clip_g"},
    ),
    sampling=SamplingFacts(num_inference_steps=30, guidance_scale=7.5),
    options=FamilyOptions(
        components={"vae": "vae", "clip_l": "text_encoder", "clip_g": "text_encoder_2"},
        extra=("max_token_length", "weighted_captions"),
        network=NetworkFacts(unet_blocks=(9, 3, 9), unet_outer_blocks=(1, 1)),
        kohya_objective=KOHYA_UNET_OBJECTIVE,
    ),
)


class StableDiffusionXL(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sdxl_base_v1-0", "stable-diffusion-xl-v1-base")

    def list_text_encoders(self, pipe: Any) -> list[tuple[Any, Any]]:
        """List tokenizers and text encoders, of which the last one makes the pooled embedding."""
        return [(pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)]

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from ..text_encoding import CHUNK_LENGTH, tokenize_for_clip

        states = []
        for tokenizer, encoder in self.list_text_encoders(pipe):
            tokens = tokenize_for_clip(tokenizer, prompts, self.model_config)
            output = encoder(tokens.rows.to(encoder.device, non_blocking=True), output_hidden_states=True)
            states.append(tokens.join_states(output.hidden_states[-2]))
        pooled = output.text_embeds[
            :: self.model_config.max_token_length // CHUNK_LENGTH
        ]  # of the first chunk of each prompt
        return {"embeds": torch.cat(states, dim=-1), "pooled": pooled}

    def get_unused_text_layers(self, encoder: Any, component: str) -> tuple[str, ...]:
        from .. import text_encoding

        # Only the second encoder's last layer is used, for the pooled embedding.
        return text_encoding.get_last_layer_names(encoder, 1) if component == "text_encoder" else ()

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_captions(self.list_text_encoders(pipe)[0][0], prompts, self.model_config)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        # time_ids: original size, crop top-left, target size; height first; see dataloader/augment.py.
        added_cond = {"text_embeds": batch.cond["pooled"], "time_ids": batch.size_conditioning}
        predicted: Tensor = denoiser(
            noisy_latents,
            timesteps,
            encoder_hidden_states=batch.cond["embeds"],
            added_cond_kwargs=added_cond,
            return_dict=False,
        )[0]
        return predicted
