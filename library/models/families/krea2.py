"""Krea 2: single-stream, with states of twelve layers of Qwen3-VL as its text, Qwen-Image's VAE; flow matching."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...adapters.token_layout import OTHER_TOKENS, TokenLayout
from ...config.network_args import NetworkFacts
from ...diffusion.timestep_shift import FixedShift, TimestepShift
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
from ..family_noise_levels import LOGIT_NORMAL, UNIFORM, NoiseLevels, TrainingNoiseFacts, read_scheduler_shift
from ..model_configs import ConfigReader, read_required
from ..shared_facts import DENOISER_PREFIXES, MASKED_ATTENTION_MODES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

KREA2_MAX_SEQUENCE_LENGTH = 512
"""Maximum tokens of the prompt with the end of its template, as in diffusers' pipeline."""
TURBO_SHIFT = FixedShift(math.exp(1.15))
"""The Turbo's timestep shift, which is the same at every resolution."""


def _match_krea2(read: ConfigReader) -> FamilyMatch:
    variant = "Turbo" if read_required(read, "model_index.json").get("is_distilled") else "Raw"
    blocks = read_required(read, "transformer/config.json").get("num_layers")
    return match_flow_model(read, 4, f"the transformer has {blocks} blocks, its pipeline is of {variant}")


def _read_pipeline_shift(read: ConfigReader) -> TimestepShift:
    is_distilled = read_required(read, "model_index.json").get("is_distilled")
    return TURBO_SHIFT if is_distilled else read_scheduler_shift(read)


_ORIGINAL_NAMES = {
    "img_in": "first",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "final_layer.linear": "last.linear",
}
_ORIGINAL_PARTS = {
    "transformer_blocks.": "blocks.",
    "text_fusion.": "txtfusion.",
    ".ff.": ".mlp.",
    ".attn.to_gate": ".attn.gate",
    ".attn.to_out.0": ".attn.wo",
    ".attn.to_": ".attn.w",
}


def _rename_to_original(modules: Iterable[str]) -> Mapping[str, str]:
    renames = {}
    for module in modules:
        name = _ORIGINAL_NAMES.get(module, module)
        for part, original in _ORIGINAL_PARTS.items():
            name = name.replace(part, original)
        renames[module] = name
    return renames


KREA2_KEYS = KeyStyle("krea2", rename=_rename_to_original, is_read_by_diffusers=False)


