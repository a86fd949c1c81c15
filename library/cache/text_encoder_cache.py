"""Cache text-encoder outputs (``--cache_text_encoder_outputs``): encode captions and prompts before training."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from PIL.Image import Image, fromarray

from ..config.schema import ModelConfig
from ..dataloader.augment import Augmenter
from ..dataloader.images import BadSample, load_control_pixels, load_preview_controls
from ..dataloader.prepare import PreparedData
from ..dataloader.run_plan import RunPlan
from ..dataloader.sample_prompts import Prompt
from ..distributed.devices import MIXED_PRECISION_DTYPES
from ..errors import UserError
from ..models.detect import get_config_reader
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
"""Of a caption, as the name of an entry."""

MAX_KEYS_SHOWN = 3
MODEL_OPTIONS_WITHOUT_TEXT_EFFECT = frozenset(
    "pretrained_model_name_or_path family v2 vae clip_l clip_g t5xxl text_encoder ae tokenizer_cache_dir guidance_scale"
    " quantize_base".split()
)
"""Options that do not change text-encoder outputs; the weights themselves are in the fingerprint by content."""


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
            captions = [self.text_keys.captions[index] for index in batch]
            controls = [self._load_controls(index) for index in batch] if self.encoders.reads_controls else []
            with torch.no_grad(), strategy.accelerator.autocast():
                rows = split_cond(self.encoders.encode_prompts(pipe, captions, controls), len(captions))
            for caption, row in zip(captions, rows, strict=True):
                if not all(bool(tensor.isfinite().all()) for tensor in row.values()):
                    raise UserError(f"the text encoder returns NaN or Inf for the caption {caption!r}")
            names = [caption[:MAX_CAPTION_CHARACTERS] for caption in captions]
            yield len(batch), list(map(EncodedEntry, batch, rows, names))
        del pipe
        strategy.empty_device_cache()

    def _load_controls(self, entry_index: int) -> list[Image]:
        source = self.text_keys.sources[entry_index]
        if source.prompt is not None:
            return load_preview_controls(source.prompt)
        augmenter, index = self.augmenter, source.sample_index
        crop = get_cached_crop(augmenter, index, is_flipped=source.is_flipped)
        sample, assignment = augmenter.manifest.samples[index], augmenter.assignments[index]
        loaded = load_control_pixels(sample, assignment, augmenter.get_dataset(index), crop)
        if isinstance(loaded, BadSample):
            raise UserError(report_file(loaded.name, loaded.problem))
        return list(map(fromarray, loaded))


def cache_text_encoder_outputs(
    encoders: FrozenEncoders, prepared: PreparedData, run_plan: RunPlan, prompts: Sequence[Prompt]
) -> TextReader | None:
    """Encode every caption of the run and the preview prompts, if ``--cache_text_encoder_outputs`` is set."""
    cache, comm = encoders.cache, encoders.strategy.comm
    if not cache.caches_text_outputs:
        return None
    to_disk = cache.cache_text_encoder_outputs_to_disk
    with open_cache_dirs(cache, comm, prepared, to_disk=to_disk) as directories:
        fingerprint = compute_text_encoder_fingerprint(encoders, directories[0]) if to_disk else TEMPORARY_FINGERPRINT
        spec, encoder = build_text_cache(encoders, prepared, run_plan, prompts, directories, fingerprint)
        store, _ = fill_cache(comm, spec, encoder, verify_existing=to_disk and not cache.skip_cache_check)
        open_shards(store, comm, to_disk=to_disk)
        return TextReader(store, fingerprint, encoders.reads_controls)


def build_text_cache(
    encoders: FrozenEncoders,
    prepared: PreparedData,
    run_plan: RunPlan,
    prompts: Sequence[Prompt],
    cache_dirs: Sequence[Path],
    encoder_fingerprint: str,
) -> tuple[CacheSpec, CaptionEncoder]:
    """Build the spec of the cache of text-encoder outputs and its encoder."""
    merged, with_controls = prepared.merge_validation(), encoders.reads_controls
    augmenter, plan = merged.build_augmenter(run_plan.batch_plan, run_plan.steps), run_plan.batch_plan
    mark = encoders.family.mark_negative_prompt
    texts = collect_run_captions(augmenter, plan, run_plan.steps, prompts, mark, with_controls=with_controls)
    extent = " with their control images" if with_controls else ""
    logger.info("%d different captions%s in %d steps", len(texts), extent, run_plan.steps)
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
    parts = ["T5 only"] if encoders.is_t5_only else []
    return compute_encoder_fingerprint(type(encoders.family).__name__, *parts, precision, scheduler, *options, *weights)


def _list_model_options(model: ModelConfig) -> list[str]:
    """List the model options that are set; excludes the known harmless ones, so that a new option is not forgotten."""
    names = [field.name for field in fields(ModelConfig) if field.name not in MODEL_OPTIONS_WITHOUT_TEXT_EFFECT]
    defaults = ModelConfig()
    return [f"{name}={getattr(model, name)!r}" for name in names if getattr(model, name) != getattr(defaults, name)]


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
