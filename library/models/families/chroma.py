"""Chroma1: FLUX.1's blocks without modulation layers, T5 with masked padding, no guidance embedding; flow matching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ...adapters.original_module_names import OriginalModule
from ...config.network_args import NetworkFacts
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
    SingleFileFacts,
    TextFacts,
    TrainerNames,
)
from ..family_noise_levels import LOGIT_NORMAL, PARABOLA, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import (
    DENOISER_PREFIXES,
    JOINT_ATTENTION_LORA_TARGET_MODULES,
    KOHYA_FLOW_OBJECTIVE,
    MASKED_ATTENTION_MODES,
    T5_PREFIXES,
    T5_TOKENIZER,
    match_flow_model,
)
from .flux import FACTS as FLUX_FACTS
from .flux import FLUX_KEYS, build_single_file_layout

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt


def _match_chroma(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    depth = f"{config.get('num_layers', 19)} double and {config.get('num_single_layers', 38)} single blocks"
    return match_flow_model(read, 4, f"the transformer has {depth}")


_APPROXIMATOR = tuple(
    OriginalModule(f"distilled_guidance_layer.{name}", (f"distilled_guidance_layer.{module}",))
    for name, module in (
        *((name, name) for name in ("in_proj", "out_proj")),
        *((f"norms.{number}", f"norms.{number}") for number in range(5)),
        *((f"layers.{number}.in_layer", f"layers.{number}.linear_1") for number in range(5)),
        *((f"layers.{number}.out_layer", f"layers.{number}.linear_2") for number in range(5)),
    )
)

FACTS = FamilyFacts(
    title="Chroma",
    pipeline=PipelineFacts(class_name="ChromaPipeline", num_parameters=8_899_983_424, hub_id="lodestones/Chroma1-HD"),
    detection=DetectionFacts(
        match_configs=_match_chroma,
        keys=(
            "distilled_guidance_layer.in_proj.weight",
            "double_blocks.0.img_attn.qkv.weight",
            "img_in.weight",
        ),
        diffusers_keys={
            "double_blocks.0.img_attn.qkv.weight": "single_transformer_blocks.0.proj_mlp.weight",
            "img_in.weight": "x_embedder.weight",
            "txt_in.weight": "context_embedder.weight",
        },
        shape_checks={
            ("img_in.weight", 1): ("transformer", "in_channels"),
            ("txt_in.weight", 1): ("transformer", "joint_attention_dim"),
            ("distilled_guidance_layer.in_proj.weight", 0): ("transformer", "approximator_hidden_dim"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("chroma",),
            diffusion_pipe=("chroma",),
            kohya_gui=("flux1_checkbox",),
            onetrainer=("CHROMA_1",),
            simpletuner=("chroma",),
            simpletuner_flavours={
                "base": "lodestones/Chroma1-Base",
                "hd": "lodestones/Chroma1-HD",
                "flash": "lodestones/Chroma1-Flash",
            },
            simpletuner_default="base",
            variant_pattern="chroma",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={"transformer": DENOISER_PREFIXES, "vae": ("vae.",), "text_encoder": T5_PREFIXES},
        layout=build_single_file_layout("time_text_embed.timestep_embedder", *_APPROXIMATOR),
    ),
    lora=FamilyLora(
        # Every linear layer of the double and single blocks; another proj_out lies outside of them.
        targets=(
            *JOINT_ATTENTION_LORA_TARGET_MODULES,
            *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
            *("proj_mlp", "single_transformer_blocks.*.proj_out"),
        ),
        targets_of="sd-scripts",
        key_style=FLUX_KEYS,
        modelspec_architecture="chroma",
        modelspec_implementation="https://huggingface.co/lodestones/Chroma",
    ),
    blocks=BlockFacts(
        # The double blocks pass on two streams, the single ones their concatenation: only the latter are split.
        lists=("single_transformer_blocks",),
        activation_args=("hidden_states",),
        token_args={"image_rotary_emb": ((0, ("hidden_states",)),) * 2},
        single_stream_lists=("single_transformer_blocks",),
        fused_layers={r"single_transformer_blocks\.\d+\.proj_out$": ("rowwise", (1, 4))},
        unsupported_strategies={
            "cp": "its attention masks the padding of the text, token by token",
            "cuda_graphs": "the modulation of Chroma copies its guidance from the host",
        },
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(components=("text_encoder", "tokenizer"), tokenizer_repo_ids={"tokenizer": T5_TOKENIZER}),
    training_noise=TrainingNoiseFacts(
        other_trainers={
            "sd-scripts": NoiseLevels("sigmoid", origin="its guide; by default sigma with shift 3"),
            "ai-toolkit": LOGIT_NORMAL,
            "OneTrainer": PARABOLA,
        },
    ),
    sampling=SamplingFacts(num_inference_steps=35, guidance_scale=5.0),
    options=FamilyOptions(
        components={"ae": "vae", "vae": "vae", "t5xxl": "text_encoder"},
        extra=("t5xxl_max_token_length",),
        network=NetworkFacts(
            modules=("networks.lora_flux",),
            args=("train_blocks", "train_double_block_indices", "train_single_block_indices"),
            layer_type_ranks=tuple(
                rank
                for rank in FLUX_FACTS.options.network.layer_type_ranks
                if "mod" not in rank[0]  # which Chroma has none of
            ),
        ),
        kohya_objective=replace(
            KOHYA_FLOW_OBJECTIVE,
            defaults={
                "timestep_sampling": "sigma",
                "discrete_flow_shift": 3.0,
                "model_prediction_type": "sigma_scaled",
            },
        ),
    ),
)


class Chroma(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        denoiser.__class__ = _build_transformer_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        metadata = {"ss_model_type": "chroma", "ss_apply_t5_attn_mask": True, "ss_guidance_scale": 0.0}
        return BaseModelInfo("chroma", "chroma", metadata)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from ..text_encoding import suppress_truncation_warnings

        with suppress_truncation_warnings(pipe, pipe.tokenizer):
            embeds, mask = pipe._get_t5_prompt_embeds(
                list(prompts), max_sequence_length=self._max_tokens, device=pipe.text_encoder.device
            )
        return {"embeds": embeds, "mask": mask.to(embeds.dtype)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        embeds = torch.empty(len(prompts), self._max_tokens, pipe.transformer.config.joint_attention_dim, device="meta")
        return {"embeds": embeds, "mask": embeds.new_empty(embeds.shape[:2])}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, self._max_tokens - 1)  # minus the end

    @property
    def _max_tokens(self) -> int:
        return self.model_config.t5xxl_max_token_length or 512

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..constant_copies import copy_constant

        count, channels, height, width = noisy_latents.shape
        embeds, mask = cast("Tensor", batch.cond["embeds"]), cast("Tensor", batch.cond["mask"]) > 0.5
        img_ids = pipe._prepare_latent_image_ids(count, height // 2, width // 2, None, noisy_latents.dtype)
        image_mask = mask.new_ones(count, height // 2 * (width // 2))
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents, count, channels, height, width),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            txt_ids=noisy_latents.new_zeros(embeds.shape[1], 3),
            img_ids=copy_constant(img_ids, noisy_latents.device),
            attention_mask=torch.cat([mask, image_mask], dim=1),
            joint_attention_kwargs=None,
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return unpacked

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        return super().build_sampling_kwargs(pipe, prompt, cond, negative_cond) | {
            "prompt_attention_mask": cast("Tensor", cond["mask"]) > 0.5,
            "negative_prompt_attention_mask": cast("Tensor", negative_cond["mask"]) > 0.5,
        }


def _build_pipeline_class() -> Any:
    """diffusers' pipeline with booleans as the mask of a prompt, which hide padding, as in the model's own code.

    Its numbers (as of 0.42) are added to the attention, and hide nothing.
    """
    from diffusers import ChromaPipeline

    pipeline: Any = ChromaPipeline

    class MaskedPipeline(pipeline):  # type: ignore[misc]
        def _get_t5_prompt_embeds(self, *args: Any, **kwargs: Any) -> Any:
            embeds, mask = super()._get_t5_prompt_embeds(*args, **kwargs)
            return embeds, mask.bool()

    return copy_class_name(MaskedPipeline, pipeline)


def _build_transformer_class() -> Any:
    """diffusers' transformer, which masks the padding of texts in checkpointed single blocks as well.

    diffusers 0.42 calls the single blocks without the attention mask if gradient checkpointing is enabled.
    """
    import inspect

    from diffusers import ChromaTransformer2DModel

    transformer: Any = ChromaTransformer2DModel
    signature = inspect.signature(transformer.forward)

    class MaskedTransformer(transformer):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self._attention_mask = signature.bind(self, *args, **kwargs).arguments.get("attention_mask")
            return super().forward(*args, **kwargs)

        def enable_gradient_checkpointing(self, gradient_checkpointing_func: Callable[..., Any] | None = None) -> None:
            super().enable_gradient_checkpointing(gradient_checkpointing_func)
            checkpoint: Callable[..., Any] = self._gradient_checkpointing_func

            def checkpoint_with_mask(block: Any, *args: Any, **kwargs: Any) -> Any:
                if len(args) == 3 and not kwargs:  # a single block: hidden states, modulation, rotary embedding
                    args = *args, self._attention_mask
                return checkpoint(block, *args, **kwargs)

            self._gradient_checkpointing_func: Callable[..., Any] = checkpoint_with_mask

    MaskedTransformer.forward.__signature__ = signature  # type: ignore[attr-defined]
    return copy_class_name(MaskedTransformer, transformer)
