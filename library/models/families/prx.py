"""PRX: attention from the image to itself and to a text of T5Gemma, which stays as it is; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import PEFT_LOADER_KEYS
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
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import MASKED_ATTENTION_MODES, match_flow_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

IN_ONE_MATRIX = "PRX has query, key and value of an image in one matrix, whose heads are not split"
TEXT_BESIDE_IMAGE = "the keys of PRX are those of the text and of the whole image together"


def _match_prx(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("bottleneck_size") or config.get("resolution_embeds"):
        raise ModelError("its transformer is that of PRXPixel, whose pipeline is PRXPixelPipeline")
    reason = f"the transformer has {config.get('depth')} blocks"
    return match_flow_model(read, 1, reason, int(config.get("patch_size", 2)))


FACTS = FamilyFacts(
    title="PRX",
    pipeline=PipelineFacts(class_name="PRXPipeline", num_parameters=1_170_691_648, hub_id="Photoroom/prx-512-t2i-sft"),
    detection=DetectionFacts(match_configs=_match_prx),
    lora=FamilyLora(
        # Every linear layer of the blocks but the modulation.
        targets=("img_qkv_proj", "txt_kv_proj", "to_out.0", "gate_proj", "up_proj", "down_proj"),
        key_style=PEFT_LOADER_KEYS,
        format="diffusers",
        modelspec_architecture="prx",
    ),
    blocks=BlockFacts(
        lists=("blocks",),
        activation_args=("hidden_states",),
        unsupported_strategies={"tp": IN_ONE_MATRIX, "cp": TEXT_BESIDE_IMAGE},
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Photoroom/prx-512-t2i-sft:tokenizer"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    sampling=SamplingFacts(num_inference_steps=28, guidance_scale=5.0, image_size=(512, 512)),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="from folders and the hub; LoRA in peft: diffusers has no loader for it",
)


class PRX(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("prx", "prx")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        encoder = pipe.text_encoder
        tokens = pipe.tokenizer(
            list(map(_build_text_cleaner(), prompts)),
            padding="max_length",
            max_length=pipe.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        ids, mask = (each.to(encoder.device) for each in (tokens.input_ids, tokens.attention_mask.bool()))
        states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return {"embeds": [row[is_text] for row, is_text in zip(states, mask, strict=True)]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        texts = list(map(_build_text_cleaner(), prompts))
        width, max_length = pipe.transformer.config.context_in_dim, pipe.tokenizer.model_max_length
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, max_length)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        texts = dict(zip(map(_build_text_cleaner(), prompts), prompts, strict=True))
        max_tokens = pipe.tokenizer.model_max_length - 1  # minus the start token
        found = text_encoding.find_truncated_prompts(pipe.tokenizer, list(texts), max_tokens)
        return [texts[text] for text in found]

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            attention_mask=mask.bool(),
            return_dict=False,
        )[0]
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        # The pipeline needs both texts to have one length.
        embeds, mask = pad_text_embeds([*cond["embeds"], *negative_cond["embeds"]])
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=embeds[:1],
            prompt_attention_mask=mask[:1].bool(),
            negative_prompt_embeds=embeds[1:],
            negative_prompt_attention_mask=mask[1:].bool(),
            use_resolution_binning=False,
        )


def _build_text_cleaner() -> Callable[[str], str]:
    """diffusers' cleaning of captions without ftfy, which repairs wrong encodings in it and may not be installed."""
    from types import FunctionType, SimpleNamespace

    from diffusers.pipelines.prx.pipeline_prx import TextPreprocessor

    clean = TextPreprocessor.clean_text
    names = {**clean.__globals__, "ftfy": SimpleNamespace(fix_text=str)}
    own, preprocessor = FunctionType(clean.__code__, names), TextPreprocessor()
    return lambda text: str(own(preprocessor, text))
