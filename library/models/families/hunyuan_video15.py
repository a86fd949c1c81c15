"""HunyuanVideo 1.5: 8B of double-stream blocks, text of Qwen2.5-VL, and of byT5 what is in quotes; flow matching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import IMAGE_STREAM, TEXT_STREAM, KeyStyle, OriginalModule, build_stream_modules
from ...adapters.token_layout import TokenLayout
from ...config.network_args import NetworkFacts
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
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
from ..shared_facts import DENOISER_PREFIXES, MASKED_ATTENTION_MODES, match_flow_model
from .hunyuan_image import BOTH_TEXTS, build_glyph_kwargs, build_guided_pipeline_class, call_with_glyphs
from .hunyuan_image_keys import LAYOUT as IMAGE_LAYOUT

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

MAX_GLYPH_TOKENS = 256
"""Maximum bytes of what is in quotes, with the words around it, as in diffusers' pipeline."""


DISTILLED = "it is distilled to few steps, which a LoRA would lose; use the base model"
MAIN_KEYS = ("double_blocks.0.img_attn_q.weight", "vision_in.proj.1.weight", "cond_type_embedding.weight")


def match_hunyuan_video15(read: ConfigReader) -> FamilyMatch:
    """Check a HunyuanVideo 1.5, from text or from an image."""
    config, vae = read_required(read, "transformer/config.json"), read_required(read, "vae/config.json")
    if config.get("use_meanflow"):
        raise ModelError(DISTILLED)
    if config.get("patch_size", 1) != 1 or config.get("patch_size_t", 1) != 1:
        raise ModelError("its transformer has patches of several latents instead of single ones")
    # The noisy latents, those of the first frame, and a mask of frames that are given.
    more = int(vae.get("latent_channels", 32)) + 1
    reason = f"the transformer has {config.get('num_layers')} blocks"
    return match_flow_model(read, 1, reason, patch_size=1, more_channels=more)


def _name_stream(original: str, parts: Sequence[str]) -> tuple[OriginalModule, ...]:
    names = ("attn_q", "attn_k", "attn_v", "attn_proj", "mlp.fc1", "mlp.fc2", "mod.linear")
    return tuple(
        OriginalModule(f"double_blocks.{{}}.{original}_{name}", (f"transformer_blocks.{{}}.{part}",))
        for name, part in zip(names, parts, strict=True)
    )


COMFYUI_NAMES = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")
COMFYUI_KEYS = KeyStyle(
    "hunyuan_video15_comfyui",
    (
        *build_stream_modules("double_blocks.{}.img_", "transformer_blocks", IMAGE_STREAM, COMFYUI_NAMES),
        *build_stream_modules("double_blocks.{}.txt_", "transformer_blocks", TEXT_STREAM, COMFYUI_NAMES),
    ),
)
HUNYUAN_VIDEO15_KEYS = KeyStyle(
    "hunyuan_video15",
    (*_name_stream("img", IMAGE_STREAM), *_name_stream("txt", TEXT_STREAM)),
    is_read_by_diffusers=False,
    unread_in_comfyui={
        "kohya": "loads few of the layers of this layout, which has musubi-tuner's names",
        **dict.fromkeys(("diffusers", "comfy"), "loads nothing of this layout"),
    },
    has_lokr_in_diffusers=True,
    comfyui_style=COMFYUI_KEYS,
)
_SHARED_PARTS = ("txt_in.", "byt5_in.", "final_layer.", "img_in.")
LAYOUT: tuple[OriginalModule, ...] = (
    *HUNYUAN_VIDEO15_KEYS.layout,
    *(
        module
        for module in IMAGE_LAYOUT
        if module.name.startswith(_SHARED_PARTS) or module.name.endswith(("_q_norm", "_k_norm"))
    ),
    *(
        OriginalModule(name, (module,))
        for name, module in {
            "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
            "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
            "vision_in.proj.0": "image_embedder.norm_in",
            "vision_in.proj.1": "image_embedder.linear_1",
            "vision_in.proj.3": "image_embedder.linear_2",
            "vision_in.proj.4": "image_embedder.norm_out",
            "cond_type_embedding": "cond_type_embed",
        }.items()
    ),
)
"""The modules of the transformer in the files of its authors."""


