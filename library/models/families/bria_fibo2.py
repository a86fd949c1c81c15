"""Bria Fibo 2: pictures from captions of JSON, and edits; the text of Qwen3-VL is squeezed into a few hundred tokens.

A longer caption gets more of these.  Some blocks read the text itself as well; references are further image tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import CONVERTED_BY_COMFYUI_KEYS
from ..base import BaseModelInfo, ControlTextFamily
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
    TextFacts,
)
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import MASKED_ATTENTION_MODES, match_flow_model, require_newer_diffusers

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

MAX_TOKENS = 4096
"""Tokens at which diffusers' pipeline cuts a caption with its chat template and references."""
NUM_TEXTS = 6
"""Inputs from the text encoder: one for the tokens of the text, and one for each block that reads it."""


def _match_bria_fibo2(read: ConfigReader) -> FamilyMatch:
    require_newer_diffusers()
    config = read_required(read, "transformer/config.json")
    layers = config.get("injection_layer_ids", ())
    if len(layers) + 1 != NUM_TEXTS:
        raise ModelError(
            f"{len(layers)} of its blocks read the text instead of {NUM_TEXTS - 1}, as the pipeline has it"
        )
    return match_flow_model(read, 1, f"the transformer has {config.get('n_layers')} blocks")


FACTS = FamilyFacts(
    title="Bria Fibo 2",
    pipeline=PipelineFacts(class_name="BriaFibo2Pipeline", num_parameters=8_127_342_213, hub_id="briaai/Fibo-2.0-dev"),
    detection=DetectionFacts(match_configs=_match_bria_fibo2),
    lora=FamilyLora(
        # Every linear layer of the blocks but the modulation, and what reads the text before them.
        targets=(
            *(f"layers.*.attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"cross_attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"layers.*.feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
        ),
        key_style=CONVERTED_BY_COMFYUI_KEYS,
        format="diffusers",
        modelspec_architecture="bria-fibo-2",
    ),
    blocks=BlockFacts(
        lists=("layers",),
        activation_args=("x",),
        token_args={"attn_mask": ((1, ("x",)),), "freqs_cis": ((1, ("x",)),), "noise_mask": ((1, ("x",)),)},
        text_attention_calls=(1,),
        text_attention_layers=("cross_attention.to_k", "cross_attention.to_v"),
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "processor"),
        tokenizer_repo_ids={"processor": "briaai/Fibo-2.0-dev:processor"},
        has_variable_length=True,
        pad_multiple=64,
        has_negative_encoding=True,
    ),
    sampling=SamplingFacts(num_inference_steps=30, guidance_scale=5.0),
    control=ControlFacts(num_images=(0, 5), text_tokens_per_image=578),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="from text, and editing; from folders and the hub",
)


