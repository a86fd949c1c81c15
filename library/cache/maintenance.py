"""Making a cache smaller: what nobody wants is left behind when the rest of a writer's files moves into new ones."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..config import RunConfig
from ..config.schema_distributed import DeepSpeedConfig, ParallelConfig, ShardingConfig
from ..data.prepare import prepare_data
from ..data.prompts import load_prompts
from ..data.run_plan import RunPlan
from ..distributed.communicator import Communicator
from ..models.base import Family
from ..models.detect import detect_model
from ..models.families import FAMILIES
from ..parallel.strategy import Strategy
from ..parallel.strategy_registry import build_strategy
from .build import CacheEncoder, CacheSpec, fill_cache
from .encode import EncoderLoader
from .keys import KeyArray, get_key_bytes
from .paths import format_bytes, resolve_cache_dirs
from .precompute import (
    build_latent_cache_spec,
    build_text_cache_spec,
    compute_text_encoder_fingerprint,
    compute_vae_fingerprint,
)
from .store import CacheStore, RowIndices
from .writer import CacheWriter, get_index_path

MIN_IDLE_SECONDS = 60.0
"""Files that changed later than this long ago may still be written to, and are left alone."""


@dataclass(frozen=True)
class WriterFiles:
    """The files of one writer, and which of its entries stay."""

    directory: Path
    writer_id: int
    files: tuple[Path, ...]
    num_bytes: int  # of the files
    num_entries: int  # damaged ones among them
    needed_rows: RowIndices
    is_busy: bool
    tombstoned_writers: frozenset[int]  # other writers, whose damaged entries would be believed again without this one

    @property
    def has_unneeded_entries(self) -> bool:
        """Whether something in it is not wanted."""
        return len(self.needed_rows) < self.num_entries or not self.num_entries


def list_writer_files(store: CacheStore, needed_keys: KeyArray) -> list[WriterFiles]:
    """Each writer's files, with the entries that are found by a wanted key; of several copies one stays."""
    rows = store.find_rows(np.unique(needed_keys))
    stays = np.zeros(len(store), np.bool_)
    stays[rows[rows >= 0]] = True
    found = []
    for writer, index in store.get_index_files().items():
        mine = np.flatnonzero(store.entries["writer"] == np.uint64(writer))
        files = tuple(sorted(index.directory.glob(f"{writer:016x}*")))
        found.append(
            WriterFiles(
                index.directory,
                writer,
                files,
                _sum_file_sizes(files),
                index.num_entries,
                mine[stays[mine]],
                _is_recently_modified(files),
                index.tombstoned_writers,
            )
        )
    return found


def select_prunable_files(writer_files: Sequence[WriterFiles]) -> list[WriterFiles]:
    """Those that ``prune`` may be given, in this order: damaged entries go before what says that they are damaged."""
    there = {bulk.writer_id for bulk in writer_files}
    waiting = [bulk for bulk in writer_files if bulk.has_unneeded_entries and not bulk.is_busy]
    ordered: list[WriterFiles] = []
    while ready := [bulk for bulk in waiting if not (bulk.tombstoned_writers - {bulk.writer_id}) & there]:
        ordered += ready
        there -= {bulk.writer_id for bulk in ready}
        waiting = [bulk for bulk in waiting if bulk.writer_id in there]
    return ordered


