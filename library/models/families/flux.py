"""FLUX.1 dev and schnell: packed 2 x 2 latent patches, CLIP's pooled embedding and T5; flow matching.

dev is guidance-distilled and has a guidance embedding; schnell has none and is sampled in four steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from ...config.schema import ModelConfig
from ...problems import Problem
from ..base import BaseModelInfo, T5Family
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
from ..family_noise_levels import LOGIT_NORMAL, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import (
    CLIP_L_PREFIXES,
    CLIP_L_TOKENIZER,
    CLIP_LORA_TARGET_MODULES,
    DENOISER_PREFIXES,
    JOINT_BLOCK_LORA_TARGET_MODULES,
    KOHYA_FLOW_OBJECTIVE,
    MASKED_ATTENTION_MODES,
    T5_LORA_TARGET_MODULES,
    T5_PREFIXES,
    T5_TOKENIZER,
    match_flow_model,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt


def _match_flux(read: ConfigReader) -> FamilyMatch:
    has_guidance = bool(read_required(read, "transformer/config.json").get("guidance_embeds", False))
    variant = "has a guidance embedding (dev)" if has_guidance else "has no guidance embedding (schnell)"
    return replace(match_flow_model(read, 4, f"the transformer {variant}"), has_guidance_embeds=has_guidance)


def _validate_flux_guidance(read: ConfigReader, options: ModelConfig) -> Iterator[Problem]:
    has_guidance = (read("transformer/config.json") or {}).get("guidance_embeds", False)
    if not has_guidance and options.guidance_scale != ModelConfig.guidance_scale:
        yield Problem("guidance_scale", "FLUX.1 schnell has no guidance embedding", "leave this option out")


_STREAM_NAMES = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")
_SINGLE_BLOCK = "single_transformer_blocks.{}"

_LAYOUT: tuple[OriginalModule, ...] = (
    *build_stream_modules("double_blocks.{}.img_", "transformer_blocks", IMAGE_STREAM, _STREAM_NAMES),
    *build_stream_modules("double_blocks.{}.txt_", "transformer_blocks", TEXT_STREAM, _STREAM_NAMES),
    OriginalModule(
        "single_blocks.{}.linear1",
        tuple(f"{_SINGLE_BLOCK}.{part}" for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        output_ratios=(1, 1, 1, 4),
    ),
    OriginalModule("single_blocks.{}.linear2", (f"{_SINGLE_BLOCK}.proj_out",)),
    OriginalModule("single_blocks.{}.modulation.lin", (f"{_SINGLE_BLOCK}.norm.linear",)),
    OriginalModule("img_in", ("x_embedder",)),
    OriginalModule("txt_in", ("context_embedder",)),
    OriginalModule("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
    OriginalModule("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
    OriginalModule("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
    OriginalModule("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
    OriginalModule("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
    OriginalModule("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
    OriginalModule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swaps_scale_shift=True),
    OriginalModule("final_layer.linear", ("proj_out",)),
)


def build_single_file_layout(timestep_embedder: str, *more: OriginalModule) -> tuple[OriginalModule, ...]:
    """The modules of a model with FLUX.1's blocks, norms included; where diffusers has its timestep embedder."""
    norms = (
        ("double_blocks.{}.img_attn.norm.query_norm", "transformer_blocks.{}.attn.norm_q"),
        ("double_blocks.{}.img_attn.norm.key_norm", "transformer_blocks.{}.attn.norm_k"),
        ("double_blocks.{}.txt_attn.norm.query_norm", "transformer_blocks.{}.attn.norm_added_q"),
        ("double_blocks.{}.txt_attn.norm.key_norm", "transformer_blocks.{}.attn.norm_added_k"),
        ("single_blocks.{}.norm.query_norm", f"{_SINGLE_BLOCK}.attn.norm_q"),
        ("single_blocks.{}.norm.key_norm", f"{_SINGLE_BLOCK}.attn.norm_k"),
        ("time_in.in_layer", f"{timestep_embedder}.linear_1"),
        ("time_in.out_layer", f"{timestep_embedder}.linear_2"),
    )
    return (*_LAYOUT, *(OriginalModule(name, (module,)) for name, module in norms), *more)


