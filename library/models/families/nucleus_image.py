"""Nucleus-Image: attention to image and text of Qwen3-VL, and experts that choose their tokens; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    TextFacts,
    TrainerNames,
)
from ..family_noise_levels import NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import MASKED_ATTENTION_MODES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

NUCLEUS_MAX_SEQUENCE_LENGTH = 1024
"""Maximum tokens of the prompt with the system prompt and the chat template, as in diffusers' pipeline."""
PATCH_SIZE = 2
"""Latents of a token in each direction."""
WHOLE_EXPERTS = "the experts of Nucleus-Image are not split"
WHOLE_IMAGE = "the experts of Nucleus-Image choose among all tokens of an image"


def _match_nucleus_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    reason = f"the transformer has {config.get('num_layers')} blocks with {config.get('num_experts')} experts"
    return match_flow_model(read, PATCH_SIZE**2, reason, PATCH_SIZE)


FACTS = FamilyFacts(
    title="Nucleus-Image",
    pipeline=PipelineFacts(
        class_name="NucleusMoEImagePipeline", num_parameters=16_922_679_296, hub_id="NucleusAI/Nucleus-Image"
    ),
    detection=DetectionFacts(
        match_configs=_match_nucleus_image,
        trainer_names=TrainerNames(ai_toolkit=("nucleus_image",)),
    ),
    lora=FamilyLora(
        # The attention to image and text, and the feed-forward layers that see all tokens.
        targets=(
            *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj")),
            *("img_mlp.net.0.proj", "img_mlp.net.2", "shared_expert.net.0.proj", "shared_expert.net.2"),
        ),
        key_style=TRANSFORMER_LOADER_KEYS,
        format="diffusers",
        modelspec_architecture="nucleus-image",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states",),
        unsupported_strategies={
            "tp": WHOLE_EXPERTS,
            "cp": WHOLE_IMAGE,
            "cuda_graphs": "Nucleus-Image copies its rotary embedding from the host",
        },
        has_expert_matrices=True,
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "processor"),
        tokenizer_repo_ids={"processor": "NucleusAI/Nucleus-Image:processor"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        other_trainers={"ai-toolkit": NoiseLevels("uniform", origin="its preset")},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=4.0),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="from folders and the hub; LoRA in diffusers: `transformer.load_lora_adapter`",
)


class NucleusImage(Family):
    facts = FACTS

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        experts = _build_experts_class()
        for module in denoiser.modules():
            if type(module) is experts.__bases__[0]:
                module.__class__ = experts

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("nucleus_image", "nucleus-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from ..text_encoding import suppress_truncation_warnings

        with suppress_truncation_warnings(pipe, pipe.processor):
            embeds, mask = pipe.encode_prompt(
                list(prompts), pipe.text_encoder.device, max_sequence_length=NUCLEUS_MAX_SEQUENCE_LENGTH
            )
        if mask is None:
            return {"embeds": list(embeds)}
        return {"embeds": [row[is_text] for row, is_text in zip(embeds, mask.bool(), strict=True)]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        texts = [pipe._format_prompt(prompt) for prompt in prompts]
        width, max_length = pipe.transformer.config.joint_attention_dim, NUCLEUS_MAX_SEQUENCE_LENGTH
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.processor, texts, width, max_length)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from diffusers.pipelines.nucleusmoe_image.pipeline_nucleusmoe_image import DEFAULT_SYSTEM_PROMPT

        from .. import text_encoding

        max_tokens = NUCLEUS_MAX_SEQUENCE_LENGTH
        return text_encoding.find_truncated_chats(pipe.processor, prompts, max_tokens, DEFAULT_SYSTEM_PROMPT)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_frame_moments

        return encode_frame_moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_frame_latents

        return decode_frame_latents(pipe.vae, latents)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        frames = pipe._unpack_latents(latents, height, width, PATCH_SIZE, pipe.vae_scale_factor)
        return self.decode_latents(pipe, frames.squeeze(2))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        count, channels, height, width = noisy_latents.shape
        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        # Padding to a multiple always passes a mask, even a full one, so that compiled graphs see one signature.
        is_unpadded = all(len(row) == embeds.shape[1] for row in batch.cond["embeds"])
        tokens = pipe._pack_latents(noisy_latents, count, channels, height=height, width=width, patch_size=PATCH_SIZE)
        predicted = denoiser(
            hidden_states=tokens,
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=None if is_unpadded and batch.text_pad_multiple == 1 else mask,
            img_shapes=[(1, height // PATCH_SIZE, width // PATCH_SIZE)] * count,
            attention_kwargs={},
            return_dict=False,
        )[0]
        frames: Tensor = pipe._unpack_latents(predicted, height, width, PATCH_SIZE, 1)
        return -frames.squeeze(2)  # the model's velocity runs from noise to image

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(cond["embeds"])
        negative_embeds, negative_mask = pad_text_embeds(negative_cond["embeds"])
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=embeds,
            prompt_embeds_mask=mask,
            negative_prompt_embeds=negative_embeds,
            negative_prompt_embeds_mask=negative_mask,
        )


def _build_experts_class() -> Any:
    """diffusers' experts, which all choose the same number of tokens, as one product without a copy to the host."""
    from diffusers.models.transformers.transformer_nucleusmoe_image import SwiGLUExperts
    from torch.nn.functional import silu

    class BatchedExperts(SwiGLUExperts):
        expert_weights = "gate_up_proj", "down_proj"
        """Parameters, or layers in their place, which quantization and block swap make of them."""

        def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            tokens = x.view(self.num_experts, -1, x.shape[1])
            gate, up = _multiply(tokens, self.gate_up_proj).chunk(2, dim=-1)
            return _multiply(silu(gate) * up, self.down_proj).flatten(0, 1)

    return BatchedExperts


def _multiply(tokens: Tensor, weight: Any) -> Tensor:
    product: Tensor = weight(tokens) if callable(weight) else tokens @ weight
    return product
