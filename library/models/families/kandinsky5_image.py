"""Kandinsky 5 image: variable-length text of Qwen2.5-VL by cross-attention, CLIP beside it; flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_ONLY_KEYS
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
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import CLIP_L_PREFIXES, CLIP_L_TOKENIZER, DENOISER_PREFIXES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

KANDINSKY5_MAX_SEQUENCE_LENGTH = 512
"""Maximum tokens of the prompt with the end of its template, as in diffusers' pipeline."""
MAX_SIDE_POSITIONS = 128
"""Positions of the transformer along each side of an image."""


def _match_kandinsky5_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("visual_cond"):
        raise ModelError("its transformer has a picture or video as a condition; use Kandinsky 5 T2I")
    read_like_others = rename_channels(read, config)
    match = match_flow_model(read_like_others, 1, f"the transformer has {config.get('num_visual_blocks')} blocks")
    return replace(match, max_side=MAX_SIDE_POSITIONS * match.size_multiple)


def rename_channels(read: ConfigReader, config: dict[str, Any]) -> ConfigReader:
    """Give the channels of the transformer's input the name that they have in other models."""
    renamed = {**config, "in_channels": config.get("in_visual_dim")}
    return lambda name: renamed if name == "transformer/config.json" else read(name)


FACTS = FamilyFacts(
    title="Kandinsky 5 image",
    pipeline=PipelineFacts(
        class_name="Kandinsky5T2IPipeline",
        num_parameters=6_022_080_576,
        hub_id="kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
    ),
    detection=DetectionFacts(
        match_configs=_match_kandinsky5_image,
        keys=("visual_transformer_blocks.0.cross_attention.to_query.weight", "visual_embeddings.in_layer.weight"),
        shape_checks={
            ("visual_transformer_blocks.0.cross_attention.to_query.weight", 0): ("transformer", "model_dim"),
            ("text_embeddings.in_layer.weight", 1): ("transformer", "in_text_dim"),
        },
        unsupported_shapes={
            # Noise, a condition and its mask, in patches of four: of an image only the first.
            ("visual_embeddings.in_layer.weight", 1, 132): "Kandinsky 5 video; use the model as a diffusers folder"
        },
        trainer_names=TrainerNames(
            simpletuner=("kandinsky5-image",),
            simpletuner_flavours={
                "t2i-lite-sft": "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
                "t2i-lite-pretrain": "kandinskylab/Kandinsky-5.0-T2I-Lite-pretrain-Diffusers",
            },
            simpletuner_default="t2i-lite-sft",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen25_7b.transformer.",),
            "text_encoder_2": CLIP_L_PREFIXES,
        },
    ),
    lora=FamilyLora(
        # The attention without its last layers, of text and of image blocks.
        targets=("to_query", "to_key", "to_value"),
        targets_of="SimpleTuner",
        key_style=DIFFUSERS_ONLY_KEYS,
        format="diffusers",
        modelspec_architecture="kandinsky-5-image",
    ),
    blocks=BlockFacts(
        # The few blocks before them pass on another stream, that of the text.
        lists=("visual_transformer_blocks",),
        activation_args=("visual_embed",),
        token_args={"rope": ((1, ("visual_embed",)),)},
        text_attention_calls=(1,),
        text_attention_layers=("cross_attention.to_key", "cross_attention.to_value"),
        unsupported_strategies={
            "pp": "the blocks of text and image in Kandinsky 5 pass on different streams",
            "preservation": "Kandinsky 5 keeps the mask of one text for its blocks, and they are computed again later",
        },
        attention_modes=(),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer_repo_ids={"tokenizer": "Qwen/Qwen2.5-VL-7B-Instruct", "tokenizer_2": CLIP_L_TOKENIZER},
        has_variable_length=True,
        pad_multiple=64,
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=3.5),
    options=FamilyOptions(
        components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder", "clip_l": "text_encoder_2"},
    ),
)


