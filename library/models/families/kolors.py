"""Kolors: the UNet of Stable Diffusion XL with text of ChatGLM3; epsilon or v prediction over 1100 timesteps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...config.network_args import NetworkFacts
from ...config.schema import ModelConfig
from ...problems import Problem
from ..base import BaseModelInfo
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
    TrainerNames,
)
from ..model_configs import ConfigReader
from ..shared_facts import UNET_CONV_LORA_TARGET_MODULES, UNET_LORA_TARGET_MODULES, match_unet_model
from .sdxl import StableDiffusionXL

if TYPE_CHECKING:
    from ...dataloader.batch import Cond

KOLORS_MAX_SEQUENCE_LENGTH = 256
"""Tokens of the padded prompt, as in diffusers' pipeline."""
KOLORS_TIMESTEPS = 1100
"""Length of the noise schedule that the model was trained with."""


def _match_kolors(read: ConfigReader) -> FamilyMatch:
    return match_unet_model(read, KOLORS_TIMESTEPS)


def _validate_kolors(read: ConfigReader, options: ModelConfig) -> Iterator[Problem]:
    if find_spec("sentencepiece") is None:
        reason = "the tokenizer of Kolors needs sentencepiece, which is not installed"
        yield Problem("pretrained_model_name_or_path", reason, "pip install sentencepiece")


FACTS = FamilyFacts(
    title="Kolors",
    pipeline=PipelineFacts(
        class_name="KolorsPipeline",
        denoisers=("unet",),
        num_parameters=2_579_458_820,
        hub_id="Kwai-Kolors/Kolors-diffusers",
    ),
    detection=DetectionFacts(
        match_configs=_match_kolors,
        trainer_names=TrainerNames(
            simpletuner=("kolors",),
            simpletuner_flavours={"1.0": "terminusresearch/kwai-kolors-1.0"},
            simpletuner_default="1.0",
        ),
    ),
    lora=FamilyLora(
        targets=UNET_LORA_TARGET_MODULES,
        conv_targets=UNET_CONV_LORA_TARGET_MODULES,
        modelspec_architecture="kolors",
    ),
    blocks=BlockFacts(has_skip_connections=True),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Kwai-Kolors/Kolors-diffusers:tokenizer"},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0),
    options=FamilyOptions(
        components={"vae": "vae", "text_encoder": "text_encoder"},
        validate=_validate_kolors,
        network=NetworkFacts(unet_blocks=(9, 3, 9), unet_outer_blocks=(1, 1)),
    ),
    notes="from folders and the hub; needs sentencepiece",
)


class Kolors(StableDiffusionXL):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("kolors", "kolors")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        embeds, _, pooled, _ = pipe.encode_prompt(
            list(prompts),
            device=pipe.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=KOLORS_MAX_SEQUENCE_LENGTH,
        )
        return {"embeds": embeds, "pooled": pooled}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        # The text encoder looks at the values of its mask.
        count, width = len(prompts), pipe.text_encoder.config.hidden_size
        embeds = torch.empty(count, KOLORS_MAX_SEQUENCE_LENGTH, width, device="meta")
        return {"embeds": embeds, "pooled": embeds[:, 0]}

    def get_unused_text_layers(self, encoder: Any, component: str) -> tuple[str, ...]:
        return ()

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        max_tokens = KOLORS_MAX_SEQUENCE_LENGTH - len(pipe.tokenizer.get_prefix_tokens())
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, max_tokens)
