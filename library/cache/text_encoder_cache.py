"""Cache text-encoder outputs (``--cache_text_encoder_outputs``): encode captions and prompts before training."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image, fromarray

from ..config.options import iter_group_options
from ..config.schema import ModelConfig
from ..config.schema_objective import PreservationConfig
from ..dataloader.augment import Augmenter
from ..dataloader.images import BadSample, load_control_pixels, load_first_pixels, load_text_images
from ..dataloader.prepare import PreparedData
from ..dataloader.run_plan import RunPlan
from ..dataloader.sample_prompts import Prompt
from ..dataset.image_decoding import Pixels
from ..distributed.devices import MIXED_PRECISION_DTYPES
from ..errors import UserError
from ..models.detect import get_config_reader
from ..models.own_families import identify_class
from ..problems import Problem, report_file
from .distributed_encoding import CacheSpec, EncodedEntry, fill_cache, open_cache_dirs, open_shards, split_into_batches
from .frozen_encoders import FrozenEncoders
from .keys import (
    TextKeys,
    build_text_keys,
    collect_run_captions,
    compute_encoder_fingerprint,
    find_varying_caption_keys,
    get_cached_crop,
)
from .paths import TEMPORARY_FINGERPRINT, TEXTS_DIR_NAME
from .readers import TextReader, split_cond

logger = logging.getLogger(__name__)
MAX_CAPTION_CHARACTERS = 80
"""The longest part of a caption that is shown as the name of an entry."""

MAX_KEYS_SHOWN = 3


@dataclass
class CaptionEncoder:
    """Encodes captions; the text encoders are loaded for the first batch and freed after the last."""

    encoders: FrozenEncoders
    augmenter: Augmenter
    text_keys: TextKeys
    failures: dict[int, Problem] = field(default_factory=dict)

    def make_batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Group entries to batches of ``--text_encoder_batch_size``."""
        return split_into_batches(indices, self.encoders.cache.text_encoder_batch_size)

    def encode_batches(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[EncodedEntry]]]:
        """Encode batches in the dtype and autocast that training without a cache uses."""
        strategy, pipe = self.encoders.strategy, None
        for batch in batches:
            if pipe is None:
                dtype = MIXED_PRECISION_DTYPES[strategy.mixed_precision]
                pipe = self.encoders.load(self.encoders.text_components, dtype)
            rows = self._encode_texts(pipe, batch)
            captions = [self.text_keys.texts[index].caption for index in batch]
            for caption, row in zip(captions, rows, strict=True):
                if not all(bool(tensor.isfinite().all()) for tensor in row.values()):
                    raise UserError(f"the text encoder returns NaN or Inf for the caption {caption!r}")
            names = [caption[:MAX_CAPTION_CHARACTERS] for caption in captions]
            yield len(batch), list(map(EncodedEntry, batch, rows, names))
        del pipe
        strategy.empty_device_cache()

    def _encode_texts(self, pipe: Any, batch: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Encode the captions of a batch, and its negative prompts where they are encoded in another way."""
        texts = self.text_keys.texts
        rows: dict[int, dict[str, torch.Tensor]] = {}
        for is_negative in (False, True):
            part = [index for index in batch if texts[index].is_negative == is_negative]
            captions = [texts[index].caption for index in part]
            if not part:
                continue
            controls = [self._load_images(index) for index in part] if self.encoders.text_images != "none" else []
            with torch.no_grad(), self.encoders.strategy.accelerator.autocast():
                cond = self.encoders.encode_prompts(pipe, captions, controls, is_negative=is_negative)
            rows |= zip(part, split_cond(cond, len(part)), strict=True)
        return [rows[index] for index in batch]

    def _load_images(self, entry_index: int) -> list[Image]:
        """Load the images that are read with a caption."""
        source, kind = self.text_keys.sources[entry_index], self.encoders.text_images
        if source.prompt is not None:
            return load_text_images(source.prompt, kind)
        augmenter, index = self.augmenter, source.sample_index
        crop = get_cached_crop(augmenter, index, is_flipped=source.is_flipped)
        sample, assignment = augmenter.manifest.samples[index], augmenter.assignments[index]
        loaded: tuple[Pixels, ...] | BadSample
        if kind == "first frame":
            loaded = load_first_pixels(sample, assignment, crop)
        else:
            loaded = load_control_pixels(sample, assignment, augmenter.get_dataset(index), crop)
        if isinstance(loaded, BadSample):
            raise UserError(report_file(loaded.name, loaded.problem))
        return list(map(fromarray, loaded))


def cache_text_encoder_outputs(
    encoders: FrozenEncoders,
    prepared: PreparedData,
    run_plan: RunPlan,
    prompts: Sequence[Prompt],
    preservation: PreservationConfig,
) -> TextReader | None:
    """Encode every caption of the run and the preview prompts, if ``--cache_text_encoder_outputs`` is set."""
    cache, comm = encoders.cache, encoders.strategy.comm
    if not cache.caches_text_outputs:
        return None
    to_disk = cache.cache_text_encoder_outputs_to_disk
    with open_cache_dirs(cache, comm, prepared, to_disk=to_disk) as directories:
        fingerprint = compute_text_encoder_fingerprint(encoders, directories[0]) if to_disk else TEMPORARY_FINGERPRINT
        spec, encoder = build_text_cache(
            encoders,
            prepared,
            run_plan,
            preservation,
            prompts=prompts,
            cache_dirs=directories,
            encoder_fingerprint=fingerprint,
        )
        store, _ = fill_cache(comm, spec, encoder, verify_existing=to_disk and not cache.skip_cache_check)
        open_shards(store, comm, to_disk=to_disk)
        return TextReader(store, fingerprint, encoders.text_images)


def build_text_cache(
    encoders: FrozenEncoders,
    prepared: PreparedData,
    run_plan: RunPlan,
    preservation: PreservationConfig,
    prompts: Sequence[Prompt],
    cache_dirs: Sequence[Path],
    encoder_fingerprint: str,
) -> tuple[CacheSpec, CaptionEncoder]:
    """Build the spec of the cache of text-encoder outputs and its encoder."""
    merged = prepared.merge_validation()
    augmenter, plan = merged.build_augmenter(run_plan.batch_plan, run_plan.steps), run_plan.batch_plan
    texts = collect_run_captions(
        augmenter,
        plan,
        run_plan.steps,
        prompts,
        text_images=encoders.text_images,
        has_negative_encoding=encoders.family.facts.text.has_negative_encoding,
        list_more_texts=preservation.list_preserved_texts,
        slider_texts=merged.list_slider_texts(),
    )
    extent = {"none": "", "controls": " with their control images", "first frame": " with their first frames"}
    logger.info("%d different captions%s in %d steps", len(texts), extent[encoders.text_images], run_plan.steps)
    text_keys = build_text_keys(texts, encoder_fingerprint)
    to_disk = encoders.cache.cache_text_encoder_outputs_to_disk
    option = "cache_text_encoder_outputs_to_disk" if to_disk else "cache_text_encoder_outputs"
    spec = CacheSpec(
        name="text-encoder outputs",
        unit="caption",
        option=option,
        keys=text_keys.keys,
        directories=[cache_dirs[source.sample_index] / TEXTS_DIR_NAME for source in text_keys.sources],
        relative_sizes=[1] * len(text_keys),
        disk_full_hint=_suggest_fewer_captions(merged, option),
    )
    return spec, CaptionEncoder(encoders, augmenter, text_keys)


def compute_text_encoder_fingerprint(encoders: FrozenEncoders, cache_dir: Path) -> str:
    """Hash everything that decides which outputs the text encoders make of a given caption."""
    weights = encoders.compute_weight_hashes(encoders.text_components, cache_dir)
    # models of one family may have different sequence lengths, which only their scheduler configs tell apart
    scheduler = json.dumps(get_config_reader(encoders.model)("scheduler/scheduler_config.json"), sort_keys=True)
    precision = str(MIXED_PRECISION_DTYPES[encoders.strategy.mixed_precision])
    options = _list_model_options(encoders.model_config)
    version = encoders.family.facts.text.version
    parts = [*(["T5 only"] if encoders.is_t5_only else []), *([f"version {version}"] if version > 1 else [])]
    return compute_encoder_fingerprint(
        *identify_class(type(encoders.family)), *parts, precision, scheduler, *options, *weights
    )


def _list_model_options(model: ModelConfig) -> list[str]:
    """List the model options that are set and change text-encoder outputs, as their facts say.

    The weights themselves are in the fingerprint by content.
    """
    values = [(option, getattr(model, option.name)) for option in iter_group_options(ModelConfig)]
    return [
        f"{option.name}={value!r}"
        for option, value in values
        if option.changes_text_outputs and value != option.default
    ]


def _suggest_fewer_captions(prepared: PreparedData, option: str) -> str:
    """Name the settings that multiply the captions, and where they are set."""
    subsets = [subset for dataset in prepared.manifest.datasets for subset in dataset.subsets]
    found = [f"{key} ({subset.locate(key)})" for subset in subsets for key in find_varying_caption_keys(subset)]
    keys = list(dict.fromkeys(found))[:MAX_KEYS_SHOWN]
    fewer = f"fewer captions without {', '.join(keys)}; or " if keys else ""
    return (
        f"{fewer}free disk space, set another directory with --cache_dir, or encode captions during training without"
        f" --{option}"
    )