FACTS = FamilyFacts(
    title="Krea 2",
    pipeline=PipelineFacts(class_name="Krea2Pipeline", num_parameters=12_820_073_036, hub_id="krea/Krea-2-Raw"),
    detection=DetectionFacts(
        match_configs=_match_krea2,
        keys=("txtfusion.projector.weight", "blocks.0.attn.wq.weight"),
        diffusers_keys={
            "txtfusion.projector.weight": "text_fusion.projector.weight",
            "blocks.0.attn.wq.weight": "transformer_blocks.0.attn.to_q.weight",
            "first.weight": "img_in.weight",
        },
        shape_checks={
            ("txtfusion.projector.weight", 1): ("transformer", "num_text_layers"),
            ("first.weight", 1): ("transformer", "in_channels"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("krea2",),
            diffusion_pipe=("krea2",),
            onetrainer=("KREA_2",),
            simpletuner=("krea2",),
            simpletuner_flavours={"raw": "krea/Krea-2-Raw", "turbo": "krea/Krea-2-Turbo"},
            simpletuner_default="raw",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen3vl_4b.transformer.",),
        },
        classes={"vae": "AutoencoderKLWan"},
    ),
    lora=FamilyLora(
        # Every linear layer: blocks, text fusion, and the layers before and after them; but not the 12 weights of
        # text_fusion.projector, whose input peft's OFT takes for images.
        targets=(
            *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_gate", "to_out.0")),
            *("ff.gate", "ff.up", "ff.down"),
            *("img_in", "time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
            *("txt_in.linear_1", "txt_in.linear_2", "final_layer.linear"),
        ),
        targets_of="musubi-tuner",
        key_style=KREA2_KEYS,
        format="diffusers",
        modelspec_architecture="krea-2",
    ),
    blocks=BlockFacts(
        token_layouts={r"^transformer_blocks\.": TokenLayout(segments=("encoder_hidden_states", OTHER_TOKENS))},
        lists=("transformer_blocks",),
        activation_args=("hidden_states",),
        token_args={
            "attention_mask": ((3, ("hidden_states",)),),
            "image_rotary_emb": ((0, ("hidden_states",)), (0, ("hidden_states",))),
        },
        fused_layers={
            r"\.attn\.to_gate$|\.ff\.(gate|up)$": ("colwise", (1,)),
            r"\.ff\.down$": ("rowwise", (1,)),
        },
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "krea/Krea-2-Raw:tokenizer"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        reason="as the model is sampled (Turbo: 3.16 at every size)",
        read_pipeline_shift=_read_pipeline_shift,
        other_trainers={
            "musubi-tuner": NoiseLevels("shift", 2.5, origin="its guide; or krea2_shift"),
            "ai-toolkit": UNIFORM,
            "OneTrainer": LOGIT_NORMAL,
        },
    ),
    sampling=SamplingFacts(num_inference_steps=28, guidance_scale=4.5),
    options=FamilyOptions(
        components={"vae": "vae", "text_encoder": "text_encoder"},
        network=NetworkFacts(modules=("networks.lora_krea2",)),
    ),
    notes="train on Raw; the Turbo loses its few steps",
)


class Krea2(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("krea2", "krea-2")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        if pipe.config.is_distilled:
            return FlowMatchingProcess(TURBO_SHIFT)
        return super().build_noise_process(pipe)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        states, mask = pipe.get_text_hidden_states(list(prompts), KREA2_MAX_SEQUENCE_LENGTH, pipe.text_encoder.device)
        # The layers' states of a token are one row; padding is in the middle.
        return {"embeds": [row[each] for row, each in zip(states.flatten(2), mask, strict=True)]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from .. import text_encoding

        config, suffix = pipe.transformer.config, pipe.prompt_template_encode_suffix
        width, num_prefix_tokens = (
            config.num_text_layers * config.text_hidden_dim,
            pipe.prompt_template_encode_start_idx,
        )
        texts = [pipe.prompt_template_encode_prefix + prompt for prompt in prompts]
        max_length = KREA2_MAX_SEQUENCE_LENGTH - pipe.prompt_template_encode_num_suffix_tokens
        embeds = text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, max_length, num_prefix_tokens)
        end = torch.empty(len(pipe.tokenizer(suffix).input_ids), width, device="meta")
        return {"embeds": [torch.cat([row, end]) for row in embeds]}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        prefix, num_suffix_tokens = pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_num_suffix_tokens
        max_tokens = KREA2_MAX_SEQUENCE_LENGTH + pipe.prompt_template_encode_start_idx - num_suffix_tokens
        texts = {prefix + prompt: prompt for prompt in prompts}
        found = text_encoding.find_truncated_prompts(pipe.tokenizer, list(texts), max_tokens)
        return [texts[text] for text in found]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_frame_moments

        return encode_frame_moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_frame_latents

        return decode_frame_latents(pipe.vae, latents)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, pipe._unpack_latents(latents, height, width).squeeze(2))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        count, channels, height, width = noisy_latents.shape
        embeds, mask = _pad_layer_states(pipe, batch.cond["embeds"], batch.text_pad_multiple)
        sides = height // pipe.patch_size, width // pipe.patch_size
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents, count, channels, height, width),
            encoder_hidden_states=embeds,
            timestep=timesteps / 1000,
            position_ids=pipe.prepare_position_ids(embeds.shape[1], *sides, noisy_latents.device),
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]
        factor = pipe.vae_scale_factor
        frames: Tensor = pipe._unpack_latents(predicted, height * factor, width * factor)
        return frames.squeeze(2)

    def is_step_distilled(self, pipe: Any) -> bool:
        return bool(pipe.config.is_distilled)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        sampling = self.facts.sampling
        steps, scale = (8, 0.0) if pipe.config.is_distilled else (sampling.num_inference_steps, sampling.guidance_scale)
        embeds, mask = _pad_layer_states(pipe, [*cond["embeds"], *negative_cond["embeds"]])
        return dict(
            num_inference_steps=prompt.num_inference_steps or steps,
            guidance_scale=scale if prompt.cfg_scale is None else prompt.cfg_scale,
            prompt_embeds=embeds[:1],
            prompt_embeds_mask=mask[:1],
            negative_prompt_embeds=embeds[1:],
            negative_prompt_embeds_mask=mask[1:],
        )


def _pad_layer_states(pipe: Any, texts: Tensor | Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Texts of one length (B, tokens, layers, width), and their boolean mask."""
    from ..text_encoding import pad_text_embeds

    embeds, mask = pad_text_embeds(texts, multiple)
    layers = pipe.transformer.config.num_text_layers
    return embeds.view(*embeds.shape[:2], layers, -1), mask.bool()
