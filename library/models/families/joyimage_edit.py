"""JoyImage Edit, and Edit Plus with several references: Qwen3-VL reads them with the caption; the VAE of Wan 2.1.

Each reference is a further frame of the picture for the transformer, at a time of its own behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...registry import copy_class_name
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
    SingleFileFacts,
    TextFacts,
)
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import DENOISER_PREFIXES, MASKED_ATTENTION_MODES, match_flow_model

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

MAX_TEXT_TOKENS = 2048
"""Tokens of a caption without references at which diffusers' pipeline cuts it; with references it is not cut."""
MAX_TOKENS = 4096
"""Tokens of a caption with its references that the pipeline keeps."""
IMAGE_LABEL = "<|vision_start|><|image_pad|><|vision_end|>"


def _match_joyimage(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if (kind := config.get("rope_type", "rope")) != "rope":
        raise ModelError(f"its transformer has rope_type {kind!r}: texts with positions, which cannot be trained")
    if config.get("patch_size", [1, 2, 2]) != [1, 2, 2]:
        raise ModelError(f"its transformer has patches of {config['patch_size']} instead of [1, 2, 2]")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks")


JOYIMAGE_KEYS = KeyStyle(
    "joyimage",
    unread_in_diffusers=dict.fromkeys(("kohya", "diffusers", "comfy"), "does not load LoRA of this transformer"),
    unread_in_comfyui={"diffusers": "loads nothing of this layout"},
)
"""diffusers' names, which ComfyUI has as well, but not behind the name of a component."""

EDIT_FACTS = FamilyFacts(
    title="JoyImage Edit",
    pipeline=PipelineFacts(
        class_name="JoyImageEditPipeline",
        kind="edit",
        num_parameters=16_263_675_968,
        hub_id="jdopensource/JoyAI-Image-Edit-Diffusers",
    ),
    detection=DetectionFacts(
        match_configs=_match_joyimage,
        keys=("condition_embedder.time_embedder.linear_1.weight", "double_blocks.0.attn.img_attn_qkv.weight"),
        shape_checks={
            ("img_in.weight", 0): ("transformer", "hidden_size"),
            ("img_in.weight", 1): ("transformer", "in_channels"),
            ("condition_embedder.text_embedder.linear_1.weight", 1): ("transformer", "text_dim"),
        },
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen3vl_8b.transformer.",),
        },
        classes={"vae": "AutoencoderKLWan"},
    ),
    lora=FamilyLora(
        # Every linear layer of the blocks; their modulation has none.
        targets=tuple(
            f"{stream}_{layer}"
            for stream in ("img", "txt")
            for layer in ("attn_qkv", "attn_proj", "mlp.net.0.proj", "mlp.net.2")
        ),
        key_style=JOYIMAGE_KEYS,
        modelspec_architecture="joyimage-edit",
    ),
    blocks=BlockFacts(
        lists=("double_blocks",),
        activation_args=("hidden_states", "encoder_hidden_states"),
        token_args={"image_rotary_emb": ((1, ("hidden_states",)), (1, ("hidden_states", "encoder_hidden_states")))},
        fused_layers={
            r"_attn_qkv$": ("colwise", (1, 1, 1)),
            r"_attn_proj$": ("rowwise", (1,)),
        },
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer", "processor"),
        tokenizer_repo_ids={
            name: f"jdopensource/JoyAI-Image-Edit-Diffusers:{name}" for name in ("tokenizer", "processor")
        },
        has_variable_length=True,
        pad_multiple=64,
    ),
    sampling=SamplingFacts(num_inference_steps=40, guidance_scale=4.0),
    control=ControlFacts(num_images=(0, 1), have_picture_size=True, text_tokens_per_image=1026),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="LoRA in ComfyUI; diffusers has no loader for it",
)

