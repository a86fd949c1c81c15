"""Ovis-Image: FLUX.1's blocks with gated MLPs, text of Ovis 2.5 (Qwen3) padded to 256 tokens; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ...adapters.original_module_names import TRANSFORMER_LOADER_KEYS, OriginalModule
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
)
from ..model_configs import ConfigReader, read_required
from ..shared_facts import (
    DENOISER_PREFIXES,
    JOINT_ATTENTION_LORA_TARGET_MODULES,
    MASKED_ATTENTION_MODES,
    match_flow_model,
)
from .flux import build_single_file_layout

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

OVIS_MAX_SEQUENCE_LENGTH = 256
"""Tokens of the padded prompt without the ``user_prompt_begin_id`` tokens before it, as in diffusers' pipeline."""


def _match_ovis_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    blocks = f"{config.get('num_layers')} double and {config.get('num_single_layers')} single blocks"
    return match_flow_model(read, 4, f"the transformer has {blocks}")


FACTS = FamilyFacts(
    title="Ovis-Image",
    pipeline=PipelineFacts(
        class_name="OvisImagePipeline", num_parameters=7_370_449_728, hub_id="AIDC-AI/Ovis-Image-7B"
    ),
    detection=DetectionFacts(
        match_configs=_match_ovis_image,
        keys=("double_blocks.0.img_mlp.gate_proj.weight", "img_in.weight", "txt_in.weight"),
        diffusers_keys={
            "double_blocks.0.img_mlp.gate_proj.weight": "context_embedder_norm.weight",
            "img_in.weight": "x_embedder.weight",
            "txt_in.weight": "context_embedder.weight",
        },
        shape_checks={
            ("img_in.weight", 1): ("transformer", "in_channels"),
            ("txt_in.weight", 1): ("transformer", "joint_attention_dim"),
        },
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen3_2b.transformer.",),
        },
        layout=build_single_file_layout("timestep_embedder", OriginalModule("txt_norm", ("context_embedder_norm",))),
        joins={"mlp.0": ("mlp.up_proj", "mlp.gate_proj"), "mlp.2": ("mlp.down_proj",)},
    ),
    lora=FamilyLora(
        # The attention of all blocks; ComfyUI has other names for the gated MLPs.
        targets=JOINT_ATTENTION_LORA_TARGET_MODULES,
        key_style=TRANSFORMER_LOADER_KEYS,
        format="diffusers",
        modelspec_architecture="ovis-image",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks", "single_transformer_blocks"),
        token_args={"image_rotary_emb": ((0, ("encoder_hidden_states", "hidden_states")),) * 2},
        single_stream_lists=("single_transformer_blocks",),
        fused_layers={
            r"single_transformer_blocks\.\d+\.proj_mlp$": ("colwise", (1, 1)),
            r"single_transformer_blocks\.\d+\.proj_out$": ("rowwise", (1, 4)),
        },
        attention_modes=(*MASKED_ATTENTION_MODES, "flash", "flash3"),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "AIDC-AI/Ovis-Image-7B:tokenizer"},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0),
    options=FamilyOptions(components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"}),
    notes="LoRA in diffusers: `transformer.load_lora_adapter`",
)


class OvisImage(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("ovis_image", "ovis-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        device, max_length = pipe.text_encoder.device, OVIS_MAX_SEQUENCE_LENGTH
        embeds = pipe._get_ovis_prompt_embeds(list(prompts), max_sequence_length=max_length, device=device)
        return {"embeds": embeds}  # padding is zero; the transformer has no mask

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        shape = len(prompts), OVIS_MAX_SEQUENCE_LENGTH, pipe.transformer.config.joint_attention_dim
        return {"embeds": torch.empty(shape, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        by_text = {}
        for prompt in prompts:
            (text,) = pipe._get_messages(prompt)
            end = text.rfind(prompt)
            by_text[text[: end + len(prompt)] if end >= 0 else text] = prompt
        max_tokens = OVIS_MAX_SEQUENCE_LENGTH + pipe.user_prompt_begin_id
        return [by_text[text] for text in text_encoding.find_truncated_prompts(pipe.tokenizer, [*by_text], max_tokens)]

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..constant_copies import copy_constant

        count, channels, height, width = noisy_latents.shape
        embeds = cast("Tensor", batch.cond["embeds"])
        # Built on the CPU and copied asynchronously: the pipeline's own copies would synchronize.
        img_ids = pipe._prepare_latent_image_ids(count, height // 2, width // 2, None, noisy_latents.dtype)
        positions = torch.arange(embeds.shape[1], dtype=noisy_latents.dtype)
        txt_ids = torch.stack([torch.zeros_like(positions), positions, positions], dim=1)
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents, count, channels, height, width),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            txt_ids=copy_constant(txt_ids, noisy_latents.device),
            img_ids=copy_constant(img_ids, noisy_latents.device),
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return unpacked

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        return {**super().build_sampling_kwargs(pipe, prompt, cond, negative_cond), "negative_prompt": None}
