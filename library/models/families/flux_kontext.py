"""FLUX.1 Kontext: FLUX.1 dev trained to edit; the reference image is further tokens behind those of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base import BaseModelInfo
from .flux import FACTS as FLUX_FACTS
from .flux import Flux

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ...data.batch import Cond
    from ...data.prompts import Prompt

FACTS = replace(
    FLUX_FACTS,
    name="flux_kontext",
    title="FLUX.1 Kontext",
    kind="edit",
    pipeline_class="FluxKontextPipeline",
    control_images=(0, 1),
    # Its weights have the names and shapes of FLUX.1 dev's, so a single file needs --family.
    unsupported_shapes={},
)


class FluxKontext(Flux):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        # musubi-tuner's names: other programs know it as FLUX.1 dev.
        return replace(super().get_base_model_info(pipe), base_model_version="flux_kontext")

    def preprocess_preview_control(self, pipe: Any, image: Image, number_of_images: int) -> Tensor:
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        height, width = pipe.image_processor.get_default_height_width(image)
        ratio = width / height
        _, width, height = min((abs(ratio - wide / high), wide, high) for wide, high in PREFERRED_KONTEXT_RESOLUTIONS)
        step = pipe.vae_scale_factor * 2
        width, height = width // step * step, height // step * step
        pixels: Tensor = pipe.image_processor.preprocess(
            pipe.image_processor.resize(image, height, width), height, width
        )
        return pixels

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        width, height = (
            own or size for own, size in zip((prompt.width, prompt.height), self.default_image_size, strict=True)
        )
        # The pipeline scales every size to an area of one megapixel unless it is told another one.
        return super().build_sampling_kwargs(pipe, prompt, cond, negative_cond) | {"max_area": width * height}

    def build_control_kwargs(self, control_latents: Sequence[Tensor]) -> dict[str, Any]:
        """The pipeline takes latents as they are."""
        return {"image": control_latents[0]} if control_latents else {}
