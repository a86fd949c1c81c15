"""Looking after what is kept on disk: filling it, reading it through, mending it, making it smaller."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..config import RunConfig
from ..config.deepspeed_schema import DeepSpeedConfig
from ..config.parallel_schema import ParallelConfig
from ..config.sharding_schema import ShardingConfig
from ..data.cache.places import homes, size_of
from ..data.cache.pruning import SECONDS_OF_REST, Bulk, bulks, orphans, removable
from ..data.cache.pruning import prune as prune_bulk
from ..data.cache.store import Store
from ..data.cache.writer import Writer
from ..data.prepare import prepare
from ..data.prompts import read_prompts
from ..distributed.choice import strategy_of
from ..distributed.strategy import DataParallel
from ..families import FAMILIES
from ..families.base import Family
from ..families.detect import detect
from .caching import latent_encoder, latents_to_keep, text_encoder, texts_to_keep
from .encoding import Kitchen
from .keeping import Maker, Shelf, keep
from .plan import RunPlan

SHOWN_NAMES = 20


@dataclass(frozen=True)
class Care:
    """The caches of a run, and who fills them."""

    strategy: DataParallel
    shelves: tuple[tuple[Shelf, Maker], ...]
    is_checked: bool


@contextmanager
def opened(config: RunConfig) -> Iterator[Care]:
    """What the run of these settings would keep; nothing is encoded yet.

    However many processes there are now, and however the run is going to spread its model: encoders are whole.
    """
    whole = replace(config, sharding=ShardingConfig(), parallel=ParallelConfig(), deepspeed=DeepSpeedConfig())
    strategy = strategy_of(whole)
    with strategy.until_left():
        yield Care(strategy, tuple(_shelves(config, strategy)), not config.cache.skip_cache_check)


def build(care: Care) -> tuple[str, int]:
    """Make what is missing or damaged."""
    return _filled(care, check=care.is_checked)


def repair(care: Care) -> tuple[str, int]:
    """Drop everything that is damaged, needed or not, then make what is missing."""
    said, _ = verify(care)
    for shelf, _ in care.shelves:
        store = Store(_folders(shelf))
        for row in store.damaged(range(len(store))) if care.strategy.is_main else []:
            with Writer(store.folder_of(row)) as writer:
                writer.drop(store.entries[[row]])
    care.strategy.from_all([None])
    made, code = _filled(care, check=False)
    return f"{said}\n{made}", code


def verify(care: Care) -> tuple[str, int]:
    """Read everything, and name what is not as it was written."""
    lines, count = [], 0
    for shelf, _ in care.shelves:
        store = Store(_folders(shelf))
        damaged = store.damaged(range(len(store)))
        count += len(damaged)
        lines.append(f"{shelf.what}: {len(store)} entries read, {len(damaged)} damaged; {_wanted(store, shelf)}")
        lines += [f"  damaged: {store.name(row)}" for row in damaged[:SHOWN_NAMES]]
        lines += [f"  and {len(damaged) - SHOWN_NAMES} more"] if len(damaged) > SHOWN_NAMES else []
    if count:
        lines.append("`python -m library cache repair` makes them anew, and so does the next training")
    return "\n".join(lines), int(count > 0)


def info(care: Care) -> tuple[str, int]:
    """What is there."""
    lines = []
    for shelf, _ in care.shelves:
        store = Store(_folders(shelf))
        lines.append(f"{shelf.what}: {_wanted(store, shelf)}")
        for folder in store.folders:
            mine = [bulk for bulk in bulks(store, shelf.keys) if bulk.folder == folder]
            entries, size = sum(bulk.entries for bulk in mine), sum(bulk.size for bulk in mine)
            needed = sum(len(bulk.stay) for bulk in mine)
            files = sum(len(bulk.files) for bulk in mine)
            lines.append(f"  {folder}: {entries} entries, {needed} of them wanted, {size_of(size)} in {files} files")
    return "\n".join(lines), 0


def prune(care: Care, *, is_sure: bool) -> tuple[str, int]:
    """Remove what is not wanted, or say what would be removed."""
    lines: list[str] = []
    count = 0
    for shelf, _ in care.shelves if care.strategy.is_main else ():
        store = Store(_folders(shelf))
        found = bulks(store, shelf.keys)
        ready = removable(found)
        left = orphans(store)
        count += len(ready) + len(left)
        lines += [_pruned(shelf, store, bulk) for bulk in ready]
        lines += [f"{path}: left behind, {size_of(path.stat().st_size)}" for path in left]
        lines += [f"{bulk.folder}: {bulk.entries - len(bulk.stay)} of {bulk.entries} {shelf.what} not wanted, and left"
                  f" alone: somebody wrote to their files less than {SECONDS_OF_REST:.0f} seconds ago" for bulk in found
                  if bulk.is_wasteful and bulk.is_busy]  # fmt: skip
        if is_sure:
            for bulk in ready:
                prune_bulk(store, bulk)
            for path in left:
                path.unlink(missing_ok=True)
    if not lines:
        return "there is nothing that is not wanted", 0
    if count:
        lines.append("removed" if is_sure else "nothing was removed; add --yes to remove it")
    else:
        lines.append("nothing was removed; try again in a minute")
    return "\n".join(lines), 0


def _pruned(shelf: Shelf, store: Store, bulk: Bulk) -> str:
    stay = store.entries[bulk.stay]
    size = bulk.size - int((stay["length"] + stay["name_length"]).sum())
    return f"{bulk.folder}: {bulk.entries - len(bulk.stay)} of {bulk.entries} {shelf.what} not wanted, {size_of(size)}"


def _filled(care: Care, *, check: bool) -> tuple[str, int]:
    lines, code = [], 0
    for shelf, maker in care.shelves:
        store, bad = keep(care.strategy, shelf, maker, check=check)
        lines.append(f"{shelf.what}: {_wanted(store, shelf)}")
        lines += [f"  {why}" for why in dict.fromkeys(bad.values())]
        code |= bool(bad)
    return "\n".join(lines), int(code)


def _wanted(store: Store, shelf: Shelf) -> str:
    keys = np.unique(shelf.keys)
    return f"{int((store.find(keys) >= 0).sum())} of {len(keys)} wanted are there"


def _folders(shelf: Shelf) -> list[Path]:
    return list(dict.fromkeys(shelf.folders))


def _shelves(config: RunConfig, strategy: DataParallel) -> Iterator[tuple[Shelf, Maker]]:
    model = detect(config.model)
    family: Family = FAMILIES.get(model.family)(config.model)
    prepared = prepare(config.data, model.pixel_step, config.cache.cache_dir)
    bases = homes(prepared.whole().manifest, config.cache)
    kitchen = Kitchen(strategy, family, model, config.cache)
    if config.cache.latents:
        encoder = latent_encoder(config, strategy, family, model, bases[0])
        yield latents_to_keep(config, kitchen, prepared, bases, encoder)
    if config.cache.texts:
        plan = RunPlan.of(prepared.batch_plan(strategy.data_size, config.train), config.train, config.optim)
        prompts = read_prompts(Path(config.preview.sample_prompts)) if config.preview.sample_prompts else []
        encoder = text_encoder(config, strategy, family, model, bases[0])
        yield texts_to_keep(config, kitchen, prepared, plan, prompts, bases, encoder)
