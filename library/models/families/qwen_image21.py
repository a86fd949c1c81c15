"""Qwen-Image 2.1: one stream, causal in its text of Qwen3-VL, on 64 channels of images with alpha; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle, OriginalModule
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
from ..shared_facts import DENOISER_PREFIXES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

SLOT_TOKENS = 4
"""Image tokens for which there is one place in the mask of the sequence."""

_VAE_PATTERNS = {
    r"^quant_conv\.": "conv1.",
    r"^post_quant_conv\.": "conv2.",
    r"\.conv_in\.": ".conv1.",
    r"\.norm_out\.": ".head.0.",
    r"\.conv_out\.": ".head.2.",
    r"\.norm1\.": ".residual.0.",
    r"\.resnets\.(\d)\.conv1\.": r".resnets.\1.residual.2.",
    r"\.norm2\.": ".residual.3.",
    r"\.resnets\.(\d)\.conv2\.": r".resnets.\1.residual.6.",
    r"\.conv_shortcut\.": ".shortcut.",
    r"\.mid_block\.resnets\.0\.": ".middle.0.",
    r"\.mid_block\.attentions\.0\.": ".middle.1.",
    r"\.mid_block\.resnets\.1\.": ".middle.2.",
    r"\.(down|up)_blocks\.(\d)\.resnets\.": r".\1samples.\2.\1samples.",
    r"\.down_blocks\.(\d)\.downsampler\.": r".downsamples.\1.downsamples.2.",
    r"\.up_blocks\.(\d)\.upsampler\.": r".upsamples.\1.upsamples.3.",
}
"""Patterns of the VAE's keys in diffusers, and the keys of Wan 2.2's VAE, which files have."""


def _match_qwen_image21(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if not config.get("causal_condition", True):
        raise ModelError("its transformer modulates the text by the timestep (causal_condition false)")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks")


_BLOCK_MLP = "transformer_blocks.{}.img_mlp."
QWEN_IMAGE21_KEYS = KeyStyle("diffusers", unread_in_diffusers={"kohya": "loads no gates of this layout"})
COMFYUI_KEYS = KeyStyle(
    "qwen_image21", (OriginalModule(f"{_BLOCK_MLP}gate_up", (f"{_BLOCK_MLP}gate_layer", f"{_BLOCK_MLP}proj"), (1, 1)),)
)
"""The module with another name in ComfyUI's files."""


