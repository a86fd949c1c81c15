"""HiDream-I1: experts in the blocks, text of two CLIP, T5 and every layer of Llama 3.1; flow matching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_ONLY_KEYS
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
from ..family_noise_levels import LOGIT_NORMAL, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import CLIP_G_PREFIXES, CLIP_L_PREFIXES, DENOISER_PREFIXES, T5_PREFIXES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

HIDREAM_MAX_SEQUENCE_LENGTH = 128
"""Tokens of the padded prompt of each text encoder, as in diffusers' pipeline."""
LLAMA = "unsloth/Meta-Llama-3.1-8B-Instruct"
"""The hub id of Llama 3.1, which the published model does not contain."""


def _match_hidream(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    depth = f"{config.get('num_layers', 16)} double and {config.get('num_single_layers', 32)} single blocks"
    return match_flow_model(read, 1, f"the transformer has {depth}")


FACTS = FamilyFacts(
    title="HiDream-I1",
    pipeline=PipelineFacts(
        class_name="HiDreamImagePipeline",
        num_parameters=17_105_733_184,
        hub_id="HiDream-ai/HiDream-I1-Full",
        separate_components={"text_encoder_4": LLAMA, "tokenizer_4": LLAMA},
    ),
    detection=DetectionFacts(
        match_configs=_match_hidream,
        keys=("double_stream_blocks.0.block.attn1.to_q_t.weight", "caption_projection.0.linear.weight"),
        shape_checks={
            ("caption_projection.0.linear.weight", 1): ("transformer", "caption_channels", 1),
            ("p_embedder.pooled_embedder.linear_1.weight", 1): ("transformer", "text_emb_dim"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("hidream",),
            diffusion_pipe=("hidream",),
            onetrainer=("HI_DREAM_FULL",),
            simpletuner=("hidream",),
            simpletuner_flavours={
                "full": "HiDream-ai/HiDream-I1-Full",
                "dev": "HiDream-ai/HiDream-I1-Dev",
                "fast": "HiDream-ai/HiDream-I1-Fast",
            },
            simpletuner_default="full",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": CLIP_L_PREFIXES,
            "text_encoder_2": CLIP_G_PREFIXES,
            "text_encoder_3": T5_PREFIXES,
            "text_encoder_4": ("text_encoders.llama.transformer.",),
        },
    ),
    lora=FamilyLora(
        # The attention of image and text; experts would get a gradient only from the tokens that choose them.
        targets=(
            *("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out"),
            *("attn1.to_q_t", "attn1.to_k_t", "attn1.to_v_t", "attn1.to_out_t"),
        ),
        key_style=DIFFUSERS_ONLY_KEYS,
        format="diffusers",
        modelspec_architecture="hidream-i1",
    ),
    blocks=BlockFacts(
        lists=("double_stream_blocks", "single_stream_blocks"),
        activation_args=("hidden_states",),
        fused_layers={r"\.to_[qkv]_t$": ("colwise", (1,)), r"\.to_out(_t)?$": ("rowwise", (1,))},
        unsupported_strategies={
            "pp": "each block of HiDream-I1 gets the text of another layer of Llama from outside of the blocks",
            "cp": "each block of HiDream-I1 gets the text of another layer of Llama from outside of the blocks",
        },
        attention_modes=(),
    ),
    text=TextFacts(
        components=(
            *("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
            *("text_encoder_3", "tokenizer_3", "text_encoder_4", "tokenizer_4"),
        ),
        tokenizer_repo_ids={
            "tokenizer": "HiDream-ai/HiDream-I1-Full:tokenizer",
            "tokenizer_2": "HiDream-ai/HiDream-I1-Full:tokenizer_2",
            "tokenizer_3": "HiDream-ai/HiDream-I1-Full:tokenizer_3",
            "tokenizer_4": LLAMA,
        },
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="sigmoid",
        reason="as in OneTrainer and diffusion-pipe",
        other_trainers={
            "ai-toolkit": NoiseLevels("sigma", 3.0, origin="its example"),
            "OneTrainer": LOGIT_NORMAL,
        },
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0),
    options=FamilyOptions(
        components={
            "vae": "vae",
            "clip_l": "text_encoder",
            "clip_g": "text_encoder_2",
            "t5xxl": "text_encoder_3",
            "text_encoder": "text_encoder_4",
        },
    ),
    notes="train on Full; Dev and Fast lose their few steps",
)


class HiDream(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        transformer, experts = _build_transformer_classes()
        denoiser.__class__ = transformer
        for module in denoiser.modules():
            if type(module) is experts.__bases__[0]:
                module.__class__ = experts
                module.gate._force_inference_output = True  # without a loss of its own, which diffusers discards

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("hidream_i1", "hidream-i1")

    def is_step_distilled(self, pipe: Any) -> bool:
        return "LCM" in type(pipe.scheduler).__name__  # Dev and Fast

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from ..text_encoding import suppress_truncation_warnings

        tokenizers = (pipe.tokenizer, pipe.tokenizer_2, pipe.tokenizer_3, pipe.tokenizer_4)
        with suppress_truncation_warnings(pipe, *tokenizers):
            t5, _, llama, _, pooled, _ = pipe.encode_prompt(
                list(prompts),
                device=pipe.text_encoder.device,
                do_classifier_free_guidance=False,
                max_sequence_length=HIDREAM_MAX_SEQUENCE_LENGTH,
            )
        return {"t5": t5, "llama": llama.transpose(0, 1), "pooled": pooled}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        # The text encoders look at the values of their masks.
        llama, config = pipe.text_encoder_4.config, pipe.transformer.config
        tokens = torch.empty(len(prompts), HIDREAM_MAX_SEQUENCE_LENGTH, config.caption_channels[0], device="meta")
        layers = tokens.new_empty(len(prompts), llama.num_hidden_layers, tokens.shape[1], llama.hidden_size)
        return {"t5": tokens, "llama": layers, "pooled": tokens.new_empty(len(prompts), config.text_emb_dim)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        limits = {"tokenizer": 2, "tokenizer_2": 2, "tokenizer_3": 1, "tokenizer_4": 1}  # their special tokens
        found = set()
        for name, count in limits.items():
            max_tokens = HIDREAM_MAX_SEQUENCE_LENGTH - count
            found.update(text_encoding.find_truncated_prompts(getattr(pipe, name), prompts, max_tokens))
        return [prompt for prompt in prompts if prompt in found]

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        llama: Any = batch.cond["llama"]
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            timesteps=timesteps,
            encoder_hidden_states_t5=batch.cond["t5"],
            encoder_hidden_states_llama3=llama.transpose(0, 1),
            pooled_embeds=batch.cond["pooled"],
            return_dict=False,
        )[0]
        return -predicted  # the model's velocity runs from noise to image

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        sampling = self.facts.sampling
        distilled = self.is_step_distilled(pipe)
        steps, scale = (28, 1.0) if distilled else (sampling.num_inference_steps, sampling.guidance_scale)
        kwargs: dict[str, Any] = {
            "num_inference_steps": prompt.num_inference_steps or steps,
            "guidance_scale": scale if prompt.cfg_scale is None else prompt.cfg_scale,
        }
        for prefix, each in (("", cond), ("negative_", negative_cond)):
            llama: Any = each["llama"]
            kwargs[f"{prefix}prompt_embeds_t5"] = each["t5"]
            kwargs[f"{prefix}prompt_embeds_llama3"] = llama.transpose(0, 1)
            kwargs[f"{prefix}pooled_prompt_embeds"] = each["pooled"]
        return kwargs


def _build_pipeline_class() -> Any:
    """diffusers' pipeline, which as of 0.42 samples about one megapixel of any size, in the size that is asked for."""
    from diffusers import HiDreamImagePipeline

    pipeline: Any = HiDreamImagePipeline

    class SizedPipeline(pipeline):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("height") and kwargs.get("width"):
                # The pipeline scales to the area of this side; a little more, as it rounds down.
                side = math.sqrt(kwargs["height"] * kwargs["width"])
                self.default_sample_size = side * (1 + 1e-9) / self.vae_scale_factor
            return super().__call__(*args, **kwargs)

    return copy_class_name(SizedPipeline, pipeline)


def _build_transformer_classes() -> tuple[Any, Any]:
    """diffusers' transformer and its experts, which compute the same in training as in previews.

    In training, those of diffusers 0.42 return patches and not images, and outside of it no gradient reaches experts.
    """
    import torch
    from diffusers import HiDreamImageTransformer2DModel
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    transformer: Any = HiDreamImageTransformer2DModel
    feed_forward: Any = MOEFeedForwardSwiGLU

    class ImageTransformer(transformer):  # type: ignore[misc]
        def patchify(self, hidden_states: Tensor) -> Any:
            patch_size = self.config.patch_size
            max_tokens = math.prod(self.config.max_resolution) // patch_size**2
            self._grid = tuple(side // patch_size for side in hidden_states.shape[-2:])
            # An image that is not square is padded; diffusers fails for those of more tokens.
            self.max_seq = max(max_tokens, math.prod(self._grid))
            try:
                return super().patchify(hidden_states)
            finally:
                self.max_seq = max_tokens

        def unpatchify(self, x: Tensor, img_sizes: Any, is_training: bool) -> Tensor:
            (height, width), side = self._grid, self.config.patch_size
            grid = x[:, : height * width].reshape((len(x), height, width, side, side, -1))
            return grid.permute((0, 5, 1, 3, 2, 4)).reshape(len(x), -1, height * side, width * side)

    class Experts(feed_forward):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            chosen, weights, _ = self.gate(x)
            tokens = x.view(-1, x.shape[-1])
            output = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                rows, places = _find_tokens(chosen, number, len(self.experts))
                update = expert(tokens[rows]) * weights[rows, places, None]
                output = output.index_add(0, rows, update.to(output.dtype))
            shared: Tensor = self.shared_experts(x)
            return output.view(x.shape) + shared

    return copy_class_name(ImageTransformer, transformer), copy_class_name(Experts, feed_forward)


def _find_tokens(chosen: Tensor, expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """The tokens that chose an expert, and its place in their choice; on the meta device an equal share of all."""
    import torch

    if chosen.device.type != "meta":
        rows, places = torch.where(chosen == expert)
        return rows, places
    count = -(-chosen.numel() // num_experts)
    rows = torch.empty(count, dtype=torch.long, device="meta")
    return rows, rows
