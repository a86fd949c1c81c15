"""FLUX.3 klein: text and image have own blocks before joint ones; states of eight layers of Qwen3-VL are its text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...adapters.token_layout import OTHER_TOKENS, TokenLayout
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
)
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import DENOISER_PREFIXES, MASKED_ATTENTION_MODES, match_flow_model, require_newer_diffusers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

FLUX3_MAX_SEQUENCE_LENGTH = 8192
"""Maximum tokens of the prompt with its chat template, as in diffusers' pipeline."""
TOKENS_MULTIPLE = 80
"""A prompt is padded to a multiple of this many tokens; the model reads them like others."""
IMAGE_POSITION_SCALE = 0.5


def _match_flux3(read: ConfigReader) -> FamilyMatch:
    require_newer_diffusers()
    config = read_required(read, "transformer/config.json")
    if config.get("flow_map"):
        raise ModelError("a step-distilled FLUX.3 cannot be trained; use the base model")
    return match_flow_model(read, 4, f"the transformer has {config.get('num_single_layers')} joint blocks")


_ORIGINAL_PARTS = {
    "single_transformer_blocks.": "single_blocks.",
    "x_embedders.": "emb_in.",
    "context_embedder": "txt_in",
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "norm_out.linear": "final_layer.image.adaLN_modulation.1",
    "proj_out": "final_layer.image.linear",
    "attn.to_out.0": "attn_out",
    "attn.to_q": "q_proj",
    "attn.to_k": "k_proj",
    "attn.to_v": "v_proj",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
    "ff.linear_in": "mlp_in",
    "ff.linear_out": "mlp_out",
}


def _rename_to_original(modules: Iterable[str]) -> Mapping[str, str]:
    renames = {}
    for module in modules:
        name = f"content_{module}" if module.startswith("mode_blocks.") else module
        for part, original in _ORIGINAL_PARTS.items():
            name = name.replace(part, original)
        renames[module] = name.replace(".linear", ".lin") if "_modulations." in name else name
    return renames


FLUX3_KEYS = KeyStyle(
    "flux3",
    rename=_rename_to_original,
    is_read_by_diffusers=False,
    has_original_names_in_diffusers=True,
)


FACTS = FamilyFacts(
    title="FLUX.3 klein",
    pipeline=PipelineFacts(class_name="Flux3ModularPipeline", num_parameters=5_538_458_368),
    detection=DetectionFacts(
        match_configs=_match_flux3,
        keys=(
            "early_stream_modulations.image.lin.weight",
            "content_mode_blocks.image.0.q_proj.weight",
            "txt_in.weight",
        ),
        diffusers_keys={
            "early_stream_modulations.image.lin.weight": "early_stream_modulations.image.linear.weight",
            "content_mode_blocks.image.0.q_proj.weight": "mode_blocks.image.0.attn.to_q.weight",
            "txt_in.weight": "context_embedder.weight",
        },
        shape_checks={("txt_in.weight", 1): ("transformer", "joint_attention_dim")},
        unsupported_shapes={("ref_time_in.in_layer.weight", 1, 256): "a step-distilled FLUX.3; use the base model"},
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen3vl_4b.transformer.",),
        },
        classes={"vae": "AutoencoderKL"},
        renames={"encoder.quant_conv.": "quant_conv.", "decoder.post_quant_conv.": "post_quant_conv."},
    ),
    lora=FamilyLora(
        # Every linear layer of the blocks; the modulation is outside of them.
        targets=(
            *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *("ff.linear_in", "ff.linear_out"),
        ),
        key_style=FLUX3_KEYS,
        format="diffusers",
        modelspec_architecture="flux-3",
    ),
    blocks=BlockFacts(
        token_layouts={r"^single_transformer_blocks\.": TokenLayout(segments=("encoder_hidden_states", OTHER_TOKENS))},
        # The blocks of one stream alone come before: only the joint ones are split.
        lists=("single_transformer_blocks",),
        token_args={
            "temb_mod": ((1, ("hidden_states",)),),
            "temb_mod_context": ((1, ("encoder_hidden_states",)),),
            "image_rotary_emb": ((0, ("encoder_hidden_states", "hidden_states")),) * 2,
        },
        single_stream_lists=("single_transformer_blocks",),
        fused_layers={r"\.ff\.linear_in$": ("colwise", (1, 1)), r"\.ff\.linear_out$": ("rowwise", (1,))},
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Qwen/Qwen3-VL-4B-Instruct"},
        has_variable_length=True,
        pad_multiple=TOKENS_MULTIPLE,
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="sigma",
        reason="uniform with the pipeline's shift of 6.93, which already prefers noise",
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=3.5),
    options=FamilyOptions(components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"}),
    notes="the base model; sizes are diffusers' defaults",
)


