"""FramePack and FramePack F1: HunyuanVideo's blocks make a clip section by section, with what is known of it beside.

A section has ``latent_window_size`` latent frames.  Beside them the transformer gets the first frame of the clip and
nineteen others, of which sixteen are compressed fourfold and two twofold: those after the section, as FramePack makes
the last section first, or with ``f1`` those before it.  The positions of all of them, which count in latent frames, are
the same for a whole batch, so a step trains the same section of all of its clips.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_ONLY_KEYS
from ...config.network_args import NetworkFacts
from ...dataset.clip_windows import FrameRule
from ...diffusion.timestep_shift import FixedShift
from ...problems import Problem
from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import DetectionFacts, FamilyMatch
from ..family_noise_levels import NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .hunyuan_video import FACTS as TEXT_FACTS
from .hunyuan_video import HunyuanVideo
from .hunyuan_video15_i2v import embed_siglip_images, register_image_processor
from .hunyuan_video_keys import COMFYUI_KEYS, HUNYUAN_VIDEO_KEYS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...config.schema import ModelConfig
    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

FRAME_STRIDE, WINDOW = 4, 9
"""The frames of a latent frame, and the latent frames of a section of the published models."""

NUM_NEAR, NUM_2X, NUM_4X = 1, 2, 16
"""The frames beside a section and the first one, the nearest first: as they are, compressed twofold and fourfold."""
NUM_BESIDE = NUM_NEAR + NUM_2X + NUM_4X

EMBEDDED_GUIDANCE = 10.0
"""The guidance embedding of previews, as FramePack's authors and musubi-tuner sample."""

_F1_NAME = re.compile(r"(?<![a-z0-9])f1(?![a-z0-9])", re.IGNORECASE)


def _match_framepack(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if not (config.get("has_clean_x_embedder") and config.get("has_image_proj")):
        raise ModelError("its transformer takes no frames beside a section, so it is not that of FramePack")
    blocks = f"{config.get('num_layers')} double and {config.get('num_single_layers')} single blocks"
    match = match_flow_model(read, 1, f"the transformer has {blocks} and is given frames beside a section")
    return replace(match, has_guidance_embeds=bool(config.get("guidance_embeds", True)))


def _find_f1_mistakes(read: ConfigReader, options: ModelConfig) -> Iterator[Problem]:
    """Find a model that is named F1 and would be trained as the other one, whose files have the same weights."""
    *folders, name = Path(options.pretrained_model_name_or_path or "-").parts
    names = [name, *(folder for folder in folders if "framepack" in folder.lower())]
    found = next((each for each in names if _F1_NAME.search(each.replace("_", " "))), None)
    if found is not None and not options.f1:
        yield Problem("f1", f"{found} is named like FramePack F1, which is trained otherwise", "add --f1, or rename it")


FACTS = replace(
    TEXT_FACTS,
    title="FramePack",
    pipeline=replace(
        TEXT_FACTS.pipeline,
        class_name="HunyuanVideoFramepackPipeline",
        num_parameters=12_874_314_816,
        hub_id="",
        frames=FrameRule(
            stride=FRAME_STRIDE * WINDOW, fps=30.0, latents_per_stride=WINDOW, least=FRAME_STRIDE * WINDOW + 1
        ),
        frame_encoders=("image_encoder",),
    ),
    detection=DetectionFacts(
        match_configs=_match_framepack,
        # Its files have the names of diffusers.
        keys=("clean_x_embedder.proj_4x.weight", "image_projection.up.weight"),
        shape_checks={
            ("x_embedder.proj.weight", 1): ("transformer", "in_channels"),
            ("context_embedder.proj_in.weight", 1): ("transformer", "text_embed_dim"),
            ("image_projection.up.weight", 1): ("transformer", "image_proj_dim"),
        },
    ),
    single_files=replace(TEXT_FACTS.single_files, layout=()),
    lora=replace(
        TEXT_FACTS.lora,
        key_style=DIFFUSERS_ONLY_KEYS,
        other_key_styles=(HUNYUAN_VIDEO_KEYS, COMFYUI_KEYS),
        format="diffusers",
        modelspec_architecture="framepack",
        modelspec_implementation="https://github.com/lllyasviel/FramePack",
    ),
    blocks=replace(
        TEXT_FACTS.blocks,
        unsupported_strategies={"cuda_graphs": "FramePack cuts texts to their lengths on the host"},
    ),
    text=replace(TEXT_FACTS.text, pad_multiple=1),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(3.0),
        reason="as musubi-tuner's guide",
        other_trainers={"musubi-tuner": NoiseLevels("shift", 3.0, origin="its guide")},
    ),
    sampling=replace(TEXT_FACTS.sampling, num_inference_steps=25, image_size=(640, 640), frame_images=("image_path",)),
    options=replace(
        TEXT_FACTS.options,
        components={**TEXT_FACTS.options.components, "image_encoder": "image_encoder"},
        extra=("guidance_scale", "f1", "latent_window_size", "one_frame", "one_frame_settings"),
        validate=_find_f1_mistakes,
        network=NetworkFacts(modules=("networks.lora_framepack",)),
    ),
    notes="from the first frame, section by section; F1 with `--f1`",
)


