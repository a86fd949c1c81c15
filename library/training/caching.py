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
from ..data.cache.captions_shown import captions_of_run, changes
from ..data.cache.file_hashes import FileHashes
from ..data.cache.keys import fingerprint
from ..data.cache.latents import LatentReader
from ..data.cache.places import LATENTS, TEXTS, homes, temporary
from ..data.cache.store import Store
from ..data.cache.texts import TextReader
from ..data.cache.wanted import wanted_pictures, wanted_texts
from ..data.prepare import Prepared
from ..data.prompts import Prompt
from ..data.showing import Showing
from ..distributed.strategy import DataParallel
from ..errors import ConfigError
from ..families.base import Family
from ..families.detect import Detected, reader_of
from ..families.identity import identity
from .encoding import Kitchen, PictureMaker, TextMaker
from .keeping import Shelf, keep
from .plan import RunPlan
from .precision import DTYPES

logger = logging.getLogger(__name__)

HASHES = "files.json"
THIS_RUN = ""
"""Stands for the encoder of what is not kept any longer."""
SHOWN_KEYS = 3
WITHOUT_EFFECT_ON_TEXT = {
    "pretrained_model_name_or_path", "family", "v2", "vae", "clip_l", "clip_g", "t5xxl", "text_encoder", "ae",
    "tokenizer_cache_dir", "guidance_scale", "base_storage",
}  # fmt: skip
"""Where parts of a model are matters to nobody: what they are made of is looked at."""


@dataclass(frozen=True)
class Kept:
    """What was computed before training; nothing where it is computed as it is used."""

    latents: LatentReader | None
    texts: TextReader | None


def keep_latents(
    config: RunConfig, strategy: DataParallel, family: Family, model: Detected, prepared: Prepared
) -> tuple[Prepared, LatentReader | None]:
    """Encode what is missing, if latents are to be kept; pictures that cannot be encoded go the way of bad data."""
    cache = config.cache
    if not cache.latents:
        return prepared, None
    to_disk = cache.cache_latents_to_disk
    with _folders(config, strategy, prepared, to_disk=to_disk) as bases:
        encoder = latent_encoder(config, strategy, family, model, bases[0]) if to_disk else THIS_RUN
        kitchen = Kitchen(strategy, family, model, cache)
        shelf, maker = latents_to_keep(config, kitchen, prepared, bases, encoder)
        store, bad = keep(strategy, shelf, maker, check=to_disk and not cache.skip_cache_check)
        wanted = maker.wanted
        if bad:
            by_sample = {int(wanted.samples[number]): why for number, why in bad.items()}
            prepared = _without(prepared, by_sample, config)
            wanted = wanted_pictures(_still(prepared.whole()), encoder)
        _open(store, strategy, to_disk=to_disk)
        return prepared, LatentReader(store, wanted, len(prepared.whole().manifest.samples))


def keep_texts(
    config: RunConfig, strategy: DataParallel, family: Family, model: Detected, prepared: Prepared, plan: RunPlan,
    prompts: Sequence[Prompt],
) -> TextReader | None:  # fmt: skip
    """Encode every caption that the run will show, and the prompts of its previews, if texts are to be kept."""
    cache = config.cache
    if not cache.texts:
        return None
    to_disk = cache.cache_text_encoder_outputs_to_disk
    with _folders(config, strategy, prepared, to_disk=to_disk) as bases:
        encoder = text_encoder(config, strategy, family, model, bases[0]) if to_disk else THIS_RUN
        kitchen = Kitchen(strategy, family, model, cache)
        shelf, maker = texts_to_keep(config, kitchen, prepared, plan, prompts, bases, encoder)
        store, _ = keep(strategy, shelf, maker, check=to_disk and not cache.skip_cache_check)
        _open(store, strategy, to_disk=to_disk)
        return TextReader(store, encoder)


def latents_to_keep(config: RunConfig, kitchen: Kitchen, prepared: Prepared, bases: Sequence[Path],
                    encoder: str) -> tuple[Shelf, PictureMaker]:  # fmt: skip
    """The latents of all pictures, below the folder in ``bases`` of each, and who makes them."""
    prepared = prepared.whole()
    showing = _still(prepared)
    wanted = wanted_pictures(showing, encoder)
    option = "cache_latents_to_disk" if config.cache.cache_latents_to_disk else "cache_latents"
    shelf = Shelf(
        what="latents",
        unit="picture",
        option=option,
        keys=wanted.keys,
        folders=[bases[sample] / LATENTS for sample in wanted.samples],
        costs=[_area(prepared.placements[sample].bucket) for sample in wanted.samples],
        way_out="make room, name another folder with --cache_dir, halve it with --cache_precision fp16, or encode"
        f" pictures as they are used: take --{option} out",
    )
    return shelf, PictureMaker(kitchen, showing, wanted, config.data.max_data_loader_n_workers)


