"""Estimate entries and disk space of cached latents and text-encoder outputs, before anything is encoded (no torch)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.keys import build_latent_keys, collect_run_captions
from ..cache.paths import format_bytes, resolve_cache_dirs
from ..config.schema_data import CacheConfig
from ..config.schema_objective import PreservationConfig
from ..config.schema_output import PreviewConfig
from ..dataloader.augment import Augmenter
from ..dataloader.prepare import PreparedData
from ..dataloader.run_plan import RunPlan
from ..dataloader.sample_prompts import load_preview_prompts
from ..dataset.clip_windows import FrameRule, TextImages
from ..models.model_configs import EncodedSizes

BYTES_PER_ELEMENT = {"float": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class CacheEstimate:
    """Number and size of cached latents or text-encoder outputs."""

    name: str
    num_entries: int
    num_bytes: int | None
    """The size of the cache, or None if the model's config files do not determine it."""
    is_upper_bound: bool
    directories: Sequence[Path]
    """The folders of the cache; empty if entries are for this run only."""

    def format_text(self) -> str:
        size = "unknown size"
        if self.num_bytes is not None:
            size = f"{'at most ' if self.is_upper_bound else ''}{format_bytes(self.num_bytes)}"
        location = f"in {self.directories[0]}" if self.directories else "for this run only"
        others = f" and {len(self.directories) - 1} more" if len(self.directories) > 1 else ""
        return f"cached {self.name}: {self.num_entries}, {size}, {location}{others}"

    def to_json(self) -> dict[str, Any]:
        return {"entries": self.num_entries, "bytes": self.num_bytes, "folders": list(map(str, self.directories))}


def estimate_latent_cache(
    cache: CacheConfig,
    prepared: PreparedData,
    seed: int,
    run_plan: RunPlan,
    sizes: EncodedSizes | None,
    frame_rule: FrameRule | None = None,
) -> CacheEstimate:
    """Estimate the latents of all images, validation images included; ``frame_rule`` is that of a model of videos."""
    prepared = prepared.merge_validation()
    latent_keys = build_latent_keys(Augmenter(prepared.manifest, prepared.assignments, seed, run_plan.steps), "")
    distinct = np.unique(latent_keys.keys, return_index=True)[1]
    num_bytes = None
    if sizes is not None:
        indices, augmenter = latent_keys.sample_indices[distinct].tolist(), prepared.build_static_augmenter()
        elements, num_pixels = 0, 0
        for index in indices:
            num_frames = prepared.manifest.samples[index].num_frames
            frames = 1 if frame_rule is None else frame_rule.count_latent_frames(num_frames)
            elements += sizes.count_moment_elements(prepared.assignments[index].bucket_resolution, frames)
            if frame_rule is not None and prepared.manifest.samples[index].has_sound:
                elements += frame_rule.count_sound_latents(num_frames) * frame_rule.sound_channels
            controls = zip(prepared.manifest.samples[index].controls, augmenter.assign_controls(index), strict=True)
            for control, own in controls:
                if control.square_side and frame_rule is not None:  # of whose frames the pixels are stored
                    num_pixels += 3 * control.square_side**2 * frames * frame_rule.stride
                else:
                    elements += sizes.count_moment_elements(own.bucket_resolution, frames) // 2  # only their mean
        num_bytes = BYTES_PER_ELEMENT[cache.cache_precision] * elements + num_pixels
    directories = _list_directories(cache, prepared) if cache.cache_latents_to_disk else ()
    return CacheEstimate("latents", len(distinct), num_bytes, False, directories)


def estimate_caption_cache(
    cache: CacheConfig,
    prepared: PreparedData,
    seed: int,
    run_plan: RunPlan,
    sizes: EncodedSizes | None,
    preview: PreviewConfig,
    mixed_precision: str | None,
    preservation: PreservationConfig,
    text_images: TextImages = "none",
    text_tokens_per_image: int = 0,
) -> CacheEstimate:
    """Estimate the text-encoder outputs of every caption and preview prompt of the run."""
    prepared = prepared.merge_validation()
    augmenter = Augmenter(prepared.manifest, prepared.assignments, seed, run_plan.steps)
    prompts = load_preview_prompts(preview)
    plan, steps = run_plan.batch_plan, run_plan.steps
    texts = collect_run_captions(
        augmenter,
        plan,
        steps,
        prompts,
        text_images=text_images,
        list_more_texts=preservation.list_preserved_texts,
        slider_texts=prepared.list_slider_texts(),
    )
    precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    num_bytes = None
    if sizes is not None:
        num_images = sum(source.count_text_images(augmenter, text_images) for source in texts.values())
        elements = len(texts) * sizes.text_elements + num_images * text_tokens_per_image * sizes.text_width
        num_bytes = elements * (4 if precision == "no" else 2)
    directories = _list_directories(cache, prepared) if cache.cache_text_encoder_outputs_to_disk else ()
    return CacheEstimate("captions", len(texts), num_bytes, True, directories)


def _list_directories(cache: CacheConfig, prepared: PreparedData) -> list[Path]:
    return list(dict.fromkeys(resolve_cache_dirs(prepared.manifest, cache)))