_XLABS_LAYOUT: tuple[OriginalModule, ...] = (
    *(
        OriginalModule(
            f"double_blocks.{{}}.{kind}_lora{number}", tuple(f"transformer_blocks.{{}}.{part}" for part in parts)
        )
        for number, stream in ((1, IMAGE_STREAM), (2, TEXT_STREAM))
        for kind, parts in (("qkv", stream[:3]), ("proj", stream[3:4]))
    ),
    OriginalModule(
        "single_blocks.{}.qkv_lora", tuple(f"{_SINGLE_BLOCK}.attn.{part}" for part in ("to_q", "to_k", "to_v"))
    ),
    OriginalModule("single_blocks.{}.proj_lora", (f"{_SINGLE_BLOCK}.proj_out",)),
)
"""The modules that XLabs' trainer adapts, without ``processor.`` in front of their last part; they are read."""

FLUX_KEYS = KeyStyle("flux", _LAYOUT, diffusers_width=3072)
XLABS_KEYS = KeyStyle("flux_xlabs", _XLABS_LAYOUT)


FACTS = FamilyFacts(
    title="FLUX.1",
    pipeline=PipelineFacts(class_name="FluxPipeline", num_parameters=11_901_408_320),
    detection=DetectionFacts(
        match_configs=_match_flux,
        keys=("double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight", "img_in.weight"),
        diffusers_keys={
            "double_blocks.0.img_attn.qkv.weight": "single_transformer_blocks.0.proj_mlp.weight",
            "vector_in.in_layer.weight": "time_text_embed.text_embedder.linear_1.weight",
            "guidance_in.in_layer.weight": "time_text_embed.guidance_embedder.linear_1.weight",
            "img_in.weight": "x_embedder.weight",
            "txt_in.weight": "context_embedder.weight",
        },
        shape_checks={
            ("img_in.weight", 1): ("transformer", "in_channels"),
            ("txt_in.weight", 1): ("transformer", "joint_attention_dim"),
            ("vector_in.in_layer.weight", 1): ("transformer", "pooled_projection_dim"),
            ("guidance_in.in_layer.weight", None): ("transformer", "guidance_embeds"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("flux", "flex1", "is_flux"),
            diffusion_pipe=("flux",),
            kohya_gui=("flux1_checkbox",),
            onetrainer=("FLUX_DEV_1",),
            simpletuner=("flux",),
            simpletuner_flavours={
                "dev": "black-forest-labs/FLUX.1-dev",
                "krea": "black-forest-labs/FLUX.1-Krea-dev",
                "schnell": "black-forest-labs/FLUX.1-schnell",
            },
            simpletuner_default="krea",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": CLIP_L_PREFIXES,
            "text_encoder_2": T5_PREFIXES,
        },
        layout=build_single_file_layout("time_text_embed.timestep_embedder"),
    ),
    lora=FamilyLora(
        # Every linear layer of the double and single blocks; another proj_out lies outside of them.
        targets=(
            *JOINT_BLOCK_LORA_TARGET_MODULES,
            "norm.linear",
            "proj_mlp",
            "single_transformer_blocks.*.proj_out",
        ),
        targets_of="sd-scripts",
        text_encoders={
            "text_encoder": TextEncoderLora(CLIP_LORA_TARGET_MODULES, "lora_te1"),
            "text_encoder_2": TextEncoderLora(T5_LORA_TARGET_MODULES, "lora_te3", T5_KEYS),
        },
        key_style=FLUX_KEYS,
        other_key_styles=(XLABS_KEYS,),
        modelspec_architecture="flux-1",
        modelspec_implementation="https://github.com/black-forest-labs/flux",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks", "single_transformer_blocks"),
        token_args={"image_rotary_emb": ((0, ("encoder_hidden_states", "hidden_states")),) * 2},
        single_stream_lists=("single_transformer_blocks",),
        # One matrix for the output of the attention and of the MLP.
        fused_layers={r"single_transformer_blocks\.\d+\.proj_out$": ("rowwise", (1, 4))},
        attention_modes=(*MASKED_ATTENTION_MODES, "flash", "flash3"),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer_repo_ids={"tokenizer": CLIP_L_TOKENIZER, "tokenizer_2": T5_TOKENIZER},
        t5_encoder="text_encoder_2",
        is_masked_in_denoiser=True,
    ),
    training_noise=TrainingNoiseFacts(
        other_trainers={
            "sd-scripts": NoiseLevels("flux_shift", origin="its guide; by default sigma with shift 3"),
            "ai-toolkit": LOGIT_NORMAL,
            "OneTrainer": NoiseLevels("flux_shift"),
        },
    ),
    sampling=SamplingFacts(num_inference_steps=20, guidance_scale=1.0),
    options=FamilyOptions(
        components={"ae": "vae", "vae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"},
        extra=("t5xxl_max_token_length", "guidance_scale", "apply_t5_attn_mask"),
        validate=_validate_flux_guidance,
        network=NetworkFacts(
            modules=("networks.lora_flux", "networks.oft_flux"),
            args=("train_t5xxl", "train_blocks", "train_double_block_indices", "train_single_block_indices"),
            layer_type_ranks=(
                *(
                    (f"{stream}_{part}_dim", rf"double_blocks_\d+_{stream}_{part}")
                    for part in ("attn", "mlp", "mod")
                    for stream in ("img", "txt")
                ),
                ("single_dim", r"single_blocks_\d+_linear"),
                ("single_mod_dim", r"single_blocks_\d+_modulation"),
            ),
            outer_layer_ranks=("in_dims", ("img_in", "time_in", "vector_in", "guidance_in", "txt_in")),
        ),
        kohya_objective=replace(
            KOHYA_FLOW_OBJECTIVE,
            defaults={
                "timestep_sampling": "sigma",
                "discrete_flow_shift": 3.0,
                "model_prediction_type": "sigma_scaled",
                "guidance_scale": 3.5,
            },
        ),
    ),
)


class Flux(T5Family):
    facts = FACTS

    def get_non_block_lora_targets(self, denoiser: Any) -> tuple[str, ...]:
        embedders = ("timestep", "text", "guidance") if denoiser.config.guidance_embeds else ("timestep", "text")
        layers = (f"time_text_embed.{each}_embedder.linear_{number}" for each in embedders for number in (1, 2))
        return "x_embedder", "context_embedder", *layers

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        metadata = {
            "ss_model_type": "flux",
            "ss_apply_t5_attn_mask": False,
            "ss_guidance_scale": self.model_config.guidance_scale,
        }
        return BaseModelInfo("flux1", "flux-1-dev" if _has_guidance_embeds(pipe) else "flux-1-schnell", metadata)

    def encode_t5_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        max_tokens, is_masked = self._get_max_sequence_length(pipe), self.model_config.apply_t5_attn_mask
        encoder_name = "text_encoder_2"
        embeds, mask = text_encoding.encode_with_t5(pipe, prompts, encoder_name, max_tokens, masks_padding=is_masked)
        return {"embeds": embeds} if mask is None else {"embeds": embeds, "mask": mask}

    def encode_clip_prompts(self, pipe: Any, prompts: Sequence[str], t5_cond: Cond) -> Cond:
        from .. import text_encoding

        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            pooled = pipe._get_clip_prompt_embeds(list(prompts), device=pipe.text_encoder.device)
        return {**t5_cond, "pooled": pooled}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        max_tokens = self._get_max_sequence_length(pipe) - 1  # minus the end token
        return text_encoding.find_truncated_prompts(pipe.tokenizer_2, prompts, max_tokens)

    def _get_max_sequence_length(self, pipe: Any) -> int:
        # dev and schnell differ; tell them by the scheduler, since the transformer may not be loaded yet.
        return self.model_config.t5xxl_max_token_length or (512 if pipe.scheduler.config.use_dynamic_shifting else 256)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..constant_copies import copy_constant

        count, channels, height, width = noisy_latents.shape
        embeds = cast("Tensor", batch.cond["embeds"])
        # Built on the CPU and copied asynchronously: the pipeline's own copy would synchronize.
        tokens = pipe._pack_latents(noisy_latents, count, channels, height, width)
        num_tokens = tokens.shape[1]
        img_ids = pipe._prepare_latent_image_ids(count, height // 2, width // 2, None, noisy_latents.dtype)
        if batch.control_latents:
            tokens, img_ids = _append_controls(pipe, tokens, img_ids, batch.control_latents)
        has_guidance, scale = _has_guidance_embeds(pipe), self.model_config.guidance_scale
        guidance = timesteps.new_full(timesteps.shape, scale) if has_guidance else None
        predicted = denoiser(
            hidden_states=tokens,
            timestep=timesteps / 1000,
            guidance=guidance,
            encoder_hidden_states=embeds,
            pooled_projections=batch.cond["pooled"],
            txt_ids=noisy_latents.new_zeros(embeds.shape[1], 3),
            img_ids=copy_constant(img_ids, noisy_latents.device),
            joint_attention_kwargs=_build_attention_kwargs(batch.cond, tokens.shape[1]),
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted[:, :num_tokens], height, width, vae_scale_factor=1)
        return unpacked

    def is_step_distilled(self, pipe: Any) -> bool:
        return not _has_guidance_embeds(pipe)  # schnell

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        default_steps = self.facts.sampling.num_inference_steps if _has_guidance_embeds(pipe) else 4
        cond, negative_cond = _drop_padding(cond), _drop_padding(negative_cond)
        return super().build_sampling_kwargs(pipe, prompt, cond, negative_cond) | dict(
            num_inference_steps=prompt.num_inference_steps or default_steps,
            true_cfg_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            guidance_scale=3.5 if prompt.embedded_guidance is None else prompt.embedded_guidance,
        )


def _append_controls(
    pipe: Any, tokens: Tensor, img_ids: Tensor, control_latents: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Append the tokens of control images; the first coordinate of their positions is 1, 2 ... instead of 0."""
    import torch

    parts, positions = [tokens], [img_ids]
    for number, latents in enumerate(control_latents, start=1):
        count, channels, height, width = latents.shape
        parts.append(pipe._pack_latents(latents.to(tokens.dtype), count, channels, height, width))
        positions.append(pipe._prepare_latent_image_ids(count, height // 2, width // 2, None, img_ids.dtype))
        positions[-1][..., 0] = number
    return torch.cat(parts, dim=1), torch.cat(positions)


def _build_attention_kwargs(cond: Cond, num_image_tokens: int) -> dict[str, Tensor] | None:
    """Mask T5's padding tokens in the attention of all blocks (``apply_t5_attn_mask``); text comes before image."""
    import torch

    if "mask" not in cond:
        return None
    mask = cast("Tensor", cond["mask"]) > 0.5
    image_mask = mask.new_ones(len(mask), num_image_tokens)
    return {"attention_mask": torch.cat([mask, image_mask], dim=1)[:, None, None, :]}


def _drop_padding(cond: Cond) -> Cond:
    """Cut the masked tokens off one text: the pipeline takes no mask, and a masked token has no influence."""
    if "mask" not in cond:
        return cond
    length = int(cast("Tensor", cond["mask"])[0].sum())
    return {**cond, "embeds": cast("Tensor", cond["embeds"])[:, :length]}


def _has_guidance_embeds(pipe: Any) -> bool:
    """True for dev, False for schnell."""
    return bool(pipe.transformer.config.guidance_embeds)