def texts_to_keep(
    config: RunConfig, kitchen: Kitchen, prepared: Prepared, plan: RunPlan, prompts: Sequence[Prompt],
    bases: Sequence[Path], encoder: str,
) -> tuple[Shelf, TextMaker]:  # fmt: skip
    """The captions of a run and the prompts of its previews, and who encodes them."""
    prepared = prepared.whole()
    showing = Showing(prepared.manifest, prepared.placements, config.train.seed, plan.steps)
    also = [text for prompt in prompts for text in (prompt.text, prompt.negative)]
    captions = captions_of_run(showing, plan.batches, plan.steps, also)
    logger.info("captions: %d different ones are shown in %d steps", len(captions), plan.steps)
    wanted = wanted_texts(captions, encoder)
    to_disk = config.cache.cache_text_encoder_outputs_to_disk
    option = "cache_text_encoder_outputs_to_disk" if to_disk else "cache_text_encoder_outputs"
    shelf = Shelf(
        what="captions",
        unit="caption",
        option=option,
        keys=wanted.keys,
        folders=[bases[owner] / TEXTS for owner in wanted.owners],
        costs=[1] * len(wanted),
        way_out=_fewer_captions(prepared, option),
    )
    return shelf, TextMaker(kitchen, wanted)


def latent_encoder(config: RunConfig, strategy: DataParallel, family: Family, model: Detected, base: Path) -> str:
    """A short text that stands for the VAE and all that decides what it makes of pixels."""
    made_of = _identity(strategy, family, model, ("vae",), base)
    return fingerprint(type(family).__name__, config.cache.cache_precision, *made_of)


def text_encoder(config: RunConfig, strategy: DataParallel, family: Family, model: Detected, base: Path) -> str:
    """A short text that stands for the text encoders and all that decides what they make of captions."""
    made_of = _identity(strategy, family, model, family.text_parts, base)
    # Models of one kind may read texts of different lengths, which their schedulers tell apart.
    scheduler = json.dumps(reader_of(model)("scheduler/scheduler_config.json"), sort_keys=True)
    precision = str(DTYPES[strategy.precision])
    return fingerprint(type(family).__name__, precision, scheduler, *_settings(config.model), *made_of)


def _identity(strategy: DataParallel, family: Family, model: Detected, parts: Sequence[str], base: Path) -> list[str]:
    """Told by one process: the others need not read all weights as well."""
    found: list[str] = []
    strategy.on_main(lambda: found.extend(identity(family, model, parts, FileHashes(base / HASHES))))
    return strategy.from_all(found)


def _settings(model: ModelConfig) -> list[str]:
    """Options of the model that somebody set, but for those of which it is known that captions are the same with them.

    So an option that comes later is not forgotten here.
    """
    names = [field.name for field in fields(ModelConfig) if field.name not in WITHOUT_EFFECT_ON_TEXT]
    defaults = ModelConfig()
    return [f"{name}={getattr(model, name)!r}" for name in names if getattr(model, name) != getattr(defaults, name)]


@contextmanager
def _folders(config: RunConfig, strategy: DataParallel, prepared: Prepared, *,
             to_disk: bool) -> Iterator[list[Path]]:  # fmt: skip
    """For each sample the folder that what is made of it goes to.

    One that is for this run only is emptied on leaving: who has opened the files in it can still read them.
    """
    if to_disk:
        yield homes(prepared.whole().manifest, config.cache)
        return
    folder = temporary(config.cache, strategy.from_all([secrets.token_hex(4)])[0])
    try:
        yield [folder] * len(prepared.whole().manifest.samples)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():  # Windows keeps files that somebody reads
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _open(store: Store, strategy: DataParallel, *, to_disk: bool) -> None:
    store.open_all()
    if not to_disk:
        strategy.from_all([None])  # nobody takes the files away before all have opened them


def _without(prepared: Prepared, bad: dict[int, str], config: RunConfig) -> Prepared:
    """Leave the pictures out, or stop, as ``--on_bad_data`` says."""
    lines = list(bad.values())
    if config.data.on_bad_data == "fail":
        raise ConfigError([*lines, f"{len(lines)} pictures cannot be encoded; mend or remove them, or leave them out"
                                   " with --on_bad_data skip"])  # fmt: skip
    for line in lines:
        logger.warning("%s; it is left out", line)
    return prepared.without(frozenset(bad))


def _fewer_captions(prepared: Prepared, option: str) -> str:
    """What makes so many of them, and where it is set."""
    subsets = [subset for dataset in prepared.manifest.datasets for subset in dataset.subsets]
    keys = list(dict.fromkeys(f"{key} ({subset.place(key)})" for subset in subsets for key in changes(subset)))
    fewer = f"there are fewer of them without {', '.join(keys[:SHOWN_KEYS])}; else " if keys else ""
    return (f"{fewer}make room, name another folder with --cache_dir, or encode captions as they are used: take"
            f" --{option} out")  # fmt: skip


def _still(prepared: Prepared) -> Showing:
    """The samples where nothing is drawn about how they are shown."""
    return Showing(prepared.manifest, prepared.placements, 0, 0)


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]
