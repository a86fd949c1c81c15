"""LongCat-Image-Edit: LongCat-Image trained to edit; Qwen2.5-VL reads the reference with the caption.

The latents of the reference are further tokens behind those of the picture; both begin after the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..base import BaseModelInfo, ControlTextFamily, Family
from ..facts import ControlFacts, TrainerNames
from .longcat_image import FACTS as LONGCAT_FACTS
from .longcat_image import LONGCAT_MAX_SEQUENCE_LENGTH, LongCatImage

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

FACTS = replace(
    LONGCAT_FACTS,
    title="LongCat-Image-Edit",
    pipeline=replace(
        LONGCAT_FACTS.pipeline,
        class_name="LongCatImageEditPipeline",
        kind="edit",
        hub_id="meituan-longcat/LongCat-Image-Edit",
    ),
    detection=replace(
        LONGCAT_FACTS.detection,
        trainer_names=TrainerNames(
            simpletuner=("longcat_image",),
            simpletuner_flavours={"edit": "meituan-longcat/LongCat-Image-Edit"},
            variant_pattern="image-edit",
        ),
    ),
    lora=replace(LONGCAT_FACTS.lora, modelspec_architecture="longcat-image-edit"),
    text=replace(
        LONGCAT_FACTS.text,
        components=("text_encoder", "tokenizer", "text_processor"),
        tokenizer_repo_ids={
            name: f"meituan-longcat/LongCat-Image-Edit:{name}" for name in ("tokenizer", "text_processor")
        },
    ),
    control=ControlFacts(num_images=(1, 1), text_tokens_per_image=370, sets_preview_size=True),
)


class LongCatImageEdit(LongCatImage, ControlTextFamily):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("longcat_image_edit", "longcat-image-edit")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        raise AssertionError("the text encoder reads captions with their control image only")

    def encode_prompts_with_controls(
        self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]]
    ) -> Cond:
        """Encode texts one by one with their image, as the pipeline does."""
        import torch

        rows = []
        for prompt, (image,) in zip(prompts, controls, strict=True):
            width, height = _compute_size(image.size)
            resized = pipe.image_processor.resize(image, height, width)
            resized = pipe.image_processor.resize(resized, height // 2, width // 2)
            rows.append(pipe._encode_prompt([_truncate_prompt(pipe, prompt)], resized))
        return {"embeds": torch.cat(rows)}

    def encode_prompts_with_controls_on_meta(
        self, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
    ) -> Cond:
        import torch

        images = pipe.text_processor.image_processor
        (width, height) = _compute_size(control_sizes[0])
        patches = images.get_number_of_image_patches(height // 2, width // 2)
        length = LONGCAT_MAX_SEQUENCE_LENGTH + patches // images.merge_size**2 + 2  # its first and last token
        shape = len(prompts), length, pipe.transformer.config.joint_attention_dim
        return {"embeds": torch.empty(shape, device="meta")}

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch
        from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit as pipeline

        from ..constant_copies import copy_constant

        embeds = cast("Tensor", batch.cond["embeds"])
        length, build_ids = embeds.shape[1], cast("Any", pipeline.prepare_pos_ids)
        images = [noisy_latents, *(latents.to(noisy_latents.dtype) for latents in batch.control_latents)]
        tokens = [pipe._pack_latents(each, *each.shape) for each in images]
        grids = [
            build_ids(
                number, "image", start=(length, length), height=latents.shape[2] // 2, width=latents.shape[3] // 2
            )
            for number, latents in enumerate(images, 1)
        ]
        ids = build_ids(0, "text", num_token=length), torch.cat(grids)
        txt_ids, img_ids = (copy_constant(each, noisy_latents.device) for each in ids)
        predicted = denoiser(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            txt_ids=txt_ids,
            img_ids=img_ids,
            return_dict=False,
        )[0][:, : tokens[0].shape[1]]
        height, width = noisy_latents.shape[2:]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return unpacked

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        return Family.build_sampling_kwargs(self, pipe, prompt, cond, negative_cond)

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {"image": images[0]}

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Encode references in float32: the pipeline passes the VAE what the transformer computes in."""
        sampling_pipe._encode_vae_image = lambda image, generator: (
            self.encode_moments(sampling_pipe, image).mean_and_std[:, 0].to(image.dtype)
        )
        return sampling_pipe

    def generate_frames(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> list[Image]:
        """Sample in the size that the pipeline takes from the control image; it takes no other one."""
        from ...dataloader.images import load_preview_controls

        width, height = _compute_size(load_preview_controls(prompt)[0].size)
        sized = replace(prompt, width=width, height=height)
        return super().generate_frames(
            pipe, sized, cond, negative_cond=negative_cond, generator=generator, sampler=sampler
        )


def _compute_size(size: tuple[int, int]) -> tuple[int, int]:
    """Width and height of a reference and of its picture."""
    from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit as pipeline

    compute_size: Any = pipeline.calculate_dimensions
    width, height = compute_size(1024 * 1024, size[0] / size[1])
    return width, height


def _truncate_prompt(pipe: Any, prompt: str) -> str:
    """Drop letters that are too many: the pipeline, as of 0.42, fails where it would warn of them."""
    from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit as pipeline

    def count_tokens(text: str) -> int:
        split: Any = pipeline.split_quotation
        words = [word for part, is_quoted in split(text) for word in (part if is_quoted else [part])]
        return sum(len(pipe.tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words)

    if count_tokens(prompt) <= LONGCAT_MAX_SEQUENCE_LENGTH:
        return prompt
    fits, too_many = 0, len(prompt)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if count_tokens(prompt[:middle]) <= LONGCAT_MAX_SEQUENCE_LENGTH:
            fits = middle
        else:
            too_many = middle
    return prompt[:fits]


def _build_pipeline_class() -> Any:
    """diffusers' pipeline, which as of 0.42 fails with ``prompt_embeds`` and without a processor, and takes no size."""
    from diffusers import LongCatImageEditPipeline

    def initialize(
        self: Any, scheduler: Any, vae: Any, text_encoder: Any, tokenizer: Any, text_processor: Any, transformer: Any
    ) -> None:
        stand_in = text_processor or type("NoProcessor", (), {"image_processor": None})()
        parent: Any = LongCatImageEditPipeline
        parent.__init__(self, scheduler, vae, text_encoder, tokenizer, stand_in, transformer)
        self.register_modules(text_processor=text_processor)

    def encode_prompt(
        self: Any, prompt: Any = None, image: Any = None, prompt_embeds: Any = None, **others: Any
    ) -> Any:
        prompts = [""] * len(prompt_embeds) if prompt_embeds is not None else prompt
        return LongCatImageEditPipeline.encode_prompt(self, prompts, image, prompt_embeds=prompt_embeds, **others)

    def call(self: Any, *args: Any, height: int | None = None, width: int | None = None, **others: Any) -> Any:
        return LongCatImageEditPipeline.__call__(self, *args, **others)

    def get_device(self: Any) -> Any:
        encoder = getattr(self, "text_encoder", None)
        return super(LongCatImageEditPipeline, self).device if encoder is None else encoder.device

    attributes = {"__init__": initialize, "encode_prompt": encode_prompt, "__call__": call, "__module__": __name__}
    attributes["device"] = property(get_device)
    return type("LongCatImageEditPipeline", (LongCatImageEditPipeline,), attributes)