PLUS_FACTS = replace(
    EDIT_FACTS,
    title="JoyImage Edit Plus",
    pipeline=replace(
        EDIT_FACTS.pipeline,
        class_name="JoyImageEditPlusPipeline",
        hub_id="jdopensource/JoyAI-Image-Edit-Plus-Diffusers",
    ),
    lora=replace(EDIT_FACTS.lora, modelspec_architecture="joyimage-edit-plus"),
    blocks=replace(
        EDIT_FACTS.blocks,
        token_args={
            "image_rotary_emb": ((1, ("hidden_states",)), (1, ("hidden_states",))),
            "attention_mask": ((3, ("hidden_states", "encoder_hidden_states")),),
        },
    ),
    text=replace(
        EDIT_FACTS.text,
        tokenizer_repo_ids={
            name: f"jdopensource/JoyAI-Image-Edit-Plus-Diffusers:{name}" for name in ("tokenizer", "processor")
        },
    ),
    sampling=replace(EDIT_FACTS.sampling, num_inference_steps=30),
    control=replace(EDIT_FACTS.control, num_images=(0, 6), have_picture_size=False),
)


class JoyImageEdit(ControlTextFamily):
    facts = EDIT_FACTS

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        denoiser.__class__ = _build_transformer_class()
        denoiser.set_attn_processor(_build_attention_processor())

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        # The text output of the last block is discarded.
        last = f"double_blocks.{len(denoiser.double_blocks) - 1}"
        return tuple(f"{last}.{layer}" for layer in ("attn.txt_attn_proj", "txt_mlp.net.0.proj", "txt_mlp.net.2"))

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("joyimage_edit", "joyimage-edit")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_prompts_with_controls(pipe, prompts, [()] * len(prompts))

    def encode_prompts_with_controls(
        self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]]
    ) -> Cond:
        """Encode texts one by one with their images, as the pipeline does."""
        rows = []
        for prompt, images in zip(prompts, controls, strict=True):
            crops = [_crop_to_bucket(pipe, image) for image in images]
            rows.append(self.encode_prompt(pipe, prompt, crops)[0])
        return {"embeds": rows}

    def encode_prompt(self, pipe: Any, prompt: str, images: list[Image]) -> Tensor:
        """Encode a text with its images by the method of the pipeline."""
        device = pipe.text_encoder.device
        if images:
            encoded = pipe.encode_prompt_multiple_images(prompt, device, images=images, max_sequence_length=MAX_TOKENS)
        else:
            encoded = pipe.encode_prompt(prompt, device, max_sequence_length=MAX_TOKENS)
        embeds: Tensor = encoded[0]
        return embeds

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_prompts_with_controls_on_meta(pipe, prompts, ())

    def encode_prompts_with_controls_on_meta(
        self, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
    ) -> Cond:
        from .. import text_encoding

        images, labels = pipe.processor.image_processor, IMAGE_LABEL * len(control_sizes)
        sizes = (_find_bucket(pipe, size) for size in control_sizes)
        tokens = sum(images.get_number_of_image_patches(*size) // images.merge_size**2 for size in sizes)
        template = pipe.prompt_template_encode["multiple_images"]
        texts = [template.format(f"<|im_start|>user\n{labels}{prompt}<|im_end|>\n") for prompt in prompts]
        # The label has one token for each image.
        num_prefix_tokens = pipe.prompt_template_encode_start_idx["multiple_images"] + len(control_sizes) - tokens
        width = pipe.transformer.config.text_dim
        max_length = MAX_TOKENS if control_sizes else self.max_text_tokens
        embeds = text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, max_length, num_prefix_tokens)
        return {"embeds": embeds}

    @property
    def max_text_tokens(self) -> int:
        """Tokens of a caption without references that the pipeline keeps."""
        return MAX_TEXT_TOKENS

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        texts = {f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n": prompt for prompt in prompts}
        found = text_encoding.find_truncated_prompts(pipe.tokenizer, list(texts), self.max_text_tokens)
        return [texts[text] for text in found]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_frame_moments

        return encode_frame_moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_frame_latents

        return decode_frame_latents(pipe.vae, latents)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        embeds, masks = _pad_texts(batch)
        references = [latents.to(noisy_latents.dtype) for latents in batch.control_latents]
        predicted: Tensor = denoiser(
            hidden_states=torch.stack([*references, noisy_latents], dim=1).unsqueeze(3),
            timestep=timesteps,
            encoder_hidden_states=embeds,
            return_dict=False,
            **masks,
        )[0]
        return predicted[:, -1].squeeze(2)

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

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {"image": images[0]} if images else {}

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Sample in the size of the prompt instead of a bucket of one megapixel; encode references in float32.

        The pipeline passes the VAE what the transformer computes in, and draws from torch's global generator.
        """
        import numpy as np
        import torch

        processor, prepare = sampling_pipe.vae_image_processor, sampling_pipe.prepare_latents
        processor.get_default_height_width = lambda image, height, width: (height, width)

        def prepare_latents(*args: Any, image: list[Image] | None = None, **others: Any) -> tuple[Tensor, Any]:
            noise, _ = prepare(*args, **others)
            if image is None:
                return noise, None
            pixels = torch.stack([torch.from_numpy(np.array(each)) for each in image]).permute(0, 3, 1, 2) / 127.5 - 1
            latents = self.encode_moments(sampling_pipe, pixels).mean_and_std[:, 0]
            return noise, latents[:, None, :, None].to(noise)

        sampling_pipe.prepare_latents = prepare_latents
        return sampling_pipe


class JoyImageEditPlus(JoyImageEdit):
    facts = PLUS_FACTS

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        denoiser.__class__ = _build_plus_transformer_class()

    def get_pipeline_class(self) -> Any:
        return _build_plus_pipeline_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("joyimage_edit_plus", "joyimage-edit-plus")

    @property
    def max_text_tokens(self) -> int:
        return MAX_TOKENS

    def encode_prompt(self, pipe: Any, prompt: str, images: list[Image]) -> Tensor:
        text = f"<|im_start|>user\n{IMAGE_LABEL * len(images)}{prompt}<|im_end|>\n"
        device = pipe.text_encoder.device
        embeds: Tensor = pipe.encode_prompt_multiple_images(text, device, images or None, MAX_TOKENS)[0]
        return embeds

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        embeds, masks = _pad_texts(batch)
        images = [noisy_latents, *(latents.to(noisy_latents.dtype) for latents in batch.control_latents)]
        count, _, height, width = noisy_latents.shape
        shapes = [(1, image.shape[2] // 2, image.shape[3] // 2) for image in images]
        predicted: Tensor = denoiser(
            hidden_states=torch.cat([fold_patches(image) for image in images], dim=1),
            timestep=timesteps,
            encoder_hidden_states=embeds,
            shape_list=[shapes] * count,
            return_dict=False,
            **masks,
        )[0]
        return unfold_patches(predicted, height, width)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        factor = pipe.vae_scale_factor_spatial
        return self.decode_latents(pipe, unfold_patches(latents, height // factor, width // factor))

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {"images": list(images)} if images else {}

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        return sampling_pipe


def fold_patches(latents: Tensor) -> Tensor:
    """Fold latents (B, C, height, width) to patches (B, patches, C, 1, 2, 2), as the pipeline of Plus has them."""
    count, channels, height, width = latents.shape
    patches = latents.reshape((count, channels, height // 2, 2, width // 2, 2))
    return patches.permute((0, 2, 4, 1, 3, 5)).flatten(1, 2).unsqueeze(3)


def unfold_patches(patches: Tensor, height: int, width: int) -> Tensor:
    """Unfold the first patches to latents of this size; those of references are behind them."""
    count, _, channels = patches.shape[:3]
    shape = count, height // 2, width // 2, channels, 2, 2
    first = patches[:, : height // 2 * (width // 2)].reshape(shape)
    return first.permute((0, 3, 1, 4, 2, 5)).reshape(count, channels, height, width)


def _pad_texts(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Pad the texts of a batch, with a mask if there is padding.

    Padding to a multiple always has a mask, even a full one, so that compiled graphs see one signature.
    """
    from ..text_encoding import pad_text_embeds

    embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
    is_unpadded = all(len(row) == embeds.shape[1] for row in batch.cond["embeds"])
    return embeds, {} if is_unpadded and batch.text_pad_multiple == 1 else {"encoder_hidden_states_mask": mask}


def _get_image_processor(pipe: Any) -> Any:
    return getattr(pipe, "vae_image_processor", pipe.image_processor)


def _find_bucket(pipe: Any, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width in which the pipeline reads a reference of this width and height."""
    from diffusers.pipelines.joyimage import image_processor

    find: Any = image_processor.find_best_bucket
    height, width = find(size[1], size[0], _get_image_processor(pipe).config.basesize)
    return height, width


def _crop_to_bucket(pipe: Any, image: Image) -> Image:
    cropped: Image = _get_image_processor(pipe).resize_center_crop(image, _find_bucket(pipe, image.size))
    return cropped


def _build_transformer_class() -> Any:
    """diffusers' transformer with a mask for texts of different length, and positions that are on its device.

    Both are in what it passes to each block: diffusers' (0.42) has no mask, and each block copies positions anew.
    """
    import torch
    from diffusers import JoyImageEditTransformer3DModel

    from ..constant_copies import copy_constant

    transformer: Any = JoyImageEditTransformer3DModel

    class MaskedTransformer(transformer):  # type: ignore[misc]
        def forward(
            self,
            hidden_states: Tensor,
            timestep: Tensor,
            encoder_hidden_states: Tensor,
            return_dict: bool = True,
            encoder_hidden_states_mask: Tensor | None = None,
        ) -> Any:
            self._text_mask, self._device_of_positions = encoder_hidden_states_mask, hidden_states.device
            return super().forward(hidden_states, timestep, encoder_hidden_states, return_dict)

        def get_rotary_pos_embed(
            self, vis_rope_size: list[int], txt_rope_size: int | None = None
        ) -> tuple[Tensor, Tensor]:
            positions, _ = super().get_rotary_pos_embed(vis_rope_size, txt_rope_size)
            rotation = copy_constant(torch.stack(positions), self._device_of_positions)
            mask = self._text_mask
            if mask is None:
                return rotation, rotation.new_empty(1, 0)
            return rotation, torch.cat([mask.new_ones(len(mask), rotation.shape[1]), mask], dim=1)

    return copy_class_name(MaskedTransformer, transformer)


def _build_attention_processor() -> Any:
    """The attention of JoyImage Edit Plus, which has a mask, with the positions and the mask of the class above."""
    from diffusers.models.transformers.transformer_joyimage_edit_plus import JoyImageEditPlusAttnProcessor

    parent: Any = JoyImageEditPlusAttnProcessor

    class TextMaskProcessor(parent):  # type: ignore[misc]
        def __call__(
            self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, image_rotary_emb: Any = None
        ) -> tuple[Tensor, Tensor]:
            rotation, mask = image_rotary_emb
            joint = mask[:, None, None].bool() if mask.shape[1] else None
            output: tuple[Tensor, Tensor] = super().__call__(
                attn, hidden_states, encoder_hidden_states, (rotation[:1], rotation[1:]), joint
            )
            return output

    return TextMaskProcessor()


def _build_plus_transformer_class() -> Any:
    """diffusers' transformer with positions that are copied to the device once."""
    import inspect

    from diffusers.models.transformers.transformer_joyimage_edit_plus import JoyImageEditPlusTransformer3DModel

    from ..constant_copies import copy_constant

    transformer: Any = JoyImageEditPlusTransformer3DModel

    class PlacedTransformer(transformer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._device_of_positions = hidden_states.device
            return super().forward(hidden_states, *args, **kwargs)

        def _get_rotary_pos_embed_for_range(self, start: Any, stop: Any) -> tuple[Tensor, Tensor]:
            cos, sin = super()._get_rotary_pos_embed_for_range(start, stop)
            return copy_constant(cos, self._device_of_positions), copy_constant(sin, self._device_of_positions)

    PlacedTransformer.forward.__signature__ = inspect.signature(transformer.forward)  # type: ignore[attr-defined]
    return copy_class_name(PlacedTransformer, transformer)


def _build_plus_pipeline_class() -> Any:
    """diffusers' pipeline, which as of 0.42 fails with encoded texts and references."""
    from diffusers import JoyImageEditPlusPipeline

    pipeline: Any = JoyImageEditPlusPipeline

    class EncodedPipeline(pipeline):  # type: ignore[misc]
        def __call__(self, *, prompt: Any = None, prompt_embeds: Tensor | None = None, **others: Any) -> Any:
            prompts = prompt if prompt_embeds is None else [""] * len(prompt_embeds)
            return super().__call__(prompt=prompts, prompt_embeds=prompt_embeds, **others)

        def check_inputs(self, prompt: Any, *args: Any, prompt_embeds: Tensor | None = None, **others: Any) -> None:
            given = prompt if prompt_embeds is None else None
            super().check_inputs(given, *args, prompt_embeds=prompt_embeds, **others)

    return copy_class_name(EncodedPipeline, pipeline)
