"""Qwen-Image: packed 2 x 2 latent patches, variable-length text of Qwen2.5-VL, a video VAE; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...config.network_args import NetworkFacts
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
from ..family_noise_levels import LOGIT_NORMAL, WEIGHTED, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import (
    DENOISER_PREFIXES,
    JOINT_ATTENTION_LORA_TARGET_MODULES,
    MASKED_ATTENTION_MODES,
    match_flow_model,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

QWEN_MAX_SEQUENCE_LENGTH = 1024
"""Maximum tokens of the prompt: the most that diffusers' pipeline takes, and those of musubi-tuner."""


def _match_qwen_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("zero_cond_t") or config.get("use_layer3d_rope") or config.get("use_additional_t_cond"):
        raise ModelError("its transformer is that of Qwen-Image-Edit-2511 or Qwen-Image-Layered; use the whole model")
    return match_flow_model(read, 4, f"the transformer has {config.get('num_layers')} blocks")


FACTS = FamilyFacts(
    title="Qwen-Image",
    pipeline=PipelineFacts(class_name="QwenImagePipeline", num_parameters=20_430_401_088, hub_id="Qwen/Qwen-Image"),
    detection=DetectionFacts(
        match_configs=_match_qwen_image,
        keys=("transformer_blocks.0.img_mlp.net.0.proj.weight", "transformer_blocks.0.attn.add_q_proj.weight"),
        shape_checks={
            ("img_in.weight", 1): ("transformer", "in_channels"),
            ("txt_in.weight", 1): ("transformer", "joint_attention_dim"),
            ("__index_timestep_zero__", None): ("transformer", "zero_cond_t"),  # of 2511, in files for ComfyUI
            ("time_text_embed.addition_t_embedding.weight", None): (
                "transformer",
                "use_additional_t_cond",
            ),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("qwen_image",),
            diffusion_pipe=("qwen_image",),
            onetrainer=("QWEN",),
            simpletuner=("qwen_image",),
            simpletuner_flavours={"v1.0": "Qwen/Qwen-Image", "v2.0": "Qwen/Qwen-Image-2512"},
            simpletuner_default="v2.0",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen25_7b.transformer.",),
        },
        classes={"vae": "AutoencoderKLWan"},
    ),
    lora=FamilyLora(
        # The linear layers of the blocks except the modulation.
        targets=(
            *JOINT_ATTENTION_LORA_TARGET_MODULES,
            "img_mlp.net.0.proj",
            "img_mlp.net.2",
            "txt_mlp.net.0.proj",
            "txt_mlp.net.2",
        ),
        targets_of="musubi-tuner",
        optional_targets=("img_mod.1", "txt_mod.1"),
        modelspec_architecture="qwen-image",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        token_args={
            "image_rotary_emb": ((0, ("hidden_states",)), (0, ("encoder_hidden_states",))),
            "encoder_hidden_states_mask": ((1, ("encoder_hidden_states",)),),
        },
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Qwen/Qwen-Image:tokenizer"},
        has_variable_length=True,
        pad_multiple=64,
        version=2,  # captions were cut at 512 tokens before
    ),
    training_noise=TrainingNoiseFacts(
        other_trainers={
            "musubi-tuner": NoiseLevels("shift", 2.2, origin="its guide; or qwen_shift"),
            "ai-toolkit": WEIGHTED,
            "OneTrainer": LOGIT_NORMAL,
        },
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=4.0),
    options=FamilyOptions(
        components={"vae": "vae", "text_encoder": "text_encoder"},
        network=NetworkFacts(
            modules=("networks.lora_qwen_image",), args=("train_modulation",), musubi_args=("train_modulation=True",)
        ),
        musubi_versions={"original": {}},
    ),
)


class QwenImage(Family):
    facts = FACTS

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        # The text output of the last block is discarded.
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}"
        layers = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        return tuple(f"{last}.{layer}" for layer in layers)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("qwen_image", "qwen-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        device, max_length = pipe.text_encoder.device, QWEN_MAX_SEQUENCE_LENGTH
        embeds, mask = pipe.encode_prompt(list(prompts), device, max_sequence_length=max_length)
        lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(1).tolist()
        return {"embeds": [row[:length] for row, length in zip(embeds, lengths, strict=True)]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        texts = [pipe.prompt_template_encode.format(prompt) for prompt in prompts]
        width, num_prefix_tokens = pipe.transformer.config.joint_attention_dim, pipe.prompt_template_encode_start_idx
        max_length = QWEN_MAX_SEQUENCE_LENGTH
        embeds = text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, max_length, num_prefix_tokens)
        return {"embeds": embeds}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        prefix, _, _ = pipe.prompt_template_encode.partition("{}")
        max_tokens = QWEN_MAX_SEQUENCE_LENGTH + pipe.prompt_template_encode_start_idx
        texts = [prefix + prompt for prompt in prompts]
        truncated = set(text_encoding.find_truncated_prompts(pipe.tokenizer, texts, max_tokens))
        return [prompt for prompt in prompts if prefix + prompt in truncated]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_frame_moments

        return encode_frame_moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_frame_latents

        return decode_frame_latents(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        count, channels, height, width = noisy_latents.shape
        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        # Padding to a multiple always passes a mask, even a full one, so that compiled graphs see one signature.
        is_unpadded = all(len(row) == embeds.shape[1] for row in batch.cond["embeds"])
        needs_mask = batch.text_pad_multiple > 1 or not is_unpadded
        tokens, grids = pipe._pack_latents(noisy_latents, count, channels, height, width), [(height, width)]
        num_tokens = tokens.shape[1]
        if batch.control_latents:
            controls = [latents.to(tokens.dtype) for latents in batch.control_latents]
            tokens = torch.cat([tokens, *(pipe._pack_latents(each, *each.shape) for each in controls)], dim=1)
            grids += [(each.shape[2], each.shape[3]) for each in controls]
        predicted = denoiser(
            hidden_states=tokens,
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask if needs_mask else None,
            img_shapes=[[(1, high // 2, wide // 2) for high, wide in grids]] * count,
            return_dict=False,
        )[0][:, :num_tokens]
        frames: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return frames.squeeze(2)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(cond["embeds"])
        negative_embeds, negative_mask = pad_text_embeds(negative_cond["embeds"])
        scale = self.facts.sampling.get_guidance_scale(prompt.cfg_scale)
        return dict(
            true_cfg_scale=scale,
            prompt_embeds=embeds,
            prompt_embeds_mask=mask,
            negative_prompt_embeds=negative_embeds if scale > 1 else None,
            negative_prompt_embeds_mask=negative_mask,
            max_sequence_length=QWEN_MAX_SEQUENCE_LENGTH,  # the pipeline cuts off embeddings at 512 otherwise
        )