class Kandinsky5Image(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        transformer, time_embeddings, processor = _build_transformer_classes()
        denoiser.__class__ = transformer
        denoiser.time_embeddings.__class__ = time_embeddings
        for block in denoiser.text_transformer_blocks:
            block.self_attention.set_processor(processor(attends_to_text=True))
        for block in denoiser.visual_transformer_blocks:
            block.self_attention.set_processor(processor())
            block.cross_attention.set_processor(processor(attends_to_text=True))

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("kandinsky5_image", "kandinsky-5-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        # One at a time: the encoder has no mask for the padding to the longest prompt.
        embeds, pooled = [], []
        for prompt in prompts:
            states, clip, _ = pipe.encode_prompt(
                prompt, max_sequence_length=KANDINSKY5_MAX_SEQUENCE_LENGTH, device=pipe.text_encoder.device
            )
            embeds.append(states[0])
            pooled.append(clip)
        return {"embeds": embeds, "pooled": torch.cat(pooled)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        from .. import text_encoding

        config, start = pipe.transformer.config, pipe.prompt_template_encode_start_idx
        embeds = text_encoding.build_meta_text_embeds(
            pipe.tokenizer.tokenizer,
            [pipe.prompt_template.format(prompt) for prompt in prompts],
            config.in_text_dim,
            KANDINSKY5_MAX_SEQUENCE_LENGTH,
            start,
        )
        return {"embeds": embeds, "pooled": torch.empty(len(prompts), config.in_text_dim2, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        max_tokens = KANDINSKY5_MAX_SEQUENCE_LENGTH + pipe.prompt_template_encode_start_idx
        texts = {pipe.prompt_template.format(prompt): prompt for prompt in prompts}
        found = text_encoding.find_truncated_prompts(pipe.tokenizer.tokenizer, list(texts), max_tokens)
        return [texts[text] for text in found]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_vae_moments

        return encode_vae_moments(pipe.vae, pixels, applies_shift=False)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_vae_latents

        return decode_vae_latents(pipe.vae, latents, applies_shift=False)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        # Reshaped as in the pipeline: with the same strides, the VAE computes the same to the bit.
        return self.decode_latents(
            pipe, latents.permute(0, 4, 1, 2, 3).reshape(-1, latents.shape[-1], *latents.shape[2:4])
        )

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        states = noisy_latents.permute(0, 2, 3, 1).unsqueeze(1)
        return self.call_denoiser(denoiser, states, timesteps, batch).squeeze(1).permute(0, 3, 1, 2)

    def call_denoiser(
        self, denoiser: nn.Module, states: Tensor, timesteps: Tensor, batch: Batch, **options: Any
    ) -> Tensor:
        """Call the denoiser with latents (B, frames, height, width, C) and the texts of a batch."""
        import torch

        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        is_unpadded = all(len(row) == embeds.shape[1] for row in batch.cond["embeds"])
        frames, *sides = states.shape[1:-1]
        predicted: Tensor = denoiser(
            hidden_states=states,
            encoder_hidden_states=embeds,
            pooled_projections=batch.cond["pooled"],
            timestep=timesteps,
            visual_rope_pos=[
                torch.arange(length, device=states.device) for length in (frames, *(side // 2 for side in sides))
            ],
            text_rope_pos=torch.arange(embeds.shape[1], device=states.device),
            return_dict=False,
            **options,
            **({} if is_unpadded else {"text_mask": mask.bool()[:, None, None]}),
        )
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        import torch

        kwargs: dict[str, Any] = {"guidance_scale": self.facts.sampling.get_guidance_scale(prompt.cfg_scale)}
        for prefix, each in (("", cond), ("negative_", negative_cond)):
            text = each["embeds"][0].unsqueeze(0)
            kwargs[f"{prefix}prompt_embeds_qwen"] = text
            kwargs[f"{prefix}prompt_embeds_clip"] = each["pooled"]
            kwargs[f"{prefix}prompt_cu_seqlens"] = torch.tensor([0, text.shape[1]])
        return kwargs


def _build_pipeline_class() -> Any:
    """diffusers' pipeline in the size that is asked for, where that of 0.42 takes the nearest of seven sizes.

    Its images have the name that those of other pipelines have.
    """
    from diffusers import Kandinsky5T2IPipeline

    pipeline: Any = Kandinsky5T2IPipeline

    class SizedPipeline(pipeline):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("width") and kwargs.get("height"):
                self.resolutions = [(kwargs["width"], kwargs["height"])]
            output = super().__call__(*args, **kwargs)
            if hasattr(output, "image"):
                output.images = output.image
            return output

    return copy_class_name(SizedPipeline, pipeline)


def _build_attention_processor() -> Any:
    """diffusers' attention of Kandinsky 5, which can have a mask for the padding of the text.

    Rotated queries and keys keep their precision. diffusers rounds them to bfloat16, also in float32: an error of the
    last bit before it grows to one of bfloat16, so that ways to distribute one training would differ.
    """
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.transformers.transformer_kandinsky import Kandinsky5AttnProcessor

    attention_processor: Any = Kandinsky5AttnProcessor

    class TextMaskProcessor(attention_processor):  # type: ignore[misc]
        text_mask: Tensor | None = None

        def __init__(self, *, attends_to_text: bool = False) -> None:
            super().__init__()
            self.attends_to_text = attends_to_text

        def __call__(
            self,
            attn: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor | None = None,
            rotary_emb: Tensor | None = None,
            sparse_params: Any = None,
        ) -> Any:
            if sparse_params is not None:
                return super().__call__(attn, hidden_states, encoder_hidden_states, rotary_emb, sparse_params)
            text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            layers = ((attn.to_query, hidden_states), (attn.to_key, text), (attn.to_value, text))
            query, key, value = (layer(tokens).unflatten(-1, (attn.num_heads, -1)) for layer, tokens in layers)
            query = attn.query_norm(query.float()).type_as(query)
            key = attn.key_norm(key.float()).type_as(key)
            if rotary_emb is not None:
                query, key = _rotate(query, rotary_emb), _rotate(key, rotary_emb)
            attended = dispatch_attention_fn(
                query, key, value, attn_mask=self.text_mask, backend=self._attention_backend
            )
            return attn.out_layer(attended.flatten(-2))

    return TextMaskProcessor


def _build_transformer_classes() -> tuple[Any, Any, Any]:
    """diffusers' transformer with a mask for the padding of texts, which as of 0.42 it has not.

    Its embedding of the timestep also works where all weights have one dtype of half precision.
    """
    import inspect

    import torch
    from diffusers import Kandinsky5Transformer3DModel
    from diffusers.models.transformers.transformer_kandinsky import Kandinsky5TimeEmbeddings

    transformer: Any = Kandinsky5Transformer3DModel
    time_embeddings: Any = Kandinsky5TimeEmbeddings
    from ..constant_copies import copy_constant

    processor_class = _build_attention_processor()

    class TextMaskTransformer(transformer):  # type: ignore[misc]
        def forward(self, *args: Any, text_mask: Tensor | None = None, **kwargs: Any) -> Any:
            # It stays until the next call: gradient checkpointing computes the blocks again after this one.
            for module in self.modules():
                processor = getattr(module, "processor", None)
                if isinstance(processor, processor_class) and processor.attends_to_text:
                    processor.text_mask = text_mask
            return super().forward(*args, **kwargs)

    class TimeEmbeddings(time_embeddings):  # type: ignore[misc]
        def forward(self, time: Tensor) -> Tensor:
            angles = torch.outer(time.float(), copy_constant(self.freqs, time.device))
            waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.in_layer.weight.dtype)
            embedded: Tensor = self.out_layer(self.activation(self.in_layer(waves)))
            return embedded

    parameters = list(inspect.signature(transformer.forward).parameters.values())
    text_mask = inspect.Parameter("text_mask", inspect.Parameter.KEYWORD_ONLY, default=None)
    TextMaskTransformer.forward.__signature__ = inspect.Signature([*parameters, text_mask])  # type: ignore[attr-defined]
    return (
        copy_class_name(TextMaskTransformer, transformer),
        copy_class_name(TimeEmbeddings, time_embeddings),
        processor_class,
    )


def _rotate(tokens: Tensor, rotations: Tensor) -> Tensor:
    """Apply rotary positions in float32 and return them in the dtype of the tokens."""
    pairs = tokens.float().view(*tokens.shape[:-1], -1, 1, 2)
    return (rotations * pairs).sum(-1).flatten(-2).type_as(tokens)
