"""FLUX.1 Kontext: FLUX.1 dev trained to edit; the reference image is further tokens behind those of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base import BaseModelInfo
from ..facts import ControlFacts, TrainerNames
from ..family_noise_levels import WEIGHTED, NoiseLevels, TrainingNoiseFacts
from .flux import FACTS as FLUX_FACTS
from .flux import Flux

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...dataloader.batch import Cond
    from ...dataloader.sample_prompts import Prompt

FACTS = replace(
    FLUX_FACTS,
    title="FLUX.1 Kontext",
    pipeline=replace(
        FLUX_FACTS.pipeline,
        class_name="FluxKontextPipeline",
        kind="edit",
        hub_id="black-forest-labs/FLUX.1-Kontext-dev",
    ),
    # Its weights have the names and shapes of FLUX.1 dev's, so a single file needs --family.
    detection=replace(
        FLUX_FACTS.detection,
        unsupported_shapes={},
        trainer_names=TrainerNames(
            ai_toolkit=("flux_kontext",),
            diffusion_pipe=("flux",),
            simpletuner=("flux",),
            simpletuner_flavours={"kontext": "black-forest-labs/FLUX.1-Kontext-dev"},
            variant_pattern="kontext",
        ),
    ),
    control=ControlFacts(num_images=(0, 1)),
    options=replace(
        FLUX_FACTS.options,
        network=replace(
            FLUX_FACTS.options.network, musubi_args=("exclude_patterns=['.*(img_mod|txt_mod|modulation).lin']",)
        ),
        musubi_versions={"kontext": {}},
        kohya_objective=None,
    ),
    training_noise=TrainingNoiseFacts(
        other_trainers={"musubi-tuner": NoiseLevels("flux_shift", origin="its guide"), "ai-toolkit": WEIGHTED},
    ),
)


class FluxKontext(Flux):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        # musubi-tuner's names: other programs know it as FLUX.1 dev.
        return replace(super().get_base_model_info(pipe), base_model_version="flux_kontext")

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        width, height = self.facts.sampling.get_image_size(prompt.width, prompt.height)
        # The pipeline scales every size to an area of one megapixel unless it is told another one.
        return super().build_sampling_kwargs(pipe, prompt, cond, negative_cond) | {"max_area": width * height}

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        """Resize and encode the reference as the pipeline does, but in float32; it takes latents as they are."""
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        if not images:
            return {}
        processor, step = pipe.image_processor, pipe.vae_scale_factor * 2
        height, width = processor.get_default_height_width(images[0])
        ratio = width / height
        _, width, height = min((abs(ratio - wide / high), wide, high) for wide, high in PREFERRED_KONTEXT_RESOLUTIONS)
        width, height = width // step * step, height // step * step
        pixels = processor.preprocess(processor.resize(images[0], height, width), height, width)
        return {"image": self.encode_moments(pipe, pixels.float()).mean_and_std[:, 0]}
