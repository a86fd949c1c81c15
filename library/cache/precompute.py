"""What a run keeps instead of computing it at every step: which, where, made by whom, and for how long."""

import atexit
import json
import logging
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from ..config import RunConfig
from ..config.schema import ModelConfig
from ..data.augment import Augmenter
from ..data.prepare import PreparedData
from ..data.prompts import Prompt
from ..data.run_plan import RunPlan
from ..distributed.communicator import Communicator
from ..distributed.devices import MIXED_PRECISION_DTYPES
from ..errors import ConfigError
from ..models.base import Family
from ..models.detect import DetectedModel, get_config_reader
from ..parallel.strategy import Strategy
from .build import CacheSpec, fill_cache
from .encode import CaptionEncoder, EncoderLoader, LatentEncoder
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
"""Stands for the encoder of what is not kept any longer."""


MAX_KEYS_SHOWN = 3


MODEL_OPTIONS_WITHOUT_TEXT_EFFECT = {
    "pretrained_model_name_or_path",
    "family",
    "v2",
    "vae",
    "clip_l",
    "clip_g",
    "t5xxl",
    "text_encoder",
    "ae",
    "tokenizer_cache_dir",
    "guidance_scale",
    "quantize_base",
}
"""Where parts of a model are matters to nobody: what they are made of is looked at."""


@dataclass(frozen=True)
class CacheReaders:
    """What was computed before training; nothing where it is computed as it is used."""

    latent_reader: LatentReader | None
    text_reader: TextReader | None


def cache_latents(
    config: RunConfig, strategy: Strategy, family: Family, model: DetectedModel, prepared: PreparedData
) -> tuple[PreparedData, LatentReader | None]:
    """Encode what is missing, if latents are to be kept; pictures that cannot be encoded go the way of bad data."""
    cache = config.cache
    if not cache.caches_latents:
        return prepared, None
    to_disk = cache.cache_latents_to_disk
    with _open_cache_dirs(config, strategy.comm, prepared, to_disk=to_disk) as bases:
        encoder = (
            compute_vae_fingerprint(config, strategy, family, model, bases[0]) if to_disk else TEMPORARY_FINGERPRINT
        )
        kitchen = EncoderLoader(strategy, family, model, cache)
        shelf, maker = build_latent_cache_spec(config, kitchen, prepared, bases, encoder)
        store, bad = fill_cache(strategy.comm, shelf, maker, verify_existing=to_disk and not cache.skip_cache_check)
        wanted = maker.latent_keys
        if bad:
            by_sample = {int(wanted.sample_indices[number]): why for number, why in bad.items()}
            prepared = _remove_failed_images(prepared, by_sample, config)
            wanted = build_latent_keys(prepared.merge_validation().build_static_augmenter(), encoder)
        _open_store(store, strategy.comm, to_disk=to_disk)
        return prepared, LatentReader(store, wanted, len(prepared.merge_validation().manifest.samples))


def cache_text_encoder_outputs(
    config: RunConfig,
    strategy: Strategy,
    family: Family,
    model: DetectedModel,
    prepared: PreparedData,
    run_plan: RunPlan,
    prompts: Sequence[Prompt],
) -> TextReader | None:
    """Encode every caption that the run will show, and the prompts of its previews, if texts are to be kept."""
    cache = config.cache
    if not cache.caches_text_outputs:
        return None
    to_disk = cache.cache_text_encoder_outputs_to_disk
    with _open_cache_dirs(config, strategy.comm, prepared, to_disk=to_disk) as bases:
        encoder = (
            compute_text_encoder_fingerprint(config, strategy, family, model, bases[0])
            if to_disk
            else TEMPORARY_FINGERPRINT
        )
        kitchen = EncoderLoader(strategy, family, model, cache)
        shelf, maker = build_text_cache_spec(config, kitchen, prepared, run_plan, prompts, bases, encoder)
        store, _ = fill_cache(strategy.comm, shelf, maker, verify_existing=to_disk and not cache.skip_cache_check)
        _open_store(store, strategy.comm, to_disk=to_disk)
        return TextReader(store, encoder)


def build_latent_cache_spec(
    config: RunConfig,
    encoder_loader: EncoderLoader,
    prepared: PreparedData,
    cache_dirs: Sequence[Path],
    encoder_fingerprint: str,
) -> tuple[CacheSpec, LatentEncoder]:
    """The latents of all pictures, below the folder in ``bases`` of each, and who makes them."""
    prepared = prepared.merge_validation()
    showing = prepared.build_static_augmenter()
    wanted = build_latent_keys(showing, encoder_fingerprint)
    option = "cache_latents_to_disk" if config.cache.cache_latents_to_disk else "cache_latents"
    shelf = CacheSpec(
        name="latents",
        unit="picture",
        option=option,
        keys=wanted.keys,
        directories=[cache_dirs[sample] / LATENTS_DIR_NAME for sample in wanted.sample_indices],
        relative_sizes=[
            _compute_area(prepared.assignments[sample].bucket_resolution) for sample in wanted.sample_indices
        ],
        disk_full_hint="make room, name another folder with --cache_dir, halve it with --cache_precision fp16, or encode"
        f" pictures as they are used: take --{option} out",
    )
    return shelf, LatentEncoder(encoder_loader, showing, wanted, config.data.max_data_loader_n_workers)


