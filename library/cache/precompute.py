"""Cache latents and text-encoder outputs before training; estimate what that needs on disk."""

import atexit
import json
import logging
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from ..config.schema import ModelConfig
from ..config.schema_data import CacheConfig
from ..data.augment import Augmenter
from ..data.prepare import PreparedData
from ..data.prompts import Prompt
from ..data.run_plan import RunPlan
from ..distributed.communicator import Communicator
from ..distributed.devices import MIXED_PRECISION_DTYPES
from ..errors import FileError
from ..models.detect import get_config_reader
from .build import CacheSpec, fill_cache
from .encode import CaptionEncoder, FrozenEncoders, LatentEncoder
from .keys import (
    build_latent_keys,
    build_text_keys,
    collect_run_captions,
    compute_encoder_fingerprint,
    find_varying_caption_keys,
)
from .model_fingerprint import FileHashCache, compute_component_fingerprints
from .paths import LATENTS_DIR_NAME, TEXTS_DIR_NAME, get_temporary_cache_dir, resolve_cache_dirs
from .readers import LatentReader, TextReader
from .store import CacheStore

logger = logging.getLogger(__name__)
FILE_HASHES_NAME = "files.json"
TEMPORARY_FINGERPRINT = ""
"""Encoder fingerprint in the keys of a cache that only this run uses."""

MAX_KEYS_SHOWN = 3

MODEL_OPTIONS_WITHOUT_TEXT_EFFECT = frozenset(
    "pretrained_model_name_or_path family v2 vae clip_l clip_g t5xxl text_encoder ae tokenizer_cache_dir guidance_scale"
    " quantize_base".split()
)
"""Options that do not change text-encoder outputs; the weights themselves are in the fingerprint by content."""


@dataclass(frozen=True)
class CacheReaders:
    """Readers of the caches of a run; None where encoders run during training."""

    latent_reader: LatentReader | None
    text_reader: TextReader | None


def cache_latents(encoders: FrozenEncoders, prepared: PreparedData) -> tuple[PreparedData, LatentReader | None]:
    """Encode missing latents if ``--cache_latents`` is set; images that cannot be encoded count as bad data."""
    cache, comm = encoders.cache, encoders.strategy.comm
    if not cache.caches_latents:
        return prepared, None
    to_disk = cache.cache_latents_to_disk
    with _open_cache_dirs(cache, comm, prepared, to_disk=to_disk) as directories:
        fingerprint = compute_vae_fingerprint(encoders, directories[0]) if to_disk else TEMPORARY_FINGERPRINT
        spec, encoder = build_latent_cache(encoders, prepared, directories, fingerprint)
        store, failures = fill_cache(comm, spec, encoder, verify_existing=to_disk and not cache.skip_cache_check)
        latent_keys = encoder.latent_keys
        if failures:
            by_sample = {int(latent_keys.sample_indices[index]): reason for index, reason in failures.items()}
            prepared = _remove_failed_images(prepared, by_sample)
            latent_keys = build_latent_keys(prepared.merge_validation().build_static_augmenter(), fingerprint)
        _open_shards(store, comm, to_disk=to_disk)
        return prepared, LatentReader(store, latent_keys, len(prepared.merge_validation().manifest.samples))


def cache_text_encoder_outputs(
    encoders: FrozenEncoders, prepared: PreparedData, run_plan: RunPlan, prompts: Sequence[Prompt]
) -> TextReader | None:
    """Encode every caption of the run and the preview prompts, if ``--cache_text_encoder_outputs`` is set."""
    cache, comm = encoders.cache, encoders.strategy.comm
    if not cache.caches_text_outputs:
        return None
    to_disk = cache.cache_text_encoder_outputs_to_disk
    with _open_cache_dirs(cache, comm, prepared, to_disk=to_disk) as directories:
        fingerprint = compute_text_encoder_fingerprint(encoders, directories[0]) if to_disk else TEMPORARY_FINGERPRINT
        spec, encoder = build_text_cache(encoders, prepared, run_plan, prompts, directories, fingerprint)
        store, _ = fill_cache(comm, spec, encoder, verify_existing=to_disk and not cache.skip_cache_check)
        _open_shards(store, comm, to_disk=to_disk)
        return TextReader(store, fingerprint, encoders.reads_controls)