def _build_vae_patterns(config: Mapping[str, Any]) -> dict[str, str]:
    """The patterns of the VAE's keys in diffusers, and what the files of its authors have there."""
    return {
        r"\.mid_block\.resnets\.0\.": ".mid.block_1.",
        r"\.mid_block\.resnets\.1\.": ".mid.block_2.",
        r"\.mid_block\.attentions\.0\.": ".mid.attn_1.",
        r"\.to_([qkv])\.": r".\1.",
        r"\.(down|up)_blocks\.(\d+)\.resnets\.(\d+)\.": r".\1.\2.block.\3.",
        r"\.(down|up)_blocks\.(\d+)\.\1samplers\.0\.": r".\1.\2.\1sample.",
        r"\.conv_shortcut\.": ".nin_shortcut.",
    }


FACTS = FamilyFacts(
    title="HunyuanVideo 1.5",
    pipeline=PipelineFacts(
        class_name="HunyuanVideo15Pipeline",
        kind="video",
        num_parameters=8_326_608_160,
        hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        frames=FrameRule(stride=4, fps=24.0),
    ),
    detection=DetectionFacts(
        match_configs=match_hunyuan_video15,
        keys=MAIN_KEYS,
        diffusers_keys={
            "double_blocks.0.img_attn_q.weight": "transformer_blocks.0.attn.to_q.weight",
            "vision_in.proj.1.weight": "image_embedder.linear_1.weight",
            "cond_type_embedding.weight": "cond_type_embed.weight",
            "img_in.proj.weight": "x_embedder.proj.weight",
            "txt_in.input_embedder.weight": "context_embedder.proj_in.weight",
            "byt5_in.fc1.weight": "context_embedder_2.linear_1.weight",
            "time_r_in.mlp.0.weight": "time_embed.timestep_embedder_r.linear_1.weight",
        },
        shape_checks={
            ("img_in.proj.weight", 1): ("transformer", "in_channels"),
            ("txt_in.input_embedder.weight", 1): ("transformer", "text_embed_dim"),
            ("byt5_in.fc1.weight", 1): ("transformer", "text_embed_2_dim"),
            ("vision_in.proj.1.weight", 1): ("transformer", "image_embed_dim"),
        },
        unsupported_shapes={("time_r_in.mlp.0.weight", 1, 256): f"HunyuanVideo 1.5, but {DISTILLED}"},
        unsupported_file_names={
            "i2v": "HunyuanVideo 1.5 I2V, whose weights have the same names; set --family hunyuan_video15_i2v",
            "distill": f"HunyuanVideo 1.5, but {DISTILLED}",
        },
        trainer_names=TrainerNames(
            diffusion_pipe=("hunyuan_video_15",),
            simpletuner=("hunyuanvideo",),
            simpletuner_flavours={
                "t2v-480p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
                "t2v-720p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
            },
            simpletuner_default="t2v-480p",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen25_7b.transformer.",),
            "text_encoder_2": ("text_encoders.byt5_small.transformer.",),
        },
        layout=LAYOUT,
        build_vae_patterns=_build_vae_patterns,
    ),
    lora=FamilyLora(
        # Every linear layer of the blocks; those that refine the text have some of the same names.
        targets=tuple(f"transformer_blocks.*.{layer}" for layer in (*IMAGE_STREAM, *TEXT_STREAM)),
        targets_of="musubi-tuner",
        key_style=HUNYUAN_VIDEO15_KEYS,
        other_key_styles=(COMFYUI_KEYS,),
        format="comfy",
        modelspec_architecture="hunyuan-video-1.5",
        modelspec_implementation="https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5",
    ),
    blocks=BlockFacts(
        token_layouts={
            r"^transformer_blocks\..*(add_[qkv]_proj|to_add_out|ff_context)": TokenLayout(segments=BOTH_TEXTS)
        },
        lists=("transformer_blocks",),
        activation_args=("hidden_states", "encoder_hidden_states"),
        token_args={
            "attention_mask": ((3, ("hidden_states", "encoder_hidden_states")),),
            "freqs_cis": ((0, ("hidden_states",)),) * 2,
        },
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer_repo_ids={"tokenizer": "Qwen/Qwen2.5-VL-7B-Instruct", "tokenizer_2": "google/byt5-small"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(2.0),
        reason="as musubi-tuner's guide recommends",
        other_trainers={"musubi-tuner": NoiseLevels("shift", 2.0, origin="its guide")},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=6.0, image_size=(848, 480)),
    options=FamilyOptions(
        components={"vae": "vae", "text_encoder": "text_encoder", "byt5": "text_encoder_2"},
        network=NetworkFacts(modules=("networks.lora_hv_1_5",)),
        musubi_versions={"t2v": {}},
    ),
    notes="text to video; LoRA in diffusers: `transformer.load_lora_adapter`",
)


class HunyuanVideo15(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        from diffusers import HunyuanVideo15Pipeline

        return build_partial_pipeline_class(HunyuanVideo15Pipeline)

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        from diffusers.models.transformers.transformer_hunyuanimage import HunyuanImageAttnProcessor

        denoiser.__class__ = _build_transformer_class()
        for block in denoiser.transformer_blocks:
            block.attn.set_processor(HunyuanImageAttnProcessor())  # type: ignore[no-untyped-call]

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config, patch_size=1)

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        # The text output of the last block is discarded.
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}"
        layers = ("attn.add_q_proj", "attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2")
        return tuple(f"{last}.{layer}" for layer in layers)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("hunyuan_video_1.5", "hunyuan-video-1.5")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        start = pipe.prompt_template_encode_start_idx
        longest = max(map(len, pipe.tokenizer(_format_chats(pipe, prompts), truncation=False, verbose=False).input_ids))
        embeds, mask = pipe._get_mllm_prompt_embeds(
            pipe.text_encoder,
            pipe.tokenizer,
            list(prompts),
            pipe.text_encoder.device,
            tokenizer_max_length=min(longest - start, pipe.tokenizer_max_length),
            system_message=pipe.system_message,
            crop_start=start,
        )
        return {
            "embeds": text_encoding.drop_padding(embeds, mask),
            "glyphs": [_encode_glyphs(pipe, prompt) for prompt in prompts],
        }

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from .. import text_encoding

        config = pipe.transformer.config
        embeds = text_encoding.build_meta_text_embeds(
            pipe.tokenizer,
            _format_chats(pipe, prompts),
            config.text_embed_dim,
            pipe.tokenizer_max_length,
            num_prefix_tokens=pipe.prompt_template_encode_start_idx,
        )
        lengths = (min(max(1, _count_glyph_tokens(prompt)), MAX_GLYPH_TOKENS) for prompt in prompts)
        glyphs = [torch.empty(length, config.text_embed_2_dim, device="meta") for length in lengths]
        return {"embeds": embeds, "glyphs": glyphs}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        max_tokens = pipe.tokenizer_max_length + pipe.prompt_template_encode_start_idx
        found = text_encoding.find_truncated_chats(pipe.tokenizer, prompts, max_tokens, pipe.system_message)
        return [prompt for prompt in prompts if prompt in found or _count_glyph_tokens(prompt) > MAX_GLYPH_TOKENS]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import as_clips, encode_vae_moments

        pipe.vae.enable_slicing()  # the mask of its attention is right for one clip only
        return encode_vae_moments(pipe.vae, as_clips(pixels))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        pipe.vae.enable_slicing()
        return super().decode_latents(pipe, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import pad

        # Without a first frame, its latents and the mask of frames that are given are zeros.
        padded = pad(noisy_latents, (0, 0) * 3 + (0, noisy_latents.shape[1] + 1))
        return call_with_glyphs(denoiser, padded, timesteps, batch, MAX_GLYPH_TOKENS)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        scale = self.facts.sampling.get_guidance_scale(prompt.cfg_scale)
        return {"guidance_scale": scale, **build_glyph_kwargs(cond, negative_cond)}


def _format_chats(pipe: Any, prompts: Sequence[str]) -> list[str]:
    """Format the chats that the text encoder reads."""
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

    chats = format_text_input(list(prompts), pipe.system_message)
    texts: list[str] = pipe.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return texts


def _find_glyph_text(prompt: str) -> str | None:
    """Find what is in quotes, in the words that byT5 was trained on; None without quotes."""
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    text: str | None = extract_glyph_texts(prompt)
    return text


def _count_glyph_tokens(prompt: str) -> int:
    """The tokens of what is in quotes, which are its bytes and one for the end; 0 without quotes."""
    text = _find_glyph_text(prompt)
    return 0 if text is None else len(text.encode()) + 1


def _encode_glyphs(pipe: Any, prompt: str) -> Tensor:
    """Encode what is in quotes (tokens, width); one token of zeros stands for none."""
    from .. import text_encoding

    embeds, mask = pipe._get_byt5_prompt_embeds(
        pipe.tokenizer_2, pipe.text_encoder_2, prompt, pipe.text_encoder_2.device, tokenizer_max_length=MAX_GLYPH_TOKENS
    )
    return embeds[0, :1] if _find_glyph_text(prompt) is None else text_encoding.drop_padding(embeds, mask)[0]


class _NoVae:
    """The place of a VAE that is not loaded, while diffusers' pipeline is built, which reads the config of one."""

    config = SimpleNamespace(latent_channels=None)

    def __bool__(self) -> bool:
        return False


def build_partial_pipeline_class(base: Any) -> Any:
    """diffusers' pipeline with the scale of its guider as an argument of the call; it may be loaded without VAE."""
    import functools

    pipeline: Any = build_guided_pipeline_class(base, ("guider",))

    class PartialPipeline(pipeline):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.vae = kwargs["vae"]

        def register_modules(self, **modules: Any) -> None:
            super().register_modules(**modules)
            if modules.get("vae", self) is None:
                self.vae = _NoVae()

        @property
        def num_channels_latents(self) -> int:
            channels: int = self.transformer.config.out_channels
            return channels

        @num_channels_latents.setter
        def num_channels_latents(self, channels: int) -> None:
            """Leave it to the transformer, as the VAE may come later."""

    functools.update_wrapper(PartialPipeline.__init__, pipeline.__init__)  # diffusers reads its arguments
    return copy_class_name(PartialPipeline, base)


def _build_transformer_class() -> Any:
    """diffusers' transformer, which looks at no values of masks, and has tokens of a first image only if there is one.

    diffusers moves the tokens that are not masked to the front, whose number is not known before, and masks those of
    an image of zeros.  Text tokens have no positions: their order changes nothing, and nothing attends to masked ones.
    So the mask is one of keys, (B, 1, 1, tokens): for pairs of tokens, as in diffusers, it would take gigabytes.
    """
    import torch
    from diffusers import HunyuanVideo15Transformer3DModel

    transformer: Any = HunyuanVideo15Transformer3DModel

    class KeyMaskTransformer(transformer):  # type: ignore[misc]
        def forward(
            self,
            hidden_states: Tensor,
            timestep: Tensor,
            encoder_hidden_states: Tensor,
            encoder_attention_mask: Tensor,
            timestep_r: Tensor | None = None,
            encoder_hidden_states_2: Tensor | None = None,
            encoder_attention_mask_2: Tensor | None = None,
            image_embeds: Tensor | None = None,
            attention_kwargs: dict[str, Any] | None = None,
            return_dict: bool = True,
        ) -> Any:
            sizes, positions = hidden_states.shape[2:], self.rope(hidden_states)
            times = self.time_embed(timestep, timestep_r=timestep_r)
            hidden_states = self.x_embedder(hidden_states)
            texts = self.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask)
            kind = torch.zeros(1, dtype=torch.long, device=texts.device)
            glyphs = self.context_embedder_2(encoder_hidden_states_2) + self.cond_type_embed(kind + 1)
            texts = torch.cat([glyphs, texts + self.cond_type_embed(kind)], dim=1)
            num_unmasked = hidden_states.shape[1]
            if image_embeds is not None and self.config.task_type == "i2v":  # else they are zeros
                images = self.image_embedder(image_embeds) + self.cond_type_embed(kind + 2)
                texts, num_unmasked = torch.cat([images, texts], dim=1), num_unmasked + images.shape[1]
            mask = torch.cat(
                [
                    torch.ones(len(texts), num_unmasked, dtype=torch.bool, device=texts.device),
                    encoder_attention_mask_2.bool(),  # type: ignore[union-attr]
                    encoder_attention_mask.bool(),
                ],
                dim=1,
            )[:, None, None]
            for block in self.transformer_blocks:
                arguments = (hidden_states, texts, times, mask, positions)
                if torch.is_grad_enabled() and self.gradient_checkpointing:
                    hidden_states, texts = self._gradient_checkpointing_func(block, *arguments)
                else:
                    hidden_states, texts = block(*arguments)
            hidden_states = self.proj_out(self.norm_out(hidden_states, times))
            return (torch.unflatten(hidden_states.transpose(1, 2), 2, sizes),)

    return copy_class_name(KeyMaskTransformer, transformer)
