"""Bria 3.2: FLUX.1's blocks without pooled text and guidance, T5 padded with zeros, the VAE of SDXL; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

from ...adapters.original_module_names import TRANSFORMER_LOADER_KEYS
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
from ..model_configs import ConfigReader, read_required
from ..shared_facts import (
    JOINT_ATTENTION_LORA_TARGET_MODULES,
    MASKED_ATTENTION_MODES,
    T5_TOKENIZER,
    match_flow_model,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond

BRIA_MAX_SEQUENCE_LENGTH = 128
"""Tokens of the padded prompt, as in diffusers' pipeline."""


def _match_bria(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    blocks = f"{config.get('num_layers')} double and {config.get('num_single_layers')} single blocks"
    return match_flow_model(read, 4, f"the transformer has {blocks}")


FACTS = FamilyFacts(
    title="Bria 3.2",
    pipeline=PipelineFacts(class_name="BriaPipeline", num_parameters=3_785_669_392, hub_id="briaai/BRIA-3.2"),
    detection=DetectionFacts(match_configs=_match_bria),
    lora=FamilyLora(
        # The attention of all blocks.
        targets=JOINT_ATTENTION_LORA_TARGET_MODULES,
        key_style=TRANSFORMER_LOADER_KEYS,
        format="diffusers",
        modelspec_architecture="bria-3.2",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks", "single_transformer_blocks"),
        token_args={"image_rotary_emb": ((0, ("encoder_hidden_states", "hidden_states")),) * 2},
        single_stream_lists=("single_transformer_blocks",),
        # One matrix for the output of the attention and of the MLP.
        fused_layers={r"single_transformer_blocks\.\d+\.proj_out$": ("rowwise", (1, 4))},
        attention_modes=(*MASKED_ATTENTION_MODES, "flash", "flash3"),
    ),
    text=TextFacts(components=("text_encoder", "tokenizer"), tokenizer_repo_ids={"tokenizer": T5_TOKENIZER}),
    sampling=SamplingFacts(num_inference_steps=30, guidance_scale=5.0),
    options=FamilyOptions(components={"vae": "vae", "t5xxl": "text_encoder"}),
    notes="from folders and the hub; LoRA in diffusers: `transformer.load_lora_adapter`",
)


class Bria(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("bria_3_2", "bria-3.2")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from torch.nn.functional import pad

        ids = pipe.tokenizer(
            list(prompts), padding=True, max_length=BRIA_MAX_SEQUENCE_LENGTH, truncation=True, return_tensors="pt"
        )
        device, mask = pipe.text_encoder.device, ids.attention_mask
        states = pipe.text_encoder(
            ids.input_ids.to(device, non_blocking=True), attention_mask=mask.to(device, non_blocking=True)
        )[0]
        # The pipeline takes zeros for an empty negative prompt, so an empty caption is its unconditional text.
        is_text = mask * mask.new_tensor([[bool(prompt)] for prompt in prompts])
        embeds = states * is_text.to(device, non_blocking=True).unsqueeze(2).to(states.dtype)
        return {"embeds": pad(embeds, (0, 0, 0, BRIA_MAX_SEQUENCE_LENGTH - embeds.shape[1]))}  # there is no mask

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        shape = len(prompts), BRIA_MAX_SEQUENCE_LENGTH, pipe.transformer.config.joint_attention_dim
        return {"embeds": torch.empty(shape, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        max_tokens = BRIA_MAX_SEQUENCE_LENGTH - 1  # minus the end token
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, max_tokens)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..constant_copies import copy_constant

        count, channels, height, width = noisy_latents.shape
        embeds = cast("Tensor", batch.cond["embeds"])
        # Built on the CPU and copied asynchronously: the pipeline's own copies would synchronize.
        img_ids = pipe._prepare_latent_image_ids(1, height // 2, width // 2, None, noisy_latents.dtype)[0]
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents, count, channels, height, width),
            timestep=timesteps,
            encoder_hidden_states=embeds,
            txt_ids=noisy_latents.new_zeros(embeds.shape[1], 3),
            img_ids=copy_constant(img_ids, noisy_latents.device),
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=2)
        return unpacked


def _build_pipeline_class() -> Any:
    """diffusers' pipeline, which can be built without a VAE: it is loaded later than the text encoder."""
    from diffusers import BriaPipeline

    pipeline: Any = BriaPipeline

    class PartialPipeline(pipeline):  # type: ignore[misc]
        def __init__(
            self,
            transformer: Any,
            scheduler: Any,
            vae: Any,
            text_encoder: Any,
            tokenizer: Any,
            image_encoder: Any = None,
            feature_extractor: Any = None,
        ) -> None:
            # The last thing that it does is to look at the config of the VAE.
            with suppress(AttributeError) if vae is None else nullcontext():
                super().__init__(transformer, scheduler, vae, text_encoder, tokenizer, image_encoder, feature_extractor)

    return copy_class_name(PartialPipeline, pipeline)