def build_latent_cache(
    encoders: FrozenEncoders, prepared: PreparedData, cache_dirs: Sequence[Path], encoder_fingerprint: str
) -> tuple[CacheSpec, LatentEncoder]:
    """Build the spec of the latent cache and its encoder; ``cache_dirs`` has the directory of each sample."""
    merged = prepared.merge_validation()
    augmenter = merged.build_static_augmenter()
    latent_keys = build_latent_keys(augmenter, encoder_fingerprint)
    option = "cache_latents_to_disk" if encoders.cache.cache_latents_to_disk else "cache_latents"
    sizes = [count_encoded_pixels(augmenter, int(sample)) for sample in latent_keys.sample_indices]
    spec = CacheSpec(
        name="latents",
        unit="image",
        option=option,
        keys=latent_keys.keys,
        directories=[cache_dirs[sample] / LATENTS_DIR_NAME for sample in latent_keys.sample_indices],
        relative_sizes=sizes,
        disk_full_hint="free disk space, set another directory with --cache_dir, use --cache_precision fp16 (half the"
        f" size), or encode images during training without --{option}",
    )
    return spec, LatentEncoder(encoders, augmenter, latent_keys, merged.config.max_data_loader_n_workers)


def count_encoded_pixels(augmenter: Augmenter, sample_index: int) -> int:
    """Pixels of an image and its control images, of which half as much is stored."""
    own, *controls = (augmenter.assignments[sample_index], *augmenter.assign_controls(sample_index))
    areas = [each.bucket_resolution[0] * each.bucket_resolution[1] for each in (own, *controls)]
    return 2 * areas[0] + sum(areas[1:])


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


def compute_vae_fingerprint(encoders: FrozenEncoders, cache_dir: Path) -> str:
    """Hash everything that decides which latents the VAE makes of given pixels, and how they are stored."""
    weights = _compute_weight_hashes(encoders, ("vae",), cache_dir)
    return compute_encoder_fingerprint(type(encoders.family).__name__, encoders.cache.cache_precision, *weights)


def compute_text_encoder_fingerprint(encoders: FrozenEncoders, cache_dir: Path) -> str:
    """Hash everything that decides which outputs the text encoders make of a given caption."""
    weights = _compute_weight_hashes(encoders, encoders.text_components, cache_dir)
    # models of one family may have different sequence lengths, which only their scheduler configs tell apart
    scheduler = json.dumps(get_config_reader(encoders.model)("scheduler/scheduler_config.json"), sort_keys=True)
    precision = str(MIXED_PRECISION_DTYPES[encoders.strategy.mixed_precision])
    options = _list_model_options(encoders.model_config)
    parts = ["T5 only"] if encoders.is_t5_only else []
    return compute_encoder_fingerprint(type(encoders.family).__name__, *parts, precision, scheduler, *options, *weights)


def _compute_weight_hashes(encoders: FrozenEncoders, components: Sequence[str], cache_dir: Path) -> list[str]:
    """On the main process only: the others need not read all weights as well."""
    hashes, family, model = FileHashCache(cache_dir / FILE_HASHES_NAME), encoders.family, encoders.model
    return encoders.strategy.comm.run_on_main_and_broadcast(
        lambda: compute_component_fingerprints(family, model, components, hashes)
    )


def _list_model_options(model: ModelConfig) -> list[str]:
    """List the model options that are set; excludes the known harmless ones, so that a new option is not forgotten."""
    names = [field.name for field in fields(ModelConfig) if field.name not in MODEL_OPTIONS_WITHOUT_TEXT_EFFECT]
    defaults = ModelConfig()
    return [f"{name}={getattr(model, name)!r}" for name in names if getattr(model, name) != getattr(defaults, name)]


@contextmanager
def _open_cache_dirs(
    cache: CacheConfig, comm: Communicator, prepared: PreparedData, *, to_disk: bool
) -> Iterator[list[Path]]:
    """Yield the cache directory of each sample; a temporary one is deleted at the end, its open files stay readable."""
    manifest = prepared.merge_validation().manifest
    if to_disk:
        yield resolve_cache_dirs(manifest, cache)
        return
    directory = get_temporary_cache_dir(cache, comm.all_gather_object(secrets.token_hex(4))[0])
    try:
        yield [directory] * len(manifest.samples)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():  # Windows does not delete files that are open
            atexit.register(shutil.rmtree, directory, ignore_errors=True)


def _open_shards(store: CacheStore, comm: Communicator, *, to_disk: bool) -> None:
    store.open_all_shards()
    if not to_disk:
        comm.barrier()  # the files are deleted after this


def _remove_failed_images(prepared: PreparedData, failures: dict[int, str]) -> PreparedData:
    """Skip the images that could not be encoded, or fail, as ``--on_invalid_images`` says."""
    lines = list(failures.values())
    if prepared.config.on_invalid_images == "fail":
        advice = f"{len(lines)} images cannot be encoded; fix, remove or skip them (--on_invalid_images skip)"
        raise FileError([*lines, advice])
    for line in lines:
        logger.warning("%s; skipped", line)
    return prepared.remove_samples(frozenset(failures))


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
