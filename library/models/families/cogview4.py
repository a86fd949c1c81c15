"""CogView4: double streams with one set of weights, variable-length text of GLM-4; flow matching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_ONLY_KEYS
from ...adapters.token_layout import OTHER_TOKENS, TokenLayout
from ...diffusion.timestep_shift import SquareRootShift, TimestepShift, build_timestep_shift
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
from ..family_noise_levels import LOGIT_NORMAL, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required, read_scheduler_config
from ..shared_facts import DENOISER_PREFIXES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import FlowMatchingProcess

COGVIEW4_MAX_SEQUENCE_LENGTH = 1024
"""Maximum tokens of the prompt, as in diffusers' pipeline."""
TOKENS_MULTIPLE = 16
"""A prompt is padded at its beginning to a multiple of this many tokens; the model reads them like others."""


def _match_cogview4(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks")


def build_dynamic_shift(config: Mapping[str, Any]) -> TimestepShift:
    """Read the shift of the pipeline's scheduler, which grows with the side of the image."""
    if not config.get("use_dynamic_shifting"):
        return build_timestep_shift(config)
    return SquareRootShift(config.get("base_image_seq_len", 256), config["base_shift"], config["max_shift"])


FACTS = FamilyFacts(
    title="CogView4",
    pipeline=PipelineFacts(class_name="CogView4Pipeline", num_parameters=6_369_118_272, hub_id="THUDM/CogView4-6B"),
    detection=DetectionFacts(
        match_configs=_match_cogview4,
        keys=("patch_embed.text_proj.weight", "time_condition_embed.condition_embedder.linear_1.weight"),
        shape_checks={
            ("patch_embed.text_proj.weight", 1): ("transformer", "text_embed_dim"),
            ("time_condition_embed.condition_embedder.linear_1.weight", 0): ("transformer", "time_embed_dim"),
        },
        trainer_names=TrainerNames(ai_toolkit=("cogview4",)),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.glm4_9b.transformer.",),
        },
    ),
    lora=FamilyLora(
        # The attention, which text and image share.
        targets=("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
        key_style=DIFFUSERS_ONLY_KEYS,
        format="diffusers",
        modelspec_architecture="cogview4",
    ),
    blocks=BlockFacts(
        token_layouts={r"\.attn1\.": TokenLayout(segments=("encoder_hidden_states", OTHER_TOKENS))},
        lists=("transformer_blocks",),
        activation_args=("hidden_states", "encoder_hidden_states"),
        unsupported_strategies={
            "cp": "the feed-forward layers of CogView4 see the image and the text one after the other",
            "cuda_graphs": "each layer of CogView4 copies its rotary embedding from the host",
        },
        attention_modes=("xformers",),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "THUDM/CogView4-6B:tokenizer"},
        has_variable_length=True,
    ),
    training_noise=TrainingNoiseFacts(
        read_pipeline_shift=lambda read: build_dynamic_shift(read_scheduler_config(read)),
        other_trainers={"ai-toolkit": LOGIT_NORMAL},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="single files with diffusers' keys",
)


class CogView4(Family):
    facts = FACTS

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        processor = build_attention_processor()
        for block in denoiser.transformer_blocks:
            block.attn1.set_processor(processor)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("cogview4", "cogview4")

    def build_noise_process(self, pipe: Any) -> FlowMatchingProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess(build_dynamic_shift(pipe.scheduler.config))

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        device = pipe.text_encoder.device
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            # One at a time: the encoder has no mask for the padding to the longest prompt.
            embeds = [pipe._get_glm_embeds(prompt, COGVIEW4_MAX_SEQUENCE_LENGTH, device)[0] for prompt in prompts]
        return {"embeds": embeds}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        lengths = (len(ids) for ids in pipe.tokenizer(list(prompts), truncation=False, verbose=False).input_ids)
        padded = (
            -(-min(length, COGVIEW4_MAX_SEQUENCE_LENGTH) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE for length in lengths
        )
        width = pipe.transformer.config.text_embed_dim
        return {"embeds": [torch.empty(length, width, device="meta") for length in padded]}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, COGVIEW4_MAX_SEQUENCE_LENGTH)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        is_unpadded = all(len(row) == embeds.shape[1] for row in batch.cond["embeds"])
        sizes = batch.size_conditioning.to(embeds.dtype)
        # The model is told the timestep before the shift of its noise level.
        process = self.build_noise_process(pipe)
        factor = process.shift.compute_factor(process.count_tokens(noisy_latents.shape))
        sigmas = timesteps / 1000
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            encoder_hidden_states=embeds,
            timestep=1000 * sigmas / (factor - (factor - 1) * sigmas),
            original_size=sizes[:, :2],
            target_size=sizes[:, 4:],
            crop_coords=sizes[:, 2:4],
            attention_kwargs=None if is_unpadded else {"text_mask": mask.bool()},
            return_dict=False,
        )[0]
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=cond["embeds"][0].unsqueeze(0),
            negative_prompt_embeds=negative_cond["embeds"][0].unsqueeze(0),
        )


def build_attention_processor() -> Any:
    """diffusers' attention of CogView4, and of GLM-Image, with a mask that excludes padding after the text.

    Its own, as of 0.42, adds a mask of ones and zeros to the scores.
    """
    import torch
    from diffusers.models.embeddings import apply_rotary_emb
    from torch.nn.functional import pad, scaled_dot_product_attention

    class TextMaskProcessor:
        def __call__(
            self,
            attn: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            attention_mask: Tensor | None = None,
            image_rotary_emb: Any = None,
            text_mask: Tensor | None = None,
            kv_cache: Any = None,  # of GLM-Image: of pictures that it edits
        ) -> tuple[Tensor, Tensor]:
            sizes = [encoder_hidden_states.shape[1], hidden_states.shape[1]]
            tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
            layers = attn.to_q, attn.to_k, attn.to_v
            query, key, value = (layer(tokens).unflatten(2, (attn.heads, -1)).transpose(1, 2) for layer in layers)

            def rotate(part: Tensor, norm: Any) -> Tensor:
                text, image = torch.split(norm(part).to(value.dtype), sizes, dim=2)
                rotated: Any = apply_rotary_emb(image, image_rotary_emb, use_real_unbind_dim=-2)
                return torch.cat([text, rotated], dim=2)

            mask = None if text_mask is None else pad(text_mask, (0, sizes[1]), value=True)[:, None, None]
            states = scaled_dot_product_attention(
                rotate(query, attn.norm_q), rotate(key, attn.norm_k), value, attn_mask=mask
            )
            output = attn.to_out[0](states.transpose(1, 2).flatten(2).to(value.dtype))
            text_output, image_output = torch.split(output, sizes, dim=1)
            return image_output, text_output

    return TextMaskProcessor()
