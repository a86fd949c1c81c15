"""HunyuanImage 2.1: latents of 1/32 of the image, text of Qwen2.5-VL, and of byT5 what is in quotes; flow matching."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import IMAGE_STREAM, TEXT_STREAM
from ...adapters.token_layout import OTHER_TOKENS, TokenLayout
from ...config.network_args import NetworkFacts
from ...registry import copy_class_name
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
from ..family_noise_levels import NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import DENOISER_PREFIXES, KOHYA_FLOW_OBJECTIVE, MASKED_ATTENTION_MODES, match_flow_model
from .hunyuan_image_keys import COMFYUI_KEYS, HUNYUAN_IMAGE_KEYS, LAYOUT, SINGLE_PARTS, build_vae_patterns

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

QUOTES = (r'"(.*?)"', r"‘(.*?)’", r"“(.*?)”")
"""Patterns of text to draw, in the order in which the encoder gets it."""
MAX_GLYPH_TOKENS = 128
"""Maximum bytes of what is in quotes, with the words around it, as in diffusers' pipeline."""
BOTH_TEXTS = ("encoder_hidden_states_2", "encoder_hidden_states")
"""What is in quotes, and the whole text, as arguments of the transformer in the order in which they are joined."""
DISTILLED = "the distilled HunyuanImage 2.1; use the base model"


def _match_hunyuan_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("use_meanflow") or config.get("guidance_embeds"):
        raise ModelError(f"is {DISTILLED}")
    blocks = f"{config.get('num_layers')} double and {config.get('num_single_layers')} single blocks"
    return match_flow_model(read, 1, f"the transformer has {blocks}", patch_size=1)


FACTS = FamilyFacts(
    title="HunyuanImage 2.1",
    pipeline=PipelineFacts(class_name="HunyuanImagePipeline", num_parameters=17_425_795_520),
    detection=DetectionFacts(
        match_configs=_match_hunyuan_image,
        keys=("double_blocks.0.img_attn_qkv.weight", "byt5_in.fc1.weight", "img_in.proj.weight"),
        diffusers_keys={
            "double_blocks.0.img_attn_qkv.weight": "single_transformer_blocks.0.proj_mlp.weight",
            "byt5_in.fc1.weight": "context_embedder_2.linear_1.weight",
            "img_in.proj.weight": "x_embedder.proj.weight",
            "txt_in.input_embedder.weight": "context_embedder.proj_in.weight",
            "time_r_in.mlp.0.weight": "time_guidance_embed.timestep_embedder_r.linear_1.weight",
            "guidance_in.mlp.0.weight": "time_guidance_embed.guidance_embedder.linear_1.weight",
        },
        shape_checks={
            ("img_in.proj.weight", 1): ("transformer", "in_channels"),
            ("txt_in.input_embedder.weight", 1): ("transformer", "text_embed_dim"),
            ("byt5_in.fc1.weight", 1): ("transformer", "text_embed_2_dim"),
        },
        unsupported_shapes={(f"{name}.mlp.0.weight", 1, 256): DISTILLED for name in ("time_r_in", "guidance_in")},
        trainer_names=TrainerNames(diffusion_pipe=("hunyuan_image",), kohya_gui=("hunyuan_image_checkbox",)),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen25_7b.transformer.",),
            "text_encoder_2": ("text_encoders.byt5_small.transformer.",),
        },
        layout=LAYOUT,
        build_vae_patterns=build_vae_patterns,
    ),
    lora=FamilyLora(
        # Every linear layer of the double and single blocks; those that refine the text have some of the same names.
        targets=(
            *(f"transformer_blocks.*.{layer}" for layer in (*IMAGE_STREAM, *TEXT_STREAM)),
            *(f"single_transformer_blocks.*.{layer}" for layer in (*SINGLE_PARTS, "proj_out", "norm.linear")),
        ),
        targets_of="sd-scripts",
        key_style=HUNYUAN_IMAGE_KEYS,
        other_key_styles=(COMFYUI_KEYS,),
        format="comfy",
        modelspec_architecture="hunyuan-image-2.1",
        modelspec_implementation="https://github.com/Tencent-Hunyuan/HunyuanImage-2.1",
    ),
    blocks=BlockFacts(
        token_layouts={
            r"^transformer_blocks\..*(add_[qkv]_proj|to_add_out|ff_context)": TokenLayout(segments=BOTH_TEXTS),
            r"^single_transformer_blocks\.": TokenLayout(segments=(OTHER_TOKENS, *BOTH_TEXTS)),
        },
        lists=("transformer_blocks", "single_transformer_blocks"),
        activation_args=("hidden_states", "encoder_hidden_states"),
        token_args={
            "attention_mask": ((3, ("hidden_states", "encoder_hidden_states")),),
            "image_rotary_emb": ((0, ("hidden_states",)),) * 2,
        },
        single_stream_lists=("single_transformer_blocks",),
        # One matrix for the output of the attention and of the MLP.
        fused_layers={r"single_transformer_blocks\.\d+\.proj_out$": ("rowwise", (1, 4))},
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer_repo_ids={"tokenizer": "Qwen/Qwen2.5-VL-7B-Instruct", "tokenizer_2": "google/byt5-small"},
        has_variable_length=True,
        pad_multiple=64,
        version=2,  # single quotes were quotes before
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="sigma",
        reason="uniform with the pipeline's shift of 5, as in sd-scripts",
        multiples_per_token=2,
        other_trainers={"sd-scripts": NoiseLevels("sigma", 5.0)},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=3.5, image_size=(2048, 2048)),
    options=FamilyOptions(
        components={"vae": "vae", "text_encoder": "text_encoder", "byt5": "text_encoder_2"},
        network=NetworkFacts(modules=("networks.lora_hunyuan_image",)),
        kohya_objective=replace(
            KOHYA_FLOW_OBJECTIVE, defaults={"timestep_sampling": "sigma", "discrete_flow_shift": 5.0}
        ),
    ),
    notes="the base model; LoRA in diffusers: `transformer.load_lora_adapter`",
)


