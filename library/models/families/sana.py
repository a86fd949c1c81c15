"""Sana: linear attention over latents of a deep-compression VAE, text of Gemma 2 by cross-attention; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_ONLY_KEYS
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
from ..family_noise_levels import UNIFORM, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import DENOISER_PREFIXES, GEMMA2_PREFIXES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

SANA_MAX_SEQUENCE_LENGTH = 300
"""Maximum tokens of the prompt, as in diffusers' pipeline."""


def _match_sana(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("guidance_embeds"):
        raise ModelError("it is Sana-Sprint, whose few steps a LoRA would lose; use Sana or SANA-1.5")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks", patch_size=1)


FACTS = FamilyFacts(
    title="Sana",
    pipeline=PipelineFacts(
        class_name="SanaPipeline",
        num_parameters=1_604_641_952,
        hub_id="Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
    ),
    detection=DetectionFacts(
        match_configs=_match_sana,
        # Of files with diffusers' keys: diffusers' conversion of the original ones knows no normalized attention.
        keys=("caption_norm.weight", "transformer_blocks.0.ff.conv_depth.weight"),
        shape_checks={
            ("caption_norm.weight", 0): ("transformer", "cross_attention_dim"),
            ("transformer_blocks.0.attn1.norm_q.weight", None): ("transformer", "qk_norm"),
        },
        unsupported_shapes={("patch_embedding.weight", 2, 1): "Sana Video; use the model as a diffusers folder"},
        trainer_names=TrainerNames(
            onetrainer=("SANA",),
            simpletuner=("sana",),
            simpletuner_flavours={
                "sana1.5-4.8b-1024": "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
                "sana1.5-1.6b-1024": "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
                "sana1.0-1.6b-2048": "Efficient-Large-Model/Sana_1600M_2Kpx_BF16_diffusers",
                "sana1.0-1.6b-1024": "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
                "sana1.0-600m-1024": "Efficient-Large-Model/Sana_600M_1024px_diffusers",
                "sana1.0-600m-512": "Efficient-Large-Model/Sana_600M_512px_diffusers",
            },
            simpletuner_default="sana1.5-4.8b-1024",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={"transformer": DENOISER_PREFIXES, "vae": ("vae.",), "text_encoder": GEMMA2_PREFIXES},
    ),
    lora=FamilyLora(
        # Both kinds of attention.
        targets=("to_q", "to_k", "to_v", "to_out.0"),
        targets_of="SimpleTuner",
        key_style=DIFFUSERS_ONLY_KEYS,
        format="diffusers",
        modelspec_architecture="sana",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states",),
        unsupported_strategies={
            "cp": "the blocks of Sana have linear attention and convolutions over the image",
        },
        attention_modes=("xformers",),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers:tokenizer"},
        has_variable_length=True,
        has_negative_encoding=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(multiples_per_token=2, other_trainers={"OneTrainer": UNIFORM}),
    sampling=SamplingFacts(num_inference_steps=20, guidance_scale=4.5),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="single files with diffusers' keys",
)


class Sana(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("sana", "sana")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return _encode_texts(pipe, prompts, _get_instruction(pipe))

    def encode_negative_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode texts without the instruction that captions follow, as the pipeline does."""
        return _encode_texts(pipe, prompts, None)

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        # Of the instruction, the start token and the last one stay.
        width, max_length = pipe.transformer.config.caption_channels, SANA_MAX_SEQUENCE_LENGTH
        instruction = "\n".join(_get_instruction(pipe))
        num_prefix_tokens = len(pipe.tokenizer(instruction).input_ids) - 2
        texts = [instruction + prompt for prompt in prompts]
        embeds = text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, max_length, num_prefix_tokens)
        return {"embeds": embeds}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, SANA_MAX_SEQUENCE_LENGTH - 2)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        predicted: Tensor = denoiser(
            noisy_latents,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            timestep=timesteps * pipe.transformer.config.timestep_scale,
            return_dict=False,
        )[0]
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        # Of the pipeline's own length, which both texts need to have.
        texts = [*cond["embeds"], *negative_cond["embeds"]]
        embeds, mask = pad_text_embeds(texts, SANA_MAX_SEQUENCE_LENGTH)
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            negative_prompt=None,
            prompt_embeds=embeds[:1],
            prompt_attention_mask=mask[:1],
            negative_prompt_embeds=embeds[1:],
            negative_prompt_attention_mask=mask[1:],
            use_resolution_binning=False,
        )


def _encode_texts(pipe: Any, prompts: Sequence[str], instruction: list[str] | None) -> Cond:
    """Encode texts with the lines of an instruction before each."""
    from .. import text_encoding

    embeds, mask, *_ = pipe.encode_prompt(
        list(prompts),
        do_classifier_free_guidance=False,
        device=pipe.text_encoder.device,
        max_sequence_length=SANA_MAX_SEQUENCE_LENGTH,
        complex_human_instruction=instruction,
    )
    return {"embeds": text_encoding.drop_padding(embeds, mask)}


def _get_instruction(pipe: Any) -> list[str]:
    """The lines before every prompt, the default of the pipeline's call."""
    import inspect

    lines: list[str] = inspect.signature(type(pipe).__call__).parameters["complex_human_instruction"].default
    return lines
