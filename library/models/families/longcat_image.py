"""LongCat-Image: FLUX.1's blocks, text of Qwen2.5-VL padded to 512 tokens; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ...adapters.original_module_names import TRANSFORMER_LOADER_KEYS
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
from ..shared_facts import DENOISER_PREFIXES, MASKED_ATTENTION_MODES, match_flow_model
from .flux import build_single_file_layout

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt


LONGCAT_MAX_SEQUENCE_LENGTH = 512
"""Tokens of the padded prompt, as in diffusers' pipeline; the positions of the image begin after them."""


def _match_longcat_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    blocks = f"{config.get('num_layers')} double and {config.get('num_single_layers')} single blocks"
    return match_flow_model(read, 4, f"the transformer has {blocks}")


FACTS = FamilyFacts(
    title="LongCat-Image",
    pipeline=PipelineFacts(
        class_name="LongCatImagePipeline", num_parameters=6_270_668_864, hub_id="meituan-longcat/LongCat-Image"
    ),
    detection=DetectionFacts(
        match_configs=_match_longcat_image,
        # Others with FLUX.1's blocks have texts of another width.
        keys=("double_blocks.0.img_attn.qkv.weight", "img_in.weight", "txt_in.weight"),
        diffusers_keys={
            "double_blocks.0.img_attn.qkv.weight": "time_embed.timestep_embedder.linear_1.weight",
            "img_in.weight": "x_embedder.weight",
            "txt_in.weight": "context_embedder.weight",
        },
        shape_checks={
            ("img_in.weight", 1): ("transformer", "in_channels"),
            ("txt_in.weight", 1): ("transformer", "joint_attention_dim"),
        },
        trainer_names=TrainerNames(
            simpletuner=("longcat_image",),
            simpletuner_flavours={"final": "meituan-longcat/LongCat-Image", "dev": "meituan-longcat/LongCat-Image-Dev"},
            simpletuner_default="final",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen25_7b.transformer.",),
        },
        layout=build_single_file_layout("time_embed.timestep_embedder"),
    ),
    lora=FamilyLora(
        # The attention of the image stream and of the single blocks.
        targets=("to_q", "to_k", "to_v", "to_out.0"),
        targets_of="SimpleTuner",
        key_style=TRANSFORMER_LOADER_KEYS,
        format="diffusers",
        modelspec_architecture="longcat-image",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks", "single_transformer_blocks"),
        token_args={"image_rotary_emb": ((0, ("encoder_hidden_states", "hidden_states")),) * 2},
        single_stream_lists=("single_transformer_blocks",),
        fused_layers={r"single_transformer_blocks\.\d+\.proj_out$": ("rowwise", (1, 4))},
        attention_modes=(*MASKED_ATTENTION_MODES, "flash", "flash3"),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "meituan-longcat/LongCat-Image:tokenizer"},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=4.5),
    options=FamilyOptions(components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"}),
    notes="LoRA in diffusers: `transformer.load_lora_adapter`",
)


class LongCatImage(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("longcat_image", "longcat-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            return {"embeds": pipe._encode_prompt(list(prompts))}  # padded; the transformer has no mask

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        shape = len(prompts), LONGCAT_MAX_SEQUENCE_LENGTH, pipe.transformer.config.joint_attention_dim
        return {"embeds": torch.empty(shape, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, LONGCAT_MAX_SEQUENCE_LENGTH)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..constant_copies import copy_constant

        count, channels, height, width = noisy_latents.shape
        embeds = cast("Tensor", batch.cond["embeds"])
        # Positions are (stream, row, column): text on the diagonal, the image after the longest text.
        text = torch.arange(embeds.shape[1], dtype=torch.float32)
        rows, columns = (
            torch.arange(side // 2, dtype=torch.float32) + LONGCAT_MAX_SEQUENCE_LENGTH for side in (height, width)
        )
        grid = torch.stack(torch.meshgrid(torch.ones(1), rows, columns, indexing="ij"), dim=-1)
        ids = torch.stack([torch.zeros_like(text), text, text], dim=1), grid.flatten(0, 2)
        txt_ids, img_ids = (copy_constant(each, noisy_latents.device) for each in ids)
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents, count, channels, height, width),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            txt_ids=txt_ids,
            img_ids=img_ids,
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return unpacked

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        return {**super().build_sampling_kwargs(pipe, prompt, cond, negative_cond), "enable_prompt_rewrite": False}


def _build_pipeline_class() -> Any:
    """diffusers' pipeline, which as of 0.42 fails with ``prompt_embeds``: it counts the prompts, which are None then.

    It also has the text encoder's inputs on the device of whichever component comes first.
    """
    from diffusers import LongCatImagePipeline

    def encode_prompt(self: Any, prompt: Any = None, num_images_per_prompt: int = 1, prompt_embeds: Any = None) -> Any:
        prompts = [""] * len(prompt_embeds) if prompt_embeds is not None else prompt
        return LongCatImagePipeline.encode_prompt(self, prompts, num_images_per_prompt, prompt_embeds)

    def get_device(self: Any) -> Any:
        encoder = getattr(self, "text_encoder", None)
        return super(LongCatImagePipeline, self).device if encoder is None else encoder.device

    attributes = {"encode_prompt": encode_prompt, "device": property(get_device), "__module__": __name__}
    return type("LongCatImagePipeline", (LongCatImagePipeline,), attributes)