def find_orphan_files(store: CacheStore) -> list[Path]:
    """Files of writers that were ended before they announced anything, and marks that somebody left behind."""
    known = {f"{writer:016x}" for writer in store.get_index_files()}
    paths = [path for folder in store.directories if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    left = [
        path
        for path in paths
        if path.name.startswith((".here-", ".writable-"))
        or (path.suffix == ".shard" and path.name.partition("-")[0] not in known)
    ]
    return [path for path in left if not _is_recently_modified([path])]


def prune_writer_files(store: CacheStore, files: WriterFiles) -> None:
    """Move the entries that stay, then remove the writer's files; whoever reads them goes on reading."""
    with CacheWriter(files.directory) as writer:
        for row in files.needed_rows.tolist():
            if store.is_intact(row):
                key = get_key_bytes(store.entries["key"][row])
                writer.put_serialized(key, store.read_blob(row).tobytes(), store.read_name(row))
    index = get_index_path(files.directory, files.writer_id)
    for path in (index, *(path for path in files.files if path != index)):
        path.unlink(missing_ok=True)


def _sum_file_sizes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _is_recently_modified(files: Iterable[Path]) -> bool:
    return any(time.time() - path.stat().st_mtime < MIN_IDLE_SECONDS for path in files)


MAX_NAMES_SHOWN = 20


@dataclass(frozen=True)
class RunCaches:
    """The caches of a run, and who fills them."""

    comm: Communicator
    caches: tuple[tuple[CacheSpec, CacheEncoder], ...]
    verify_existing: bool


@contextmanager
def open_run_caches(config: RunConfig) -> Iterator[RunCaches]:
    """What the run of these settings would keep; nothing is encoded yet.

    However many processes there are now, and however the run is going to spread its model: encoders are whole.
    """
    whole = replace(config, sharding=ShardingConfig(), parallel=ParallelConfig(), deepspeed=DeepSpeedConfig())
    strategy = build_strategy(whole)
    with strategy.comm.process_group_scope(), closing(strategy):
        yield RunCaches(strategy.comm, tuple(_build_caches(config, strategy)), not config.cache.skip_cache_check)


def build_caches(caches: RunCaches) -> tuple[str, int]:
    """Make what is missing or damaged."""
    return _fill_caches(caches, verify_existing=caches.verify_existing)


def repair_caches(caches: RunCaches) -> tuple[str, int]:
    """Drop everything that is damaged, needed or not, then make what is missing."""
    said, _ = verify_caches(caches)
    for shelf, _ in caches.caches:
        store = CacheStore(_list_directories(shelf))
        for row in store.find_damaged(range(len(store))) if caches.comm.is_main else []:
            with CacheWriter(store.get_directory(row)) as writer:
                writer.drop(store.entries[[row]])
    caches.comm.barrier()
    made, code = _fill_caches(caches, verify_existing=False)
    return f"{said}\n{made}", code


def verify_caches(caches: RunCaches) -> tuple[str, int]:
    """Read everything, and name what is not as it was written."""
    lines, count = [], 0
    for shelf, _ in caches.caches:
        store = CacheStore(_list_directories(shelf))
        damaged = store.find_damaged(range(len(store)))
        count += len(damaged)
        lines.append(
            f"{shelf.name}: {len(store)} entries read, {len(damaged)} damaged; {_format_coverage(store, shelf)}"
        )
        lines += [f"  damaged: {store.read_name(row)}" for row in damaged[:MAX_NAMES_SHOWN]]
        lines += [f"  and {len(damaged) - MAX_NAMES_SHOWN} more"] if len(damaged) > MAX_NAMES_SHOWN else []
    if count:
        lines.append("`python -m library cache repair` makes them anew, and so does the next training")
    return "\n".join(lines), int(count > 0)


def summarize_caches(caches: RunCaches) -> tuple[str, int]:
    """What is there."""
    lines = []
    for shelf, _ in caches.caches:
        store = CacheStore(_list_directories(shelf))
        lines.append(f"{shelf.name}: {_format_coverage(store, shelf)}")
        for folder in store.directories:
            mine = [bulk for bulk in list_writer_files(store, shelf.keys) if bulk.directory == folder]
            entries, size = sum(bulk.num_entries for bulk in mine), sum(bulk.num_bytes for bulk in mine)
            needed = sum(len(bulk.needed_rows) for bulk in mine)
            files = sum(len(bulk.files) for bulk in mine)
            lines.append(
                f"  {folder}: {entries} entries, {needed} of them wanted, {format_bytes(size)} in {files} files"
            )
    return "\n".join(lines), 0


def prune_caches(caches: RunCaches, *, is_confirmed: bool) -> tuple[str, int]:
    """Remove what is not wanted, or say what would be removed."""
    lines: list[str] = []
    count = 0
    for shelf, _ in caches.caches if caches.comm.is_main else ():
        store = CacheStore(_list_directories(shelf))
        found = list_writer_files(store, shelf.keys)
        ready = select_prunable_files(found)
        left = find_orphan_files(store)
        count += len(ready) + len(left)
        lines += [_format_pruned(shelf, store, bulk) for bulk in ready]
        lines += [f"{path}: left behind, {format_bytes(path.stat().st_size)}" for path in left]
        lines += [
            f"{bulk.directory}: {bulk.num_entries - len(bulk.needed_rows)} of {bulk.num_entries} {shelf.name} not wanted, and left"
            f" alone: somebody wrote to their files less than {MIN_IDLE_SECONDS:.0f} seconds ago"
            for bulk in found
            if bulk.has_unneeded_entries and bulk.is_busy
        ]
        if is_confirmed:
            for bulk in ready:
                prune_writer_files(store, bulk)
            for path in left:
                path.unlink(missing_ok=True)
    if not lines:
        return "there is nothing that is not wanted", 0
    if count:
        lines.append("removed" if is_confirmed else "nothing was removed; add --yes to remove it")
    else:
        lines.append("nothing was removed; try again in a minute")
    return "\n".join(lines), 0


def _format_pruned(spec: CacheSpec, store: CacheStore, files: WriterFiles) -> str:
    stay = store.entries[files.needed_rows]
    size = files.num_bytes - int((stay["length"] + stay["name_length"]).sum())
    return f"{files.directory}: {files.num_entries - len(files.needed_rows)} of {files.num_entries} {spec.name} not wanted, {format_bytes(size)}"


def _fill_caches(caches: RunCaches, *, verify_existing: bool) -> tuple[str, int]:
    lines, code = [], 0
    for shelf, maker in caches.caches:
        store, bad = fill_cache(caches.comm, shelf, maker, verify_existing=verify_existing)
        lines.append(f"{shelf.name}: {_format_coverage(store, shelf)}")
        lines += [f"  {why}" for why in dict.fromkeys(bad.values())]
        code |= bool(bad)
    return "\n".join(lines), int(code)


def _format_coverage(store: CacheStore, spec: CacheSpec) -> str:
    keys = np.unique(spec.keys)
    return f"{int((store.find_rows(keys) >= 0).sum())} of {len(keys)} wanted are there"


def _list_directories(spec: CacheSpec) -> list[Path]:
    return list(dict.fromkeys(spec.directories))


def _build_caches(config: RunConfig, strategy: Strategy) -> Iterator[tuple[CacheSpec, CacheEncoder]]:
    model = detect_model(config.model)
    family: Family = FAMILIES.get(model.family)(config.model)
    prepared = prepare_data(config.data, model.size_multiple, config.cache.cache_dir)
    bases = resolve_cache_dirs(prepared.merge_validation().manifest, config.cache)
    kitchen = EncoderLoader(strategy, family, model, config.cache)
    if config.cache.caches_latents:
        encoder = compute_vae_fingerprint(config, strategy, family, model, bases[0])
        yield build_latent_cache_spec(config, kitchen, prepared, bases, encoder)
    if config.cache.caches_text_outputs:
        plan = RunPlan.from_config(
            prepared.build_batch_plan(strategy.data_parallel_size, config.train), config.train, config.optim
        )
        prompts = load_prompts(Path(config.preview.sample_prompts)) if config.preview.sample_prompts else []
        encoder = compute_text_encoder_fingerprint(config, strategy, family, model, bases[0])
        yield build_text_cache_spec(config, kitchen, prepared, plan, prompts, bases, encoder)