class BriaFibo2(ControlTextFamily):
    facts = FACTS

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        from ..fibo2_transformer import count_on_the_device

        count_on_the_device(denoiser)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("bria_fibo2", "bria-fibo-2")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_prompts_with_controls(pipe, prompts, [()] * len(prompts))

    def encode_negative_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode negative prompts, which are read without references and as they are."""
        return {"embeds": [_encode_text(pipe, prompt or _get_null_caption(), []) for prompt in prompts]}

    def encode_prompts_with_controls(
        self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]]
    ) -> Cond:
        """Encode texts one by one with their references; an empty one is the caption that guidance goes away from."""
        rows = []
        for prompt, images in zip(prompts, controls, strict=True):
            text = _clean_caption(pipe, prompt, len(images))
            rows.append(_encode_text(pipe, text, _shrink_images(pipe, images) if prompt else []))
        return {"embeds": rows}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_prompts_with_controls_on_meta(pipe, prompts, ())

    def encode_prompts_with_controls_on_meta(
        self, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
    ) -> Cond:
        import torch
        from PIL import Image

        processor, texts = pipe.processor.image_processor, []
        images = _shrink_images(pipe, [Image.new("1", size) for size in control_sizes])
        tokens = [processor.get_number_of_image_patches(image.height, image.width) for image in images]
        num_more = sum(tokens) // processor.merge_size**2 - len(images)  # each has one in the template
        for prompt in prompts:
            text = _clean_caption(pipe, prompt, len(images))
            edits = bool(images) and bool(prompt)
            texts.append((pipe._get_edit_prompt(text, len(images)) if edits else text, num_more if edits else 0))
        ids = [pipe.processor.tokenizer(pipe.prompt_template_encode.format(text)).input_ids for text, _ in texts]
        lengths = [min(len(row) + more, MAX_TOKENS) for row, (_, more) in zip(ids, texts, strict=True)]
        width = NUM_TEXTS * pipe.transformer.config.cap_feat_dim
        return {"embeds": [torch.empty(length, width, device="meta") for length in lengths]}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        texts = {pipe.prompt_template_encode.format(_clean_caption(pipe, prompt, 0)): prompt for prompt in prompts}
        found = text_encoding.find_truncated_prompts(pipe.processor.tokenizer, list(texts), MAX_TOKENS)
        return [texts[text] for text in found]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        """Encode pixels as FLUX.2's VAE is trained with, by its mean, to latents that are no patches."""
        from ...dataloader.batch import Moments
        from ..vae import encode_patch_moments

        patches = encode_patch_moments(pipe, pixels, pipe.vae.config.batch_norm_eps).mean_and_std
        return Moments(pipe._unpatchify_latents(patches.flatten(0, 1)).unflatten(0, patches.shape[:2]))

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_patch_latents

        return decode_patch_latents(pipe, pipe._patchify_latents(latents), pipe.vae.config.batch_norm_eps)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        rows, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        # Padding to a multiple always passes a mask, even a full one, so that compiled graphs see one signature.
        is_unpadded = all(len(row) == rows.shape[1] for row in batch.cond["embeds"])
        references = [latents.to(noisy_latents.dtype) for latents in batch.control_latents]
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            timestep=timesteps / 1000,
            encoder_hidden_states=_split_texts(rows),
            encoder_attention_mask=None if is_unpadded and batch.text_pad_multiple == 1 else mask.bool(),
            context_latents=references or None,
            return_dict=False,
        )[0]
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=_split_texts(cond["embeds"][0].unsqueeze(0)),
            negative_prompt_embeds=_split_texts(negative_cond["embeds"][0].unsqueeze(0)),
        )


def _get_null_caption() -> str:
    """The caption without words that the pipeline's guidance goes away from."""
    from diffusers.pipelines.bria_fibo2 import pipeline_bria_fibo2 as pipeline

    return str(pipeline.DEFAULT_NEGATIVE_PROMPT)


def _clean_caption(pipe: Any, prompt: str, num_images: int) -> str:
    """Return a caption in the form in which the model was trained on it; one of edits gets it where it is encoded."""
    if not prompt:
        return _get_null_caption()
    caption, _ = (prompt, None) if num_images else pipe._parse_prompt(prompt)
    return prompt if isinstance(caption, str) else json.dumps(caption or {}, separators=(",", ":"), ensure_ascii=False)


def _shrink_images(pipe: Any, images: Sequence[Image]) -> list[Image]:
    """Shrink references to the sides at which the text encoder reads them."""
    copies = [image.copy() for image in images]
    for copy in copies:
        copy.thumbnail((pipe.text_encoder_image_size, pipe.text_encoder_image_size))
    return copies


def _encode_text(pipe: Any, text: str, images: list[Image]) -> Tensor:
    """Return the texts of all inputs (tokens, texts x width) by the method of the pipeline."""
    embeds, _ = pipe.encode_prompt(text, images or None, pipe.text_encoder.device)
    rows: Tensor = embeds[0].transpose(0, 1).flatten(1)
    return rows


def _split_texts(rows: Tensor) -> Tensor:
    """Split texts (B, tokens, texts x width) to those of each input (B, texts, tokens, width)."""
    count, num_tokens, _ = rows.shape
    return rows.reshape(count, num_tokens, NUM_TEXTS, -1).transpose(1, 2)