def list_paddings(num_sections: int) -> list[int]:
    """List how far each section is from the first frame, in sections; those of long clips are said to be nearer."""
    if num_sections <= 4:
        return list(range(num_sections))
    return [0, 1, *[2] * (num_sections - 3), 3]


def _pad_frames(latents: Tensor, *, is_before: bool) -> Tensor:
    """Add zeros for frames that do not exist, before or after the others."""
    from torch.nn.functional import pad

    missing = NUM_BESIDE - latents.shape[2]
    return pad(latents, (0, 0, 0, 0, *((missing, 0) if is_before else (0, missing))))


def select_section(batch: Batch, section: int, window: int, *, is_f1: bool) -> Batch:
    """Select a section of clips of whole sections after a first frame, and what the transformer gets beside it.

    ``positions`` are those of the kept frames, of those compressed twofold and fourfold, and of the section.
    """
    import torch

    latents, start = batch.latents, 1 + section * window
    end = start + window
    if is_f1:
        beside = _pad_frames(latents[:, :, max(0, start - NUM_BESIDE) : start], is_before=True)
        parts = torch.split(beside, [NUM_4X, NUM_2X, NUM_NEAR], dim=2)
        numbers = torch.split(torch.arange(1 + NUM_BESIDE + window), [1, NUM_4X, NUM_2X, NUM_NEAR, window])
        first, *others, own = numbers
    else:
        beside = _pad_frames(latents[:, :, end : end + NUM_BESIDE], is_before=False)
        parts = torch.split(beside, [NUM_NEAR, NUM_2X, NUM_4X], dim=2)
        padding = window * list_paddings((latents.shape[2] - 1) // window)[section]
        sizes = [1, padding, window, NUM_NEAR, NUM_2X, NUM_4X]
        numbers = torch.split(torch.arange(sum(sizes)), sizes)
        first, _, own, *others = numbers
    near, twofold, fourfold = ((values, places) for values, places in zip(parts, others, strict=True))
    if is_f1:
        near, fourfold = fourfold, near
    positions = torch.cat([first, near[1], twofold[1], fourfold[1], own])
    return replace(
        batch,
        latents=latents[:, :, start:end].contiguous(),
        frame_cond={
            **batch.frame_cond,
            "clean": torch.cat([latents[:, :, :1], near[0]], dim=2),
            "twofold": twofold[0].contiguous(),
            "fourfold": fourfold[0].contiguous(),
            "positions": positions.to(latents.device).expand(len(latents), -1),
        },
    )


class FramePack(HunyuanVideo):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("framepack_f1" if self.model_config.f1 else "framepack", "framepack")

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class(self.model_config.latent_window_size, is_f1=self.model_config.f1)

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        register_image_processor(pipe, read)

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        """Let the mask of texts be on the host, where the transformer reads it, and copy it for the text refiner.

        diffusers cuts texts to the length that the mask says, for which it would wait for the device.
        """
        denoiser.context_embedder.register_forward_pre_hook(_copy_mask)

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """Encode the first frame with SigLIP, whose tokens the transformer reads before those of the text."""
        from ..vae import as_clips

        return {"images": embed_siglip_images(pipe, as_clips(pixels)[:, :, 0])}

    def select_section(self, batch: Batch, draw: float) -> Batch:
        window = self.model_config.latent_window_size
        num_sections = (batch.latents.shape[2] - 1) // window
        section = min(int(draw * num_sections), num_sections - 1)
        return select_section(batch, section, window, is_f1=self.model_config.f1)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        rows, given = batch.cond["embeds"], batch.frame_cond
        embeds, _ = pad_text_embeds(rows, batch.text_pad_multiple)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(embeds.shape[1]) < lengths[:, None]
        clean, twofold, fourfold = (given[name].to(noisy_latents) for name in ("clean", "twofold", "fourfold"))
        sizes = [each.shape[2] for each in (clean, twofold, fourfold, noisy_latents)]
        at_clean, at_twofold, at_fourfold, at_section = torch.split(given["positions"][0], sizes)
        guidance = None
        if pipe.transformer.config.guidance_embeds:
            guidance = timesteps.new_full(timesteps.shape, 1000 * self.model_config.guidance_scale)
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            timestep=timesteps,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask.to(embeds.dtype),
            pooled_projections=batch.cond["pooled"],
            image_embeds=given["images"].to(embeds.dtype),
            indices_latents=at_section,
            guidance=guidance,
            latents_clean=clean,
            indices_latents_clean=at_clean,
            latents_history_2x=twofold,
            indices_latents_history_2x=at_twofold,
            latents_history_4x=fourfold,
            indices_latents_history_4x=at_fourfold,
            return_dict=False,
        )[0]
        return predicted

    # Hooks of previews.

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        return kwargs if prompt.embedded_guidance is not None else {**kwargs, "guidance_scale": EMBEDDED_GUIDANCE}

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        """Decode two sections at a time, and let each pair fade into the next one, as the pipeline does."""
        window = self.model_config.latent_window_size
        num_sections, overlap = (latents.shape[2] - 1) // window, (window - 1) * FRAME_STRIDE + 1
        bounds = [0, *(1 + number * window for number in range(1, num_sections + 1))]
        if self.model_config.f1:
            clip = self.decode_latents(pipe, latents[:, :, : bounds[1]])
            for number in range(1, num_sections):
                pair = latents[:, :, bounds[number + 1] - 2 * window : bounds[number + 1]]
                clip = pipe._soft_append(clip, self.decode_latents(pipe, pair), overlap)
            return clip
        clip = self.decode_latents(pipe, latents[:, :, bounds[-1] - window if num_sections > 1 else 0 :])
        for number in reversed(range(num_sections - 1)):
            pair = self.decode_latents(pipe, latents[:, :, bounds[number] : bounds[number + 2]])
            clip = pipe._soft_append(pair, clip, overlap)
        return clip