class HunyuanImage(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        from diffusers import HunyuanImagePipeline

        return build_guided_pipeline_class(HunyuanImagePipeline, ("guider", "ocr_guider"))

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        denoiser.__class__ = _build_transformer_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("hunyuan_image_2.1", "hunyuan-image-2.1")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        texts = [pipe.prompt_template_encode.format(prompt) for prompt in prompts]
        start = pipe.prompt_template_encode_start_idx
        longest = max(map(len, pipe.tokenizer(texts, truncation=False, verbose=False).input_ids)) - start
        embeds, mask = pipe._get_qwen_prompt_embeds(
            pipe.tokenizer,
            pipe.text_encoder.model,  # without the logits of all tokens
            list(prompts),
            pipe.text_encoder.device,
            tokenizer_max_length=min(longest, pipe.tokenizer_max_length),
            template=pipe.prompt_template_encode,
            drop_idx=start,
        )
        return {
            "embeds": text_encoding.drop_padding(embeds, mask),
            "glyphs": [_encode_glyphs(pipe, prompt) for prompt in prompts],
        }

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from .. import text_encoding

        texts = [pipe.prompt_template_encode.format(prompt) for prompt in prompts]
        width, num_prefix_tokens = pipe.transformer.config.text_embed_dim, pipe.prompt_template_encode_start_idx
        embeds = text_encoding.build_meta_text_embeds(
            pipe.tokenizer, texts, width, pipe.tokenizer_max_length, num_prefix_tokens
        )
        lengths = (min(max(1, _count_glyph_tokens(prompt)), MAX_GLYPH_TOKENS) for prompt in prompts)
        width = pipe.transformer.config.text_embed_2_dim
        return {"embeds": embeds, "glyphs": [torch.empty(length, width, device="meta") for length in lengths]}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        prefix, _, _ = pipe.prompt_template_encode.partition("{}")
        max_tokens = pipe.tokenizer_max_length + pipe.prompt_template_encode_start_idx
        texts = {prefix + prompt: prompt for prompt in prompts}
        found = {texts[text] for text in text_encoding.find_truncated_prompts(pipe.tokenizer, [*texts], max_tokens)}
        return [prompt for prompt in prompts if prompt in found or _count_glyph_tokens(prompt) > MAX_GLYPH_TOKENS]

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        return call_with_glyphs(denoiser, noisy_latents, timesteps, batch, MAX_GLYPH_TOKENS)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        scale = self.facts.sampling.get_guidance_scale(prompt.cfg_scale)
        return {"guidance_scale": scale, **build_glyph_kwargs(cond, negative_cond)}


def _find_glyph_text(prompt: str) -> str | None:
    """Find what is in quotes, in the words that byT5 was trained on; None without quotes.

    As in sd-scripts and ComfyUI, single quotes are none: they would be any two apostrophes.  diffusers takes them.
    """
    texts = [text for pattern in QUOTES for text in re.findall(pattern, prompt)]
    return ". ".join(f'Text "{text}"' for text in texts) + ". " if texts else None


def _count_glyph_tokens(prompt: str) -> int:
    """The tokens of what is in quotes, which are its bytes and one for the end; 0 without quotes."""
    text = _find_glyph_text(prompt)
    return 0 if text is None else len(text.encode()) + 1


def _encode_glyphs(pipe: Any, prompt: str) -> Tensor:
    """Encode what is in quotes (tokens, width); one token of zeros stands for none."""
    import torch

    from .. import text_encoding

    text, encoder = _find_glyph_text(prompt), pipe.text_encoder_2
    if text is None:
        return torch.zeros(1, encoder.config.d_model, device=encoder.device, dtype=encoder.dtype)
    embeds, mask = pipe._get_byt5_prompt_embeds(
        pipe.tokenizer_2, encoder, text, encoder.device, tokenizer_max_length=MAX_GLYPH_TOKENS
    )
    return text_encoding.drop_padding(embeds, mask)[0]


def call_with_glyphs(
    denoiser: nn.Module, latents: Tensor, timesteps: Tensor, batch: Batch, max_glyph_tokens: int, **more: Tensor
) -> Tensor:
    """Call the denoiser of HunyuanImage or HunyuanVideo 1.5 with a batch's texts and what is in quotes in them."""
    from ..text_encoding import pad_text_embeds

    embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
    glyphs, glyph_mask = pad_glyphs(batch.cond["glyphs"], max_glyph_tokens if batch.text_pad_multiple > 1 else 1)
    predicted: Tensor = denoiser(
        hidden_states=latents,
        timestep=timesteps,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=glyph_mask,
        return_dict=False,
        **more,
    )[0]
    return predicted


def build_glyph_kwargs(cond: Cond, negative_cond: Cond) -> dict[str, Tensor]:
    """Build the arguments of their pipelines for the texts of a preview."""
    from ..text_encoding import pad_text_embeds

    kwargs = dict[str, Any]()
    for start, texts in (("", cond), ("negative_", negative_cond)):
        kwargs[f"{start}prompt_embeds"], kwargs[f"{start}prompt_embeds_mask"] = pad_text_embeds(texts["embeds"])
        kwargs[f"{start}prompt_embeds_2"], kwargs[f"{start}prompt_embeds_mask_2"] = pad_glyphs(texts["glyphs"])
    return kwargs


def pad_glyphs(glyphs: Tensor | Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Pad and mask what is in quotes; where nothing is, the layers for it run all the same, as on other ranks."""
    from ..text_encoding import pad_text_embeds

    padded, mask = pad_text_embeds(glyphs, multiple)
    for number, row in enumerate(glyphs):
        if len(row) == 1:
            mask[number] = 0
    return padded, mask


def _build_transformer_class() -> Any:
    """diffusers' transformer, which joins both texts of a sample without looking at the values of the masks.

    diffusers moves the tokens that are not masked to the front, whose number is not known before.  Text tokens have no
    positions: their order changes nothing.
    """
    import inspect

    import torch
    from diffusers import HunyuanImageTransformer2DModel

    transformer: Any = HunyuanImageTransformer2DModel
    signature = inspect.signature(transformer.forward)

    class MaskedTextTransformer(transformer):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(self, *args, **kwargs).arguments
            del given["self"]
            glyphs, mask = (given.pop(f"encoder_{name}_2", None) for name in ("hidden_states", "attention_mask"))
            if glyphs is None:
                return super().forward(**given)
            text_mask = given["encoder_attention_mask"]
            given["encoder_attention_mask"] = torch.cat([mask, text_mask], dim=1)

            def give_text_mask(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
                return *args[:2], args[2][:, -text_mask.shape[1] :]

            def join_glyphs(_: Any, args: Any, texts: Tensor) -> Tensor:
                return torch.cat([self.context_embedder_2(glyphs), texts], dim=1)

            embedder = self.context_embedder
            handles = embedder.register_forward_pre_hook(give_text_mask), embedder.register_forward_hook(join_glyphs)
            try:
                return super().forward(**given)
            finally:
                for handle in handles:
                    handle.remove()

    MaskedTextTransformer.forward.__signature__ = signature  # type: ignore[attr-defined]
    return copy_class_name(MaskedTextTransformer, transformer)


def build_guided_pipeline_class(pipeline: Any, names: Sequence[str]) -> Any:
    """Build a pipeline of diffusers with the scale of these guiders as an argument of the call."""

    class GuidedPipeline(pipeline):  # type: ignore[misc]
        def __call__(self, *args: Any, guidance_scale: float | None = None, **kwargs: Any) -> Any:
            call: Callable[..., Any] = super().__call__
            guiders = {name: getattr(self, name) for name in names}
            if guidance_scale is None:
                return call(*args, **kwargs)
            try:
                for name, guider in guiders.items():
                    setattr(self, name, guider and guider.new(guidance_scale=guidance_scale))
                return call(*args, **kwargs)
            finally:
                for name, guider in guiders.items():
                    setattr(self, name, guider)

    return copy_class_name(GuidedPipeline, pipeline)