FACTS = FamilyFacts(
    title="Qwen-Image 2.1",
    pipeline=PipelineFacts(
        class_name="QwenImage21Pipeline", num_parameters=7_115_124_736, hub_id="Qwen/Qwen-Image-2.1"
    ),
    detection=DetectionFacts(
        match_configs=_match_qwen_image21,
        keys=("txt_in.text_norm.weight", "modulation.1.weight", "transformer_blocks.0.attn.to_q.weight"),
        shape_checks={
            ("img_in.weight", 1): ("transformer", "in_channels"),
            ("txt_in.in_layer.weight", 1): ("transformer", "context_in_dim"),
        },
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen3vl_8b.transformer.",),
        },
        build_vae_patterns=lambda config: _VAE_PATTERNS,
    ),
    lora=FamilyLora(
        # Every linear layer of the blocks; the modulation is outside of them.
        targets=(
            *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *("img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"),
        ),
        key_style=QWEN_IMAGE21_KEYS,
        other_key_styles=(COMFYUI_KEYS,),
        format="diffusers",
        modelspec_architecture="qwen-image-2.1",
    ),
    blocks=BlockFacts(
        token_layouts={r"^transformer_blocks\.": TokenLayout(segments=("encoder_hidden_states", OTHER_TOKENS))},
        lists=("transformer_blocks",),
        activation_args=("hidden_states",),
        token_args={"rotary_emb": ((0, ("hidden_states",)),)},
        fused_layers={
            r"\.img_mlp\.(proj|gate_layer)$": ("colwise", (1,)),
            r"\.img_mlp\.out$": ("rowwise", (1,)),
        },
        unsupported_strategies={"cuda_graphs": "Qwen-Image 2.1 copies masks of its tokens from the host"},
        attention_modes=(),  # its attention passes torch's backend on, whichever is set
    ),
    text=TextFacts(
        components=("text_encoder", "processor"),
        tokenizer_repo_ids={"processor": "Qwen/Qwen-Image-2.1:processor"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(multiples_per_token=0.5),  # sides are even numbers of tokens
    sampling=SamplingFacts(num_inference_steps=40, guidance_scale=1.0),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="text to image; train on the base model, the Turbo loses its few steps",
)


class QwenImage21(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        import inspect
        from functools import partial

        denoiser.pos_embed.register_forward_hook(_append_positions)
        denoiser.set_attn_processor(_build_attention_processor())
        for block in denoiser.transformer_blocks:
            names = tuple(inspect.signature(type(block).forward).parameters)[1:]
            block.register_forward_pre_hook(partial(_lay_out_tokens, denoiser.pos_embed, names), with_kwargs=True)
        denoiser.norm_out.register_forward_pre_hook(_move_mask)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("qwen_image21", "qwen-image-2.1")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config, patch_size=1)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from ..text_encoding import drop_padding

        embeds, mask, _ = pipe._get_qwen_prompt_embeds(list(prompts), None, pipe.text_encoder.device)
        return {"embeds": drop_padding(embeds, mask)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import sys

        from ..text_encoding import build_meta_text_embeds

        texts = [pipe.prompt_template_t2i.format(prompt or " ") for prompt in prompts]
        width, num_prefix_tokens = pipe.transformer.config.context_in_dim, pipe._drop_idx
        return {"embeds": build_meta_text_embeds(pipe.processor, texts, width, sys.maxsize, num_prefix_tokens)}

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        import torch

        from ..vae import encode_frame_moments

        return encode_frame_moments(pipe.vae, torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode latents to pixels with alpha."""
        from ..vae import decode_frame_latents

        return decode_frame_latents(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        count, _, height, width = noisy_latents.shape
        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        num_text_tokens, num_image_tokens = embeds.shape[1], height * width
        # Padding to a multiple always passes a mask, even a full one, so that compiled graphs see one signature.
        is_unpadded = all(len(row) == num_text_tokens for row in batch.cond["embeds"])
        device = None if embeds.is_meta else embeds.device  # the transformer looks at the values of the layout
        slots = torch.arange(num_text_tokens + num_image_tokens // SLOT_TOKENS, device=device)
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents.flatten(2).transpose(1, 2),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=None if is_unpadded and batch.text_pad_multiple == 1 else mask,
            img_shapes=[[(1, height, width)]] * count,
            img_mask=(slots >= num_text_tokens).expand(count, -1),
            return_dict=False,
        )[0][:, -num_image_tokens:]
        return predicted.transpose(1, 2).reshape(noisy_latents.shape)

    def is_step_distilled(self, pipe: Any) -> bool:
        return pipe.config.sample_sigmas is not None

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        scale = self.facts.sampling.get_guidance_scale(prompt.cfg_scale)
        # Keys of the text that are kept over the steps would be those of a rank's tokens.
        kwargs = dict(true_cfg_scale=scale, prompt_embeds=cond["embeds"][0].unsqueeze(0), use_kv_cache=False)
        if scale > 1:
            kwargs["negative_prompt_embeds"] = negative_cond["embeds"][0].unsqueeze(0)
        if (steps := prompt.num_inference_steps) and self.is_step_distilled(pipe):
            kwargs["sigmas"] = [1 - step * (1 - 1 / steps) / max(steps - 1, 1) for step in range(steps)]
        return kwargs


def _move_mask(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move the mask of the image's tokens, which is real where the states are on the meta device."""
    states, condition, mask = args
    return states, condition, mask.to(states.device)


def _append_positions(pos_embed: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Append the place of each token in the sequence to its rotation: context parallelism splits these."""
    import torch

    return torch.cat([output, torch.arange(len(output), device=output.device).unsqueeze(1).to(output)], dim=1)


def _lay_out_tokens(
    pos_embed: Any, names: Sequence[str], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Prepare what a block is told about its tokens, all of them or those of a rank.

    The number of text tokens becomes a length, which a compiler can treat as dynamic.
    """
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    states: Tensor = arguments["hidden_states"]
    segments, key_valid = arguments.get("segments"), arguments.get("key_valid")
    rotations, places = arguments["rotary_emb"][:, :-1], arguments["rotary_emb"][:, -1].real.long()
    mask = arguments["target_token_mask"].to(states.device)
    changes = {"rotary_emb": rotations, "target_token_mask": mask}
    if segments is None:  # the image alone, of a preview with cached keys
        return (), {**arguments, **changes}
    num_text_tokens = segments[-1][1]
    changes["segments"] = states.new_empty(num_text_tokens, 0)
    if key_valid is not None:
        back = _build_rotations_back(pos_embed, key_valid, places >= num_text_tokens, rotations.shape[1])
        changes["rotary_emb"] = rotations, back
    if len(mask) != states.shape[1]:
        changes["target_token_mask"] = mask[places]
        changes["attention_mask"] = _build_shard_mask(len(mask), num_text_tokens, places, key_valid)
    return (), {**arguments, **changes}


def _build_rotations_back(pos_embed: Any, key_valid: Tensor, is_image: Tensor, num_pairs: int) -> Tensor:
    """Compute how the padding of each text rotates the image's tokens (B, tokens, 1, pairs of channels).

    The image's position on the first axis, that of frames, is the number of text tokens before it, padding included.
    """
    import torch

    width = pos_embed.axes_dim[0]
    exponents = torch.arange(0, width, 2, device=key_valid.device) / width
    angles = -(~key_valid).sum(1, keepdim=True) / pos_embed.theta**exponents
    angles = torch.nn.functional.pad(angles, (0, num_pairs - width // 2)).unsqueeze(1) * is_image.unsqueeze(1)
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(2)


def _build_shard_mask(num_tokens: int, num_text_tokens: int, places: Tensor, key_valid: Tensor | None) -> Tensor:
    """Build the attention mask of all tokens to those of a rank: text sees the text before it, the image sees all."""
    import torch

    queries = torch.arange(num_tokens, device=places.device).unsqueeze(1)
    mask = ((queries >= places) | (queries >= num_text_tokens))[None, None]
    return mask if key_valid is None else mask & key_valid[:, None, None, places]


class _RotatedAttention:
    """The layers of an attention, whose queries and keys are rotated as well."""

    def __init__(self, attn: Any, rotations: Tensor) -> None:
        self.attn, self.rotations, self.heads, self.inner_dim = attn, rotations, attn.heads, attn.inner_dim
        self.to_q, self.to_k, self.to_v, self.to_out = attn.to_q, attn.to_k, attn.to_v, attn.to_out

    def norm_q(self, query: Tensor) -> Tensor:
        return self.rotate(self.attn.norm_q(query))

    def norm_k(self, key: Tensor) -> Tensor:
        return self.rotate(self.attn.norm_k(key))

    def rotate(self, states: Tensor) -> Tensor:
        import torch

        pairs = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.rotations).flatten(-2).to(states)


def _build_attention_processor() -> Any:
    """diffusers' attention, where padding of the text does not move the image; in one part on a rank's tokens."""
    from diffusers.models.transformers import transformer_qwenimage21 as transformer

    processor_class: Any = transformer.QwenImage21AttnProcessor

    class TextLengthProcessor(processor_class):  # type: ignore[misc]
        def __call__(
            self,
            attn: Any,
            hidden_states: Tensor,
            attention_mask: Tensor | None = None,
            rotary_emb: Any = None,
            segments: Tensor | None = None,
            **others: Any,
        ) -> Any:
            if isinstance(rotary_emb, tuple):
                rotary_emb, back = rotary_emb
                attn = _RotatedAttention(attn, back)
            if segments is not None:
                others["segments"] = [(0, segments.shape[0], True)] if attention_mask is None else None
            return super().__call__(attn, hidden_states, attention_mask, rotary_emb, **others)

    return TextLengthProcessor()


def _build_pipeline_class() -> Any:
    """diffusers' pipeline for a VAE of any depth, with the tokenizer alone as its processor, or nothing."""
    import diffusers

    pipeline_class: Any = diffusers.QwenImage21Pipeline

    class QwenImage21Pipeline(pipeline_class):  # type: ignore[misc]
        def __init__(
            self,
            scheduler: Any,
            vae: Any,
            text_encoder: Any,
            processor: Any,
            transformer: Any,
            sample_sigmas: list[float] | None = None,
        ) -> None:
            super().__init__(scheduler, vae, text_encoder, _TokenizerOnly(processor), transformer, sample_sigmas)
            self.register_modules(processor=processor)
            if vae is not None:
                self.vae_scale_factor = vae.spatial_compression_ratio

    return QwenImage21Pipeline


class _TokenizerOnly:
    """A tokenizer, or None, as the constructor of the pipeline reads a processor of texts, images and videos."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = SimpleNamespace(encode=lambda text: [0]) if tokenizer is None else tokenizer

    def apply_chat_template(self, messages: Any, **options: Any) -> list[Any]:
        chat = getattr(self.tokenizer, "apply_chat_template", None)
        return [chat(messages, **options) if chat else []]