def _copy_mask(refiner: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy the mask of the text to the text."""
    from ...diffusion.noise import copy_async

    texts, timestep, mask = inputs
    return texts, timestep, copy_async(mask, texts)


def _build_pipeline_class(window: int, *, is_f1: bool) -> Any:
    """diffusers' pipeline with sections of this size, which makes as many as the frames that it is told are.

    It takes latents for the noise, and those of the image, and returns the latents of the whole clip.
    """
    from diffusers import HunyuanVideoFramepackPipeline

    pipeline: Any = HunyuanVideoFramepackPipeline

    class SectionPipeline(pipeline):  # type: ignore[misc]
        given_noise: Tensor | None = None
        given_image: Tensor | None = None

        def __call__(
            self,
            *args: Any,
            num_frames: int = FRAME_STRIDE * window + 1,
            latents: Tensor | None = None,
            image_latents: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            self.given_noise, self.given_image = latents, image_latents
            num_sections = max(1, (num_frames - 1) // (FRAME_STRIDE * window))
            kwargs["num_frames"] = num_sections * ((window - 1) * FRAME_STRIDE + 1)  # as many as it counts for them
            kwargs["sampling_type"] = "vanilla" if is_f1 else "inverted_anti_drifting"
            result = super().__call__(*args, latent_window_size=window, **kwargs)
            if kwargs.get("output_type") != "latent":
                return result
            return type(result)(frames=result.frames[-1])

        def encode_image(self, image: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """Encode an image as training and FramePack's authors do; diffusers rounds its pixels down."""
            return embed_siglip_images(self, image)

        def prepare_latents(self, *args: Any, **kwargs: Any) -> Tensor:
            drawn: Tensor = super().prepare_latents(*args, **kwargs) if self.given_noise is None else self.given_noise
            return drawn

        def prepare_image_latents(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.given_image is None:
                encoded: Tensor = super().prepare_image_latents(*args, **kwargs)
                return encoded
            return self.given_image

    return copy_class_name(SectionPipeline, HunyuanVideoFramepackPipeline)
