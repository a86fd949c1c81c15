"""Anima: the transformer of Cosmos-Predict2 2B with Qwen3 0.6B through an adapter, Qwen-Image's VAE; flow matching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...config.network_args import NetworkFacts
from ...diffusion.timestep_shift import NO_SHIFT
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
from ..family_noise_levels import LOGIT_NORMAL, WEIGHTED, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import KOHYA_FLOW_OBJECTIVE, T5_TOKENIZER, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

ANIMA_TEXT_TOKENS = 512
"""The transformer always gets as many tokens of text: zeros after those of the prompt, which it attends to."""


def _match_anima(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    match = match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks")
    positions = [size // patch for size, patch in zip(config["max_size"], config["patch_size"], strict=True)]
    return replace(match, max_side=max(positions) * match.size_multiple)


_ORIGINAL_PARTS = {
    "transformer_blocks.": "blocks.",
    "norm1.linear_": "adaln_modulation_self_attn.",
    "norm2.linear_": "adaln_modulation_cross_attn.",
    "norm3.linear_": "adaln_modulation_mlp.",
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    "to_out.0": "output_proj",
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
    "ff.net.0.proj": "mlp.layer1",
    "ff.net.2": "mlp.layer2",
    "norm_out.linear_": "final_layer.adaln_modulation.",
    "proj_out": "final_layer.linear",
    "time_embed.t_embedder": "t_embedder.1",
    "time_embed.norm": "t_embedding_norm",
    "patch_embed.proj": "x_embedder.proj.1",
}


def _rename_to_original(modules: Iterable[str]) -> Mapping[str, str]:
    renames = {}
    for module in modules:
        name = module
        for part, original in _ORIGINAL_PARTS.items():
            name = name.replace(part, original)
        renames[module] = name
    return renames


ANIMA_KEYS = KeyStyle(
    "anima",
    rename=_rename_to_original,
    is_read_by_diffusers=False,
    has_original_names_in_diffusers=True,
)


FACTS = FamilyFacts(
    title="Anima",
    pipeline=PipelineFacts(class_name="AnimaModularPipeline", num_parameters=1_956_405_248),
    detection=DetectionFacts(
        match_configs=_match_anima,
        keys=(
            "x_embedder.proj.1.weight",
            "blocks.0.cross_attn.k_proj.weight",
            "blocks.0.adaln_modulation_self_attn.1.weight",
        ),
        diffusers_keys={
            "x_embedder.proj.1.weight": "patch_embed.proj.weight",
            "blocks.0.cross_attn.k_proj.weight": "transformer_blocks.0.attn2.to_k.weight",
            "blocks.0.adaln_modulation_self_attn.1.weight": "transformer_blocks.0.norm1.linear_1.weight",
        },
        shape_checks={
            ("blocks.0.cross_attn.k_proj.weight", 1): ("transformer", "text_embed_dim"),
            ("blocks.0.adaln_modulation_self_attn.1.weight", 0): ("transformer", "adaln_lora_dim"),
        },
        unsupported_shapes={("x_embedder.proj.1.weight", 1, 72): "a video model of Cosmos-Predict2"},
        trainer_names=TrainerNames(
            ai_toolkit=("anima",),
            diffusion_pipe=("anima",),
            kohya_gui=("anima_checkbox",),
            onetrainer=("ANIMA",),
            simpletuner=("anima",),
            simpletuner_flavours={
                "base-v1.0": "circlestone-labs/Anima-Base-v1.0-Diffusers",
                "release": "circlestone-labs/Anima-Base-v1.0-Diffusers",
                "preview-3": "CalamitousFelicitousness/Anima-Preview-3-sdnext-diffusers",
                "preview-2": "CalamitousFelicitousness/Anima-Preview-2-sdnext-diffusers",
                "preview": "CalamitousFelicitousness/Anima-sdnext-diffusers",
            },
            simpletuner_default="preview-3",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": ("model.diffusion_model.", "net."),
            "text_conditioner": ("model.diffusion_model.llm_adapter.", "net.llm_adapter.", "llm_adapter."),
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen3_06b.transformer.",),
        },
        classes={"vae": "AutoencoderKLWan"},
    ),
    lora=FamilyLora(
        # The linear layers of the blocks except the modulation; not those of the adapter between text and transformer.
        targets=(
            *(
                f"{attention}.{layer}"
                for attention in ("attn1", "attn2")
                for layer in ("to_q", "to_k", "to_v", "to_out.0")
            ),
            *("ff.net.0.proj", "ff.net.2"),
        ),
        targets_of="sd-scripts",
        key_style=ANIMA_KEYS,
        format="diffusers",
        modelspec_architecture="anima",
        modelspec_implementation="https://huggingface.co/circlestone-labs/Anima",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states",),
        token_args={"image_rotary_emb": ((0, ("hidden_states",)),) * 2},
        text_attention_calls=(1,),
        text_attention_layers=("attn2.to_k", "attn2.to_v"),
        attention_modes=(),  # the attention of Cosmos knows no backend
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "t5_tokenizer", "text_conditioner"),
        tokenizer_repo_ids={"tokenizer": "Qwen/Qwen3-0.6B", "t5_tokenizer": T5_TOKENIZER},
        has_variable_length=True,
        denoiser_pad_multiple=ANIMA_TEXT_TOKENS,
    ),
    training_noise=TrainingNoiseFacts(
        reason="without the shift of its scheduler, as its authors and sd-scripts train",
        read_pipeline_shift=lambda read: NO_SHIFT,
        other_trainers={"sd-scripts": LOGIT_NORMAL, "ai-toolkit": WEIGHTED, "OneTrainer": LOGIT_NORMAL},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=4.0),
    options=FamilyOptions(
        components={
            "vae": "vae",
            "text_encoder": "text_encoder",
            "llm_adapter_path": "text_conditioner",
            "t5_tokenizer_path": "t5_tokenizer",
        },
        extra=("qwen3_max_token_length", "t5_max_token_length"),
        network=NetworkFacts(modules=("networks.lora_anima",)),
        kohya_objective=replace(
            KOHYA_FLOW_OBJECTIVE,
            defaults={"timestep_sampling": "sigmoid", "discrete_flow_shift": 1.0},
            weighted_prediction_types=None,
            max_huber_timestep=1,
        ),
    ),
)


class Anima(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        _replace_torchvision()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("anima", "anima-preview")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess()

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from diffusers.modular_pipelines.anima import before_denoise, encoders

        from .. import text_encoding

        device, dtype = pipe.text_encoder.device, pipe.text_encoder.dtype
        qwen_length, t5_length = self.model_config.qwen3_max_token_length, self.model_config.t5_max_token_length
        encode, condition = encoders.AnimaTextEncoderStep, before_denoise.AnimaTextConditioningStep
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer, pipe.t5_tokenizer):
            states, mask = encode._get_qwen_prompt_embeds(pipe, list(prompts), qwen_length, device, dtype)
            ids, ids_mask = encode._get_t5_prompt_ids(pipe, list(prompts), t5_length, device)
        dtype = pipe.text_conditioner.dtype
        embeds = condition._condition_prompt_embeds(
            pipe, states, mask, ids, ids_mask, device=device, conditioning_dtype=dtype, output_dtype=dtype
        )
        return {"embeds": text_encoding.drop_padding(embeds, ids_mask)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        width, max_tokens = pipe.transformer.config.text_embed_dim, self.model_config.t5_max_token_length
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.t5_tokenizer, prompts, width, max_tokens)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        options = self.model_config
        found = text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, options.qwen3_max_token_length)
        max_tokens = options.t5_max_token_length - 1  # minus the end token
        found += text_encoding.find_truncated_prompts(pipe.t5_tokenizer, prompts, max_tokens)
        return [prompt for prompt in prompts if prompt in found]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_frame_moments

        return encode_frame_moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_frame_latents

        return decode_frame_latents(pipe.vae, latents)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, latents.squeeze(2))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        height, width = (8 * side for side in noisy_latents.shape[2:])
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents.unsqueeze(2),
            timestep=timesteps / 1000,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], ANIMA_TEXT_TOKENS)[0],
            padding_mask=noisy_latents.new_zeros(1, 1, height, width),
            return_dict=False,
        )[0]
        return predicted.squeeze(2)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=pad_text_embeds(cond["embeds"], ANIMA_TEXT_TOKENS)[0],
            negative_prompt_embeds=pad_text_embeds(negative_cond["embeds"], ANIMA_TEXT_TOKENS)[0],
        )


def _build_pipeline_class() -> Any:
    from diffusers import AnimaModularPipeline

    from ..modular_pipelines import PipelineSteps, build_pipeline_class

    blocks: Any = import_module("diffusers.modular_pipelines.anima.modular_blocks_anima")
    steps = PipelineSteps(
        encode=lambda: {
            "text_encoder": blocks.AnimaTextEncoderStep(),
            "text_conditioning": blocks.AnimaTextConditioningStep(),
        },
        denoise=lambda: {
            "input": blocks.AnimaTextInputStep(),
            "prepare_latents": blocks.AnimaPrepareLatentsStep(),
            "set_timesteps": blocks.AnimaSetTimestepsStep(),
            "denoise": blocks.AnimaDenoiseStep(),
        },
        decode=lambda: {"decode": blocks.AnimaDecodeStep()},
    )
    return build_pipeline_class(AnimaModularPipeline, (*FACTS.components, "scheduler"), steps)


def _replace_torchvision() -> None:
    """Give the transformer, which resizes its mask of zeros with torchvision, the same of torch if that is missing."""
    from torch.nn.functional import interpolate

    transformer_cosmos: Any = import_module("diffusers.models.transformers.transformer_cosmos")
    if not hasattr(transformer_cosmos, "transforms"):
        functional = SimpleNamespace(resize=lambda mask, size, interpolation: interpolate(mask, size, mode="nearest"))
        modes = SimpleNamespace(NEAREST="nearest")
        transformer_cosmos.transforms = SimpleNamespace(functional=functional, InterpolationMode=modes)
