"""Qwen-Image-Edit, and Edit-Plus (2509, 2511) with several references: Qwen-Image trained to edit.

References are further latent tokens behind those of the picture; Qwen2.5-VL reads them together with the caption.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base import BaseModelInfo, ControlTextFamily
from ..facts import ControlFacts, FamilyMatch, TrainerNames
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .qwen_image import FACTS as QWEN_IMAGE_FACTS
from .qwen_image import QwenImage

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ...dataloader.batch import Cond


def _match_edit(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("use_layer3d_rope") or config.get("use_additional_t_cond"):
        raise ModelError("its transformer is that of Qwen-Image-Layered, which cannot be trained")
    references = "without noise levels of their own" if config.get("zero_cond_t") else "as noisy as the picture"
    return match_flow_model(read, 4, f"the transformer reads references {references}")


EDIT_FACTS = replace(
    QWEN_IMAGE_FACTS,
    title="Qwen-Image-Edit",
    pipeline=replace(
        QWEN_IMAGE_FACTS.pipeline, class_name="QwenImageEditPipeline", kind="edit", hub_id="Qwen/Qwen-Image-Edit"
    ),
    detection=replace(
        QWEN_IMAGE_FACTS.detection,
        match_configs=_match_edit,
        trainer_names=TrainerNames(
            ai_toolkit=("qwen_image_edit",),
            diffusion_pipe=("qwen_image",),
            simpletuner=("qwen_image",),
            simpletuner_flavours={"edit-v1": "Qwen/Qwen-Image-Edit"},
            variant_pattern="image[-_]edit",
        ),
    ),
    lora=replace(QWEN_IMAGE_FACTS.lora, modelspec_architecture="qwen-image-edit"),
    blocks=replace(
        QWEN_IMAGE_FACTS.blocks,
        token_args={**QWEN_IMAGE_FACTS.blocks.token_args, "modulate_index": ((1, ("hidden_states",)),)},
    ),
    text=replace(
        QWEN_IMAGE_FACTS.text,
        components=("text_encoder", "processor"),
        tokenizer_repo_ids={"processor": "Qwen/Qwen-Image-Edit:processor"},
        version=1,  # captions were never cut
    ),
    control=ControlFacts(num_images=(1, 1), text_tokens_per_image=1400),
    options=replace(QWEN_IMAGE_FACTS.options, musubi_versions={"edit": {}}),
)

PLUS_FACTS = replace(
    EDIT_FACTS,
    title="Qwen-Image-Edit-Plus",
    pipeline=replace(EDIT_FACTS.pipeline, class_name="QwenImageEditPlusPipeline", hub_id="Qwen/Qwen-Image-Edit-2509"),
    detection=replace(
        EDIT_FACTS.detection,
        trainer_names=TrainerNames(
            ai_toolkit=("qwen_image_edit_plus",),
            diffusion_pipe=("qwen_image",),
            simpletuner=("qwen_image",),
            simpletuner_flavours={
                "edit-v2": "Qwen/Qwen-Image-Edit-2509",
                "edit-v2+": "Qwen/Qwen-Image-Edit-2509",
                "edit-v3": "Qwen/Qwen-Image-Edit-2511",
            },
            variant_pattern="(edit|qwen).*(2509|2511)|edit[-_]plus",
        ),
    ),
    lora=replace(EDIT_FACTS.lora, modelspec_architecture="qwen-image-edit-plus"),
    text=replace(EDIT_FACTS.text, tokenizer_repo_ids={"processor": "Qwen/Qwen-Image-Edit-2509:processor"}),
    sampling=replace(EDIT_FACTS.sampling, num_inference_steps=40),
    control=ControlFacts(num_images=(1, 10), text_tokens_per_image=224),
    options=replace(
        QWEN_IMAGE_FACTS.options,
        musubi_versions={"edit-2509": {"zero_cond_t": False}, "edit-2511": {"zero_cond_t": True}},
    ),
    notes="2509 and 2511; its authors recommend up to 3 control images",
)


class QwenImageEdit(QwenImage, ControlTextFamily):
    facts = EDIT_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("qwen_image_edit", "qwen-image-edit")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_prompts_with_controls(pipe, prompts, [()] * len(prompts))

    def encode_prompts_with_controls(
        self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]]
    ) -> Cond:
        """Encode texts one by one with their images, as the pipeline does; nothing is truncated."""
        rows = []
        for prompt, images in zip(prompts, controls, strict=True):
            resized = [pipe.image_processor.resize(image, *self.compute_text_size(image.size)) for image in images]
            embeds, _ = pipe.encode_prompt([prompt], resized or None, pipe.text_encoder.device)
            rows.append(embeds[0])
        return {"embeds": rows}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_prompts_with_controls_on_meta(pipe, prompts, ())

    def encode_prompts_with_controls_on_meta(
        self, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
    ) -> Cond:
        from .. import text_encoding

        images = pipe.processor.image_processor
        sizes = map(self.compute_text_size, control_sizes)
        tokens = sum(images.get_number_of_image_patches(*size) // images.merge_size**2 for size in sizes)
        # The template has one token for each image.
        num_prefix_tokens = pipe.prompt_template_encode_start_idx + len(control_sizes) - tokens
        labels = self.label_controls(len(control_sizes))
        texts = [pipe.prompt_template_encode.format(labels + prompt) for prompt in prompts]
        width = pipe.transformer.config.joint_attention_dim
        tokenizer = pipe.processor.tokenizer
        embeds = text_encoding.build_meta_text_embeds(tokenizer, texts, width, sys.maxsize, num_prefix_tokens)
        return {"embeds": embeds}

    def compute_text_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of a reference for the text encoder, given its width and height."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as pipeline

        compute_size: Any = pipeline.calculate_dimensions
        width, height, _ = compute_size(1024 * 1024, size[0] / size[1])
        return height, width

    def label_controls(self, count: int) -> str:
        """The text before the prompt where it is not part of the template."""
        return ""

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        return []

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {"image": images[0]} if images else {}

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Encode references in float32: the pipeline passes the VAE what the transformer computes in."""

        def encode_vae_image(image: Tensor, generator: Any) -> Tensor:
            latents = self.encode_moments(sampling_pipe, image.squeeze(2)).mean_and_std[:, 0]
            return latents.unsqueeze(2).to(image.dtype)

        sampling_pipe._encode_vae_image = encode_vae_image
        return sampling_pipe


class QwenImageEditPlus(QwenImageEdit):
    facts = PLUS_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        version = "-2511" if pipe.transformer.config.zero_cond_t else ""
        return BaseModelInfo("qwen_image_edit_plus", f"qwen-image-edit-plus{version}")

    def compute_text_size(self, size: tuple[int, int]) -> tuple[int, int]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as pipeline

        compute_size: Any = pipeline.calculate_dimensions
        width, height = compute_size(pipeline.CONDITION_IMAGE_SIZE, size[0] / size[1])
        return height, width

    def label_controls(self, count: int) -> str:
        numbers = range(1, count + 1)
        return "".join(f"Picture {number}: <|vision_start|><|image_pad|><|vision_end|>" for number in numbers)

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {"image": list(images)} if images else {}
