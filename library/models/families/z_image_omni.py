"""Z-Image Omni: Z-Image that reads references, each as clean latents of the VAE and as the tokens of SigLIP.

The text is in pieces: one before each reference, the caption with the end of the last one, and one behind the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...dataset.clip_windows import FIXED_PREFIX
from ...registry import copy_class_name
from ..base import BaseModelInfo, ControlTextFamily, Family
from ..facts import ControlFacts, FamilyMatch, SamplingFacts, TrainerNames
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .z_image import FACTS as Z_IMAGE_FACTS
from .z_image import Z_IMAGE_MAX_SEQUENCE_LENGTH, ZImage, build_layout

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

MAX_REFERENCES = 3
"""The references that ComfyUI's node for the model takes."""

TEMPLATE = {
    "start": "<|im_start|>user\n<|vision_start|>",
    "between": "<|vision_end|><|vision_start|>",
    "end": "<|vision_end|><|im_end|>",
}
"""The pieces of text that are the same for all captions, as in diffusers' pipeline: ``between`` two references."""
CAPTION_PIECE = "<|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n<|vision_start|>"


def _match_omni(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("siglip_feat_dim") is None:
        raise ModelError("its transformer reads no references, so it is not that of Z-Image Omni")
    return match_flow_model(read, 1, f"the transformer has {config.get('n_layers')} blocks and reads SigLIP's tokens")


ORIGINAL_KEYS = KeyStyle("z_image", build_layout("siglip_refiner"))

FACTS = replace(
    Z_IMAGE_FACTS,
    title="Z-Image Omni",
    pipeline=replace(
        Z_IMAGE_FACTS.pipeline,
        class_name="ZImageOmniPipeline",
        kind="edit",
        num_parameters=6_513_266_880,
        hub_id="",
    ),
    detection=replace(
        Z_IMAGE_FACTS.detection,
        match_configs=_match_omni,
        keys=(*Z_IMAGE_FACTS.detection.keys, "siglip_embedder.1.weight"),
        shape_checks={
            **Z_IMAGE_FACTS.detection.shape_checks,
            ("siglip_embedder.1.weight", 1): ("transformer", "siglip_feat_dim"),
        },
        trainer_names=TrainerNames(),
    ),
    lora=replace(
        Z_IMAGE_FACTS.lora,
        targets_of="",
        optional_targets=(
            *Z_IMAGE_FACTS.lora.optional_targets,
            *(
                name.replace("context_refiner", "siglip_refiner")
                for name in Z_IMAGE_FACTS.lora.optional_targets
                if name.startswith("context_refiner")
            ),
        ),
        other_key_styles=(ORIGINAL_KEYS,),
        modelspec_architecture="z-image-omni",
    ),
    blocks=replace(
        Z_IMAGE_FACTS.blocks,
        token_args={**Z_IMAGE_FACTS.blocks.token_args, "noise_mask": ((1, ("x",)),)},
    ),
    text=replace(
        Z_IMAGE_FACTS.text,
        components=("text_encoder", "tokenizer", "siglip", "siglip_processor"),
        tokenizer_repo_ids={
            **Z_IMAGE_FACTS.text.tokenizer_repo_ids,
            "siglip_processor": "google/siglip2-so400m-patch16-naflex",
        },
    ),
    training_noise=TrainingNoiseFacts(
        shift=Z_IMAGE_FACTS.training_noise.shift, reason="as Z-Image, of which it is a variant"
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0),
    control=ControlFacts(num_images=(1, MAX_REFERENCES), text_tokens_per_image=256),
    options=replace(
        Z_IMAGE_FACTS.options,
        components={**Z_IMAGE_FACTS.options.components, "image_encoder": "siglip"},
    ),
    notes="up to 3 references, read by SigLIP too",
)


class ZImageOmni(ZImage, ControlTextFamily):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class(self)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("z_image_omni", "z-image-omni")

    def is_step_distilled(self, pipe: Any) -> bool:
        return False

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        raise AssertionError("captions are encoded with their references only")

    def encode_prompts_with_controls(
        self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]]
    ) -> Cond:
        """Encode texts, and references by SigLIP, one by one, as the pipeline does.

        The pieces of text are those of two references, which have them all.
        """
        rows = [self._encode_sample(pipe, prompt, images) for prompt, images in zip(prompts, controls, strict=True)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _encode_sample(self, pipe: Any, prompt: str, images: Sequence[Image]) -> dict[str, Tensor]:
        device, encoder = pipe.text_encoder.device, pipe.siglip
        ((start, between, caption, end),), _ = pipe.encode_prompt(
            [prompt],
            device,
            do_classifier_free_guidance=False,
            max_sequence_length=Z_IMAGE_MAX_SEQUENCE_LENGTH,
            num_condition_images=2,
        )
        (grids,) = pipe.prepare_siglip_embeds(list(images), 1, encoder.device, encoder.dtype)
        # Entries of a cache have the same keys, whatever the number of references.
        grids += [caption.new_zeros(1, 1, encoder.config.hidden_size) for _ in range(MAX_REFERENCES - len(grids))]
        template = dict(zip(TEMPLATE, (start, between, end), strict=True))
        references = {f"reference{number}": grid for number, grid in enumerate(grids)}
        return {"embeds": caption, **{f"{FIXED_PREFIX}{name}": row for name, row in (template | references).items()}}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_prompts_with_controls_on_meta(pipe, prompts, ())

    def encode_prompts_with_controls_on_meta(
        self, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
    ) -> Cond:
        import torch

        from .. import text_encoding

        config = pipe.transformer.config

        def build_texts(texts: Sequence[str]) -> list[Tensor]:
            return text_encoding.build_meta_text_embeds(
                pipe.tokenizer, texts, config.cap_feat_dim, Z_IMAGE_MAX_SEQUENCE_LENGTH
            )

        cond: Cond = {"embeds": build_texts([CAPTION_PIECE.format(prompt) for prompt in prompts])}
        for name, text in TEMPLATE.items():
            cond[f"{FIXED_PREFIX}{name}"] = build_texts([text] * len(prompts))
        grids = [_compute_grid(pipe.siglip_processor, size) for size in control_sizes]
        grids += [(1, 1)] * (MAX_REFERENCES - len(grids))
        for number, grid in enumerate(grids):
            shape = (*grid, config.siglip_feat_dim)
            cond[f"{FIXED_PREFIX}reference{number}"] = [torch.empty(shape, device="meta") for _ in prompts]
        return cond

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        begun = {CAPTION_PIECE.partition("{}")[0] + prompt: prompt for prompt in prompts}
        truncated = text_encoding.find_truncated_prompts(pipe.tokenizer, list(begun), Z_IMAGE_MAX_SEQUENCE_LENGTH)
        return [begun[text] for text in truncated]

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        dtype, count = noisy_latents.dtype, len(batch.control_latents)
        images = [*(latents.to(dtype) for latents in batch.control_latents), noisy_latents]
        rows = range(len(noisy_latents))
        predicted = denoiser(
            x=[[latents[row].unsqueeze(1) for latents in images] for row in rows],  # each (C, 1, H, W)
            t=1 - timesteps / 1000,
            cap_feats=[_list_pieces(batch.cond, row, count) for row in rows],
            siglip_feats=[[*_list_references(batch.cond, row, count), None] for row in rows],
            image_noise_mask=[[0] * count + [1]] * len(rows),
            return_dict=False,
        )[0]
        return -torch.stack(predicted).squeeze(2)  # the model's time, and so its velocity, runs from noise to image

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        count = len(prompt.control_images)
        return {
            **Family.build_sampling_kwargs(self, pipe, prompt, {}, {}),
            "prompt_embeds": [_list_pieces(cond, 0, count)],
            "negative_prompt_embeds": [_list_pieces(negative_cond, 0, count)],
            "siglip_embeds": _list_references(cond, 0, count),
        }


def _list_pieces(cond: Cond, row: int, num_references: int) -> list[Tensor]:
    """List the embeddings of the pieces of one sample's text, in their order."""
    start, between, end = (cond[f"{FIXED_PREFIX}{name}"][row] for name in TEMPLATE)
    return [start, *[between] * (num_references - 1), cond["embeds"][row], end]


def _list_references(cond: Cond, row: int, num_references: int) -> list[Tensor]:
    """List what SigLIP has made of the references of one sample: each (rows, columns, width)."""
    return [cond[f"{FIXED_PREFIX}reference{number}"][row] for number in range(num_references)]


def _compute_grid(processor: Any, size: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns of patches that SigLIP makes of an image of this width and height."""
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    side = processor.patch_size
    height, width = get_image_size_for_max_num_patches(size[1], size[0], side, processor.max_num_patches)
    return height // side, width // side


def _build_pipeline_class(family: ZImageOmni) -> Any:
    """diffusers' pipeline, with the VAE in float32 and, in previews, with the tokens that SigLIP has made before."""
    from diffusers import ZImageOmniPipeline

    pipeline: Any = ZImageOmniPipeline

    class EncodedReferencePipeline(pipeline):  # type: ignore[misc]
        given_embeds: list[Tensor] | None = None

        def __call__(self, *args: Any, siglip_embeds: list[Tensor] | None = None, **kwargs: Any) -> Any:
            self.given_embeds = siglip_embeds
            try:
                return super().__call__(*args, **kwargs)
            finally:
                self.given_embeds = None

        def prepare_siglip_embeds(self, images: Any, batch_size: int, device: Any, dtype: Any) -> Any:
            if self.given_embeds is None:
                return super().prepare_siglip_embeds(images, batch_size, device, dtype)
            return [[each.to(device, dtype) for each in self.given_embeds] for _ in range(batch_size)]

        def prepare_image_latents(self, images: Any, batch_size: int, device: Any, dtype: Any) -> Any:
            encoded = [family.encode_moments(self, each.to(device)).mean_and_std[0, 0] for each in images]
            return [[each.unsqueeze(1).to(dtype) for each in encoded] for _ in range(batch_size)]

    return copy_class_name(EncodedReferencePipeline, ZImageOmniPipeline)
