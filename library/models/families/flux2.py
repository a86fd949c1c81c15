"""FLUX.2: dev with Mistral and an embedded guidance, klein (4B and 9B, base and distilled) with Qwen3; flow matching.

Latents are patches of 2 x 2, normalized by the running statistics of the VAE; one of them is one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ...adapters.original_module_names import KeyStyle, OriginalModule
from ...config.network_args import NetworkFacts
from ...diffusion.timestep_shift import FLUX_DEV_SHIFT
from ..base import BaseModelInfo, Family
from ..facts import (
    BlockFacts,
    ControlFacts,
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
from ..family_noise_levels import WEIGHTED, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
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
    from ...diffusion.process import NoiseProcess

FLUX2_MAX_SEQUENCE_LENGTH = 512
"""Texts are padded to this many tokens, and padding is attended to, as in diffusers' pipeline."""


def _match_flux2(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    has_guidance = bool(config.get("guidance_embeds", True))
    blocks = f"{config.get('num_layers', 8)} double and {config.get('num_single_layers', 48)} single blocks"
    return replace(match_flow_model(read, 4, f"the transformer has {blocks}"), has_guidance_embeds=has_guidance)


_KLEIN_KEYS = ("double_stream_modulation_img.lin.weight", "double_blocks.0.img_attn.qkv.weight", "img_in.weight")


def _build_stream(stream: str, attention: Sequence[str], out: str, mlp: str) -> tuple[OriginalModule, ...]:
    original, block = f"double_blocks.{{}}.{stream}", "transformer_blocks.{}"
    return (
        OriginalModule(f"{original}_attn.qkv", tuple(f"{block}.attn.{name}" for name in attention)),
        OriginalModule(f"{original}_attn.proj", (f"{block}.attn.{out}",)),
        OriginalModule(f"{original}_mlp.0", (f"{block}.{mlp}.linear_in",)),
        OriginalModule(f"{original}_mlp.2", (f"{block}.{mlp}.linear_out",)),
    )


_LAYOUT = (
    *_build_stream("img", ("to_q", "to_k", "to_v"), "to_out.0", "ff"),
    *_build_stream("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context"),
    OriginalModule("single_blocks.{}.linear1", ("single_transformer_blocks.{}.attn.to_qkv_mlp_proj",)),
    OriginalModule("single_blocks.{}.linear2", ("single_transformer_blocks.{}.attn.to_out",)),
)
FLUX2_KEYS = KeyStyle("flux2", _LAYOUT, has_lokr_in_diffusers=True, is_comfy_format_in_diffusers=False)


DEV_FACTS = FamilyFacts(
    title="FLUX.2 dev",
    pipeline=PipelineFacts(
        class_name="Flux2Pipeline", num_parameters=32_223_281_152, hub_id="black-forest-labs/FLUX.2-dev"
    ),
    detection=DetectionFacts(
        match_configs=_match_flux2,
        keys=("guidance_in.in_layer.weight", *_KLEIN_KEYS),
        diffusers_keys={
            "guidance_in.in_layer.weight": "time_guidance_embed.guidance_embedder.linear_1.weight",
            "double_stream_modulation_img.lin.weight": "double_stream_modulation_img.linear.weight",
            "double_blocks.0.img_attn.qkv.weight": "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
            "img_in.weight": "x_embedder.weight",
            "txt_in.weight": "context_embedder.weight",
        },
        shape_checks={
            ("img_in.weight", 1): ("transformer", "in_channels"),
            ("txt_in.weight", 1): ("transformer", "joint_attention_dim"),
            ("guidance_in.in_layer.weight", None): ("transformer", "guidance_embeds"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("flux2",),
            diffusion_pipe=("flux2",),
            onetrainer=("FLUX_2",),
            simpletuner=("flux2",),
            simpletuner_flavours={"dev": "black-forest-labs/FLUX.2-dev"},
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.mistral3_24b.transformer.",),
        },
        classes={"vae": "AutoencoderKL"},
        renames={"encoder.quant_conv.": "quant_conv.", "decoder.post_quant_conv.": "post_quant_conv."},
    ),
    lora=FamilyLora(
        # Every linear layer of the blocks; the modulation is outside of them.
        targets=(
            *(
                f"transformer_blocks.*.attn.{name}"
                for name in JOINT_ATTENTION_LORA_TARGET_MODULES
                if "to_out" not in name
            ),
            "transformer_blocks.*.attn.to_out.0",
            *(f"{mlp}.{layer}" for mlp in ("ff", "ff_context") for layer in ("linear_in", "linear_out")),
            *(f"single_transformer_blocks.*.attn.{name}" for name in ("to_qkv_mlp_proj", "to_out")),
        ),
        targets_of="musubi-tuner",
        key_style=FLUX2_KEYS,
        format="diffusers",
        modelspec_architecture="flux-2-dev",
    ),
    blocks=BlockFacts(
        # The double blocks pass on two streams, the single ones their concatenation: only the latter are split.
        lists=("single_transformer_blocks",),
        activation_args=("hidden_states",),
        token_args={"image_rotary_emb": ((0, ("hidden_states",)),) * 2},
        single_stream_lists=("single_transformer_blocks",),
        fused_layers={
            r"\.linear_in$": ("colwise", (1, 1)),
            r"\.linear_out$": ("rowwise", (1,)),
            r"\.to_qkv_mlp_proj$": ("colwise", (1, 1, 1, 3, 3)),
            r"^single_transformer_blocks\.\d+\.attn\.to_out$": ("rowwise", (1, 3)),
        },
        attention_modes=(*MASKED_ATTENTION_MODES, "flash", "flash3"),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "black-forest-labs/FLUX.2-dev:tokenizer"},
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="flux2_shift",
        shift=FLUX_DEV_SHIFT,
        reason="the shift of its scheduler's config, as in musubi-tuner; that of its pipeline depends on the number of "
        "sampling steps",
        other_trainers={
            "musubi-tuner": NoiseLevels("flux2_shift", origin="its guide"),
            "ai-toolkit": WEIGHTED,
            "OneTrainer": NoiseLevels("flux2_shift"),
        },
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=4.0, is_guidance_embedded=True),
    control=ControlFacts(num_images=(0, 10)),
    options=FamilyOptions(
        components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"},
        extra=("guidance_scale",),
        network=NetworkFacts(modules=("networks.lora_flux_2",)),
        musubi_versions={"dev": {}},
    ),
)

KLEIN_FACTS = replace(
    DEV_FACTS,
    title="FLUX.2 klein",
    pipeline=PipelineFacts(class_name="Flux2KleinPipeline", num_parameters=9_078_581_248),
    sampling=replace(DEV_FACTS.sampling, is_guidance_embedded=False),
    detection=replace(
        DEV_FACTS.detection,
        keys=_KLEIN_KEYS,
        trainer_names=TrainerNames(
            ai_toolkit=("flux2_klein_4b", "flux2_klein_9b"),
            diffusion_pipe=("flux2",),
            onetrainer=("FLUX_2",),
            simpletuner=("flux2",),
            simpletuner_flavours={
                "klein-4b": "black-forest-labs/FLUX.2-klein-base-4B",
                "klein-9b": "black-forest-labs/FLUX.2-klein-base-9B",
            },
            simpletuner_default="klein-9b",
            variant_pattern="klein",
        ),
    ),
    single_files=replace(
        DEV_FACTS.single_files,
        prefixes={**DEV_FACTS.single_files.prefixes, "text_encoder": ("text_encoders.qwen3_4b.transformer.",)},
    ),
    lora=replace(DEV_FACTS.lora, modelspec_architecture="flux-2-klein"),
    text=replace(DEV_FACTS.text, tokenizer_repo_ids={"tokenizer": "black-forest-labs/FLUX.2-klein-base-4B:tokenizer"}),
    options=replace(
        DEV_FACTS.options,
        extra=(),
        musubi_versions={name: {} for name in ("klein-4b", "klein-9b", "klein-base-4b", "klein-base-9b")},
    ),
    notes="train on the base models; distilled ones lose their few steps",
)


class Flux2Klein(Family):
    """Sampled with classifier-free guidance, unless it is distilled."""

    facts = KLEIN_FACTS

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        return ()  # the text goes on through the single blocks

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        """The shift of the scheduler's config; in sampling, the pipeline replaces it by one for its steps."""
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config, patch_size=1)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        size = "9b" if pipe.transformer.config.num_layers == 8 else "4b"
        return BaseModelInfo(f"flux2_klein_{size}", f"flux-2-klein-{size}")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return {"embeds": pipe.encode_prompt(list(prompts), pipe.text_encoder.device)[0]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        width = pipe.transformer.config.joint_attention_dim
        return {"embeds": torch.empty(len(prompts), FLUX2_MAX_SEQUENCE_LENGTH, width, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_chats(pipe.tokenizer, prompts, FLUX2_MAX_SEQUENCE_LENGTH)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_patch_moments

        return encode_patch_moments(pipe, pixels, pipe.vae.config.batch_norm_eps)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_patch_latents

        return decode_patch_latents(pipe, latents, pipe.vae.config.batch_norm_eps)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        """klein's pipeline returns latents without their normalization, dev's tokens."""
        import torch

        from ..vae import disable_autocast

        if latents.ndim == 3:
            side = pipe.vae_scale_factor * 2
            grid = latents.transpose(1, 2).reshape(len(latents), -1, height // side, width // side)
            return self.decode_latents(pipe, grid)
        with torch.no_grad(), disable_autocast(pipe.vae):
            pixels: Tensor = pipe.vae.decode(latents.to(pipe.vae.device, pipe.vae.dtype), return_dict=False)[0]
        return pixels

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..constant_copies import copy_constant

        embeds, device = cast("Tensor", batch.cond["embeds"]), noisy_latents.device
        tokens, positions = pipe._pack_latents(noisy_latents), pipe._prepare_latent_ids(noisy_latents)
        num_tokens = tokens.shape[1]
        if batch.control_latents:
            tokens, positions = _append_controls(pipe, tokens, positions, batch.control_latents)
        predicted: Tensor = denoiser(
            hidden_states=tokens,
            timestep=timesteps / 1000,
            guidance=self._build_guidance(timesteps),
            encoder_hidden_states=embeds,
            txt_ids=copy_constant(pipe._prepare_text_ids(embeds), device),
            img_ids=copy_constant(positions, device),
            joint_attention_kwargs=None,
            return_dict=False,
        )[0]
        return predicted[:, :num_tokens].transpose(1, 2).reshape(noisy_latents.shape)

    def _build_guidance(self, timesteps: Tensor) -> Tensor | None:
        return None

    def is_step_distilled(self, pipe: Any) -> bool:
        return bool(pipe.config.is_distilled)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        embeds = {"prompt_embeds": cond["embeds"], "negative_prompt_embeds": negative_cond["embeds"]}
        sampling = self.facts.sampling
        steps = prompt.num_inference_steps or (4 if pipe.config.is_distilled else sampling.num_inference_steps)
        scale = sampling.get_guidance_scale(prompt.cfg_scale)
        return {**embeds, "guidance_scale": scale, "num_inference_steps": steps}


class Flux2Dev(Flux2Klein):
    """Guidance-distilled: the guidance scale is an input, and there is no negative prompt."""

    facts = DEV_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("flux2_dev", "flux-2-dev")

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        tokenizer, max_tokens = getattr(pipe.tokenizer, "tokenizer", pipe.tokenizer), FLUX2_MAX_SEQUENCE_LENGTH
        return text_encoding.find_truncated_chats(tokenizer, prompts, max_tokens, pipe.system_message)

    def _build_guidance(self, timesteps: Tensor) -> Tensor | None:
        return timesteps.new_full(timesteps.shape, self.model_config.guidance_scale)

    def is_step_distilled(self, pipe: Any) -> bool:
        return False

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        scale = prompt.embedded_guidance
        if scale is None:
            scale = self.facts.sampling.get_guidance_scale(prompt.cfg_scale)
        return {"prompt_embeds": cond["embeds"], "guidance_scale": scale}


def _append_controls(
    pipe: Any, tokens: Tensor, positions: Tensor, control_latents: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Append the tokens of control images; the first coordinate of their positions is 10, 20 ... instead of 0."""
    import torch

    parts = [pipe._pack_latents(latents.to(tokens.dtype)) for latents in control_latents]
    own = pipe._prepare_image_ids([latents[:1] for latents in control_latents])
    return torch.cat([tokens, *parts], dim=1), torch.cat([positions, own.expand(len(positions), -1, -1)], dim=1)