class Flux3(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        denoiser.pos_embed.register_forward_hook(_append_text_masks)
        denoiser.set_attn_processor(_build_attention_processor())

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        # Without reference images.
        return tuple(name for name, _ in denoiser.named_modules() if name.startswith("mode_blocks.image_cond."))

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("flux3_klein", "flux-3-klein")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config, patch_size=1)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        encode = import_module("diffusers.modular_pipelines.flux3.encoders").Flux3TextEncoderStep
        # diffusers' tokenizer is a processor; of texts alone, both are one.
        parts = SimpleNamespace(apply_chat_template=pipe.tokenizer.apply_chat_template, tokenizer=pipe.tokenizer)
        # One at a time: each has a window of its own.
        rows = [
            encode._get_qwen3_vl_prompt_embeds(pipe.text_encoder, parts, prompt, pad_multiple=TOKENS_MULTIPLE)[0]
            for prompt in prompts
        ]
        return {"embeds": rows}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        width, tokenizer = pipe.transformer.config.joint_attention_dim, pipe.tokenizer
        texts = [_apply_chat_template(tokenizer, prompt) for prompt in prompts]
        counts = (len(ids) for ids in tokenizer(texts, truncation=False, verbose=False).input_ids)
        windows = (min(-(-count // TOKENS_MULTIPLE) * TOKENS_MULTIPLE, FLUX3_MAX_SEQUENCE_LENGTH) for count in counts)
        return {"embeds": [torch.empty(window, width, device="meta") for window in windows]}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_chats(pipe.tokenizer, prompts, FLUX3_MAX_SEQUENCE_LENGTH)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_patch_moments

        return encode_patch_moments(pipe, pixels, pipe.vae.config.batch_norm_eps)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_patch_latents

        return decode_patch_latents(pipe, latents, pipe.vae.config.batch_norm_eps)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..constant_copies import copy_constant
        from ..text_encoding import pad_text_embeds

        before: Any = import_module("diffusers.modular_pipelines.flux3.before_denoise")
        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        text_ids = before.Flux3TextRoPEInputsStep._prepare_text_ids(embeds)
        image_ids = before._prepare_image_ids(*noisy_latents.shape[2:], IMAGE_POSITION_SCALE)
        text_ids, image_ids = (copy_constant(ids, noisy_latents.device) for ids in (text_ids, image_ids))
        if any(len(row) != embeds.shape[1] for row in batch.cond["embeds"]):
            text_ids = torch.cat([text_ids, mask.T.to(text_ids)], dim=1)
            image_ids = torch.cat([image_ids, image_ids.new_ones(len(image_ids), len(mask))], dim=1)
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents.flatten(2).transpose(1, 2),
            encoder_hidden_states=embeds,
            timestep=timesteps / 1000,
            img_ids=image_ids,
            txt_ids=text_ids,
            return_dict=False,
        )[0]
        return predicted.transpose(1, 2).reshape(noisy_latents.shape)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=cond["embeds"][0].unsqueeze(0),
            negative_prompt_embeds=negative_cond["embeds"][0].unsqueeze(0),
        )


def _apply_chat_template(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _append_text_masks(pos_embed: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keep the columns of ids after the positions: for each sample of a batch, which tokens it has.

    diffusers' transformer has no mask for texts of different length.  What the positions give goes to every block.
    """
    import torch

    masks = args[0][:, len(pos_embed.axes_dim) :]
    cos, sin = (torch.cat([part, masks.to(part)], dim=1) for part in output)
    return cos, sin


def _build_attention_processor() -> Any:
    """diffusers' attention with the mask that the positions carry, if they do."""
    from diffusers.models.transformers.transformer_flux3 import Flux3AttnProcessor

    class TextMaskProcessor(Flux3AttnProcessor):
        def __call__(
            self, attn: Any, hidden_states: Tensor, attention_mask: Any = None, image_rotary_emb: Any = None
        ) -> Any:
            cos, sin = image_rotary_emb
            if cos.shape[1] > attn.head_dim:
                attention_mask = cos[:, attn.head_dim :].T.bool()[:, None, None]
            image_rotary_emb = cos[:, : attn.head_dim], sin[:, : attn.head_dim]
            return super().__call__(attn, hidden_states, attention_mask, image_rotary_emb)

    return TextMaskProcessor()


def _build_pipeline_class() -> Any:
    from diffusers import Flux2Pipeline, Flux3ModularPipeline

    from ..modular_pipelines import PipelineSteps, build_pipeline_class

    blocks: Any = import_module("diffusers.modular_pipelines.flux3.modular_blocks_flux3")
    steps = PipelineSteps(
        encode=lambda: {"text_encoder": blocks.Flux3TextEncoderStep()},
        denoise=lambda: {
            "input": blocks.Flux3TextInputStep(),
            "prepare_latents": blocks.Flux3PrepareLatentsStep(),
            "set_timesteps": blocks.Flux3SetTimestepsStep(),
            "prepare_rope_inputs": blocks.Flux3TextRoPEInputsStep(),
            "denoise": blocks.Flux3DenoiseStep(),
            "after_denoise": blocks.Flux3UnpackLatentsStep(),
        },
        decode=lambda: {"decode": blocks.Flux3DecodeStep()},
    )
    pipeline_class = build_pipeline_class(Flux3ModularPipeline, (*FACTS.components, "scheduler"), steps)
    # The patches of FLUX.2's VAE.
    pipeline_class._patchify_latents = staticmethod(Flux2Pipeline._patchify_latents)
    pipeline_class._unpatchify_latents = staticmethod(Flux2Pipeline._unpatchify_latents)
    return pipeline_class