def build_text_cache_spec(
    config: RunConfig,
    encoder_loader: EncoderLoader,
    prepared: PreparedData,
    run_plan: RunPlan,
    prompts: Sequence[Prompt],
    cache_dirs: Sequence[Path],
    encoder_fingerprint: str,
) -> tuple[CacheSpec, CaptionEncoder]:
    """The captions of a run and the prompts of its previews, and who encodes them."""
    prepared = prepared.merge_validation()
    showing = Augmenter(prepared.manifest, prepared.assignments, config.train.seed, run_plan.steps)
    also = [text for prompt in prompts for text in (prompt.text, prompt.negative_prompt)]
    captions = collect_run_captions(showing, run_plan.batch_plan, run_plan.steps, also)
    logger.info("captions: %d different ones are shown in %d steps", len(captions), run_plan.steps)
    wanted = build_text_keys(captions, encoder_fingerprint)
    to_disk = config.cache.cache_text_encoder_outputs_to_disk
    option = "cache_text_encoder_outputs_to_disk" if to_disk else "cache_text_encoder_outputs"
    shelf = CacheSpec(
        name="captions",
        unit="caption",
        option=option,
        keys=wanted.keys,
        directories=[cache_dirs[owner] / TEXTS_DIR_NAME for owner in wanted.owner_indices],
        relative_sizes=[1] * len(wanted),
        disk_full_hint=_suggest_fewer_captions(prepared, option),
    )
    return shelf, CaptionEncoder(encoder_loader, wanted)


def compute_vae_fingerprint(
    config: RunConfig, strategy: Strategy, family: Family, model: DetectedModel, cache_dir: Path
) -> str:
    """A short text that stands for the VAE and all that decides what it makes of pixels."""
    made_of = _compute_weight_hashes(strategy.comm, family, model, ("vae",), cache_dir)
    return compute_encoder_fingerprint(type(family).__name__, config.cache.cache_precision, *made_of)


def compute_text_encoder_fingerprint(
    config: RunConfig, strategy: Strategy, family: Family, model: DetectedModel, cache_dir: Path
) -> str:
    """A short text that stands for the text encoders and all that decides what they make of captions."""
    made_of = _compute_weight_hashes(strategy.comm, family, model, family.text_components, cache_dir)
    # Models of one kind may read texts of different lengths, which their schedulers tell apart.
    scheduler = json.dumps(get_config_reader(model)("scheduler/scheduler_config.json"), sort_keys=True)
    precision = str(MIXED_PRECISION_DTYPES[strategy.mixed_precision])
    return compute_encoder_fingerprint(
        type(family).__name__, precision, scheduler, *_list_model_options(config.model), *made_of
    )


def _compute_weight_hashes(
    comm: Communicator, family: Family, model: DetectedModel, parts: Sequence[str], cache_dir: Path
) -> list[str]:
    """Told by one process: the others need not read all weights as well."""
    hashes = FileHashCache(cache_dir / FILE_HASHES_NAME)
    return comm.run_on_main_and_broadcast(lambda: compute_component_fingerprints(family, model, parts, hashes))


def _list_model_options(model: ModelConfig) -> list[str]:
    """Options of the model that somebody set, but for those of which it is known that captions are the same with them.

    So an option that comes later is not forgotten here.
    """
    names = [field.name for field in fields(ModelConfig) if field.name not in MODEL_OPTIONS_WITHOUT_TEXT_EFFECT]
    defaults = ModelConfig()
    return [f"{name}={getattr(model, name)!r}" for name in names if getattr(model, name) != getattr(defaults, name)]


@contextmanager
def _open_cache_dirs(
    config: RunConfig, comm: Communicator, prepared: PreparedData, *, to_disk: bool
) -> Iterator[list[Path]]:
    """For each sample the folder that what is made of it goes to.

    One that is for this run only is emptied on leaving: who has opened the files in it can still read them.
    """
    if to_disk:
        yield resolve_cache_dirs(prepared.merge_validation().manifest, config.cache)
        return
    folder = get_temporary_cache_dir(config.cache, comm.all_gather_object(secrets.token_hex(4))[0])
    try:
        yield [folder] * len(prepared.merge_validation().manifest.samples)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():  # Windows keeps files that somebody reads
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _open_store(store: CacheStore, comm: Communicator, *, to_disk: bool) -> None:
    store.open_all_shards()
    if not to_disk:
        comm.barrier()  # nobody takes the files away before all have opened them


def _remove_failed_images(prepared: PreparedData, failures: dict[int, str], config: RunConfig) -> PreparedData:
    """Leave the pictures out, or stop, as ``--on_invalid_images`` says."""
    lines = list(failures.values())
    if config.data.on_invalid_images == "fail":
        raise ConfigError(
            [
                *lines,
                f"{len(lines)} pictures cannot be encoded; mend or remove them, or leave them out"
                " with --on_invalid_images skip",
            ]
        )
    for line in lines:
        logger.warning("%s; it is left out", line)
    return prepared.remove_samples(frozenset(failures))


def _suggest_fewer_captions(prepared: PreparedData, option: str) -> str:
    """What makes so many of them, and where it is set."""
    subsets = [subset for dataset in prepared.manifest.datasets for subset in dataset.subsets]
    keys = list(
        dict.fromkeys(
            f"{key} ({subset.locate(key)})" for subset in subsets for key in find_varying_caption_keys(subset)
        )
    )
    fewer = f"there are fewer of them without {', '.join(keys[:MAX_KEYS_SHOWN])}; else " if keys else ""
    return (
        f"{fewer}make room, name another folder with --cache_dir, or encode captions as they are used: take"
        f" --{option} out"
    )


def _compute_area(size: tuple[int, int]) -> int:
    return size[0] * size[1]
