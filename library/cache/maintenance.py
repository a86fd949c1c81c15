"""Build, verify, repair, prune and summarize the caches of a run: what ``python -m library cache`` does."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..config import RunConfig
from ..config.schema_distributed import DeepSpeedConfig, ParallelConfig, ShardingConfig
from ..dataloader.prepare import PreparedData, prepare_data
from ..dataloader.run_plan import RunPlan
from ..dataloader.sample_prompts import load_preview_prompts
from ..distributed.communicator import Communicator
from ..models.base import Family
from ..models.detect import build_control_limits, detect_model
from ..models.families import FAMILIES
from ..models.trained_components import list_cached_text_components
from ..parallel.strategy_registry import build_strategy
from .distributed_encoding import CacheEncoder, CacheSpec, fill_cache
from .frozen_encoders import FrozenEncoders
from .keys import KeyArray, get_key_bytes
from .latent_cache import build_latent_cache, compute_vae_fingerprint
from .paths import format_bytes, resolve_cache_dirs
from .store import CacheStore, RowIndices
from .text_encoder_cache import build_text_cache, compute_text_encoder_fingerprint
from .writer import CacheWriter, get_index_path

MIN_IDLE_SECONDS = 60.0
"""Files that changed less than this long ago may still be written to, and are kept."""

MAX_NAMES_SHOWN = 20


@dataclass(frozen=True)
class WriterFiles:
    """The files of one writer, and which of its entries are needed."""

    directory: Path
    writer_id: int
    files: tuple[Path, ...]
    num_bytes: int
    num_entries: int  # damaged ones included
    needed_rows: RowIndices
    is_busy: bool
    tombstoned_writers: frozenset[int]  # writers whose damaged entries are valid again if this one's files go first

    @property
    def num_unneeded(self) -> int:
        """Entries that can be removed."""
        return self.num_entries - len(self.needed_rows)

    @property
    def has_unneeded_entries(self) -> bool:
        """Whether there is something to remove, be it only empty files."""
        return self.num_unneeded > 0 or not self.num_entries


def list_writer_files(store: CacheStore, needed_keys: KeyArray) -> list[WriterFiles]:
    """List each writer's files; of several entries with one needed key, one is needed."""
    rows = store.find_rows(np.unique(needed_keys))
    is_needed = np.zeros(len(store), np.bool_)
    is_needed[rows[rows >= 0]] = True
    found = []
    for writer_id, index in store.get_index_files().items():
        own = np.flatnonzero(store.entries["writer"] == np.uint64(writer_id))
        files = tuple(sorted(index.directory.glob(f"{writer_id:016x}*")))
        num_bytes = sum(path.stat().st_size for path in files)
        is_busy, tombstoned = _is_recently_modified(files), index.tombstoned_writers
        needed = own[is_needed[own]]
        found.append(
            WriterFiles(
                directory=index.directory,
                writer_id=writer_id,
                files=files,
                num_bytes=num_bytes,
                num_entries=index.num_entries,
                needed_rows=needed,
                is_busy=is_busy,
                tombstoned_writers=tombstoned,
            )
        )
    return found


def select_prunable_files(writer_files: Sequence[WriterFiles]) -> list[WriterFiles]:
    """Select files for ``prune_writer_files``, in this order: damaged entries go before their tombstones."""
    remaining = {item.writer_id for item in writer_files}
    waiting = [item for item in writer_files if item.has_unneeded_entries and not item.is_busy]
    ordered: list[WriterFiles] = []
    while ready := [item for item in waiting if not (item.tombstoned_writers - {item.writer_id}) & remaining]:
        ordered += ready
        remaining -= {item.writer_id for item in ready}
        waiting = [item for item in waiting if item.writer_id in remaining]
    return ordered


def find_orphan_files(store: CacheStore) -> list[Path]:
    """Find shards of writers that were killed before they wrote an index, and leftover marker files."""
    known = {f"{writer_id:016x}" for writer_id in store.get_index_files()}
    paths = [path for folder in store.directories if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    orphans = [
        path
        for path in paths
        if path.name.startswith((".here-", ".writable-"))
        or (path.suffix == ".shard" and path.name.partition("-")[0] not in known)
    ]
    return [path for path in orphans if not _is_recently_modified([path])]


def prune_writer_files(store: CacheStore, files: WriterFiles) -> list[Path]:
    """Copy the needed entries to new files, then delete the old ones; return those that the system does not delete.

    Processes that have them open can go on.  Windows deletes no file that another process has open or mapped; it is
    an orphan then, which is deleted the next time.
    """
    with CacheWriter(files.directory) as writer:
        for row in files.needed_rows.tolist():
            if store.is_intact(row):
                key = get_key_bytes(store.entries["key"][row])
                writer.put_serialized(key, store.read_blob(row).tobytes(), store.read_name(row))
    store.close_shards(files.writer_id)
    index = get_index_path(files.directory, files.writer_id)
    return _delete_files((index, *(path for path in files.files if path != index)))


def _delete_files(paths: Iterable[Path]) -> list[Path]:
    """Delete files; return those that are in use elsewhere."""
    kept = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except PermissionError:
            kept.append(path)
    return kept


def _is_recently_modified(files: Iterable[Path]) -> bool:
    return any(time.time() - path.stat().st_mtime < MIN_IDLE_SECONDS for path in files)


@dataclass(frozen=True)
class RunCaches:
    """The caches of a run, and the encoder of each."""

    comm: Communicator
    caches: tuple[tuple[CacheSpec, CacheEncoder], ...]
    verify_existing: bool


@contextmanager
def open_run_caches(config: RunConfig) -> Iterator[RunCaches]:
    """Yield the caches that a run with these settings uses; nothing is encoded yet.

    The run's sharding is ignored: encoders are never sharded.
    """
    unsharded = replace(config, sharding=ShardingConfig(), parallel=ParallelConfig(), deepspeed=DeepSpeedConfig())
    strategy = build_strategy(unsharded)
    with strategy.comm.process_group_scope(), closing(strategy):
        model = detect_model(config.model)
        family: Family = FAMILIES.get(model.family)(config.model)
        prepared = prepare_data(
            config.data,
            model.size_multiple,
            config.cache.cache_dir,
            control_limits=build_control_limits(model),
            max_side=model.max_side,
            frame_rule=family.frame_rule,
        )
        text_components = list_cached_text_components(config.adapter, config.optim, family.facts)
        encoders = FrozenEncoders(
            strategy=strategy,
            family=family,
            model=model,
            model_config=config.model,
            cache=config.cache,
            text_components=text_components,
        )
        has_latents = config.cache.caches_latents and not prepared.slider_prompts
        caches = [_build_latent_cache(encoders, prepared)] if has_latents else []
        if config.cache.caches_text_outputs:
            batch_plan = prepared.build_batch_plan(strategy.data_parallel_size, config.train)
            run_plan = RunPlan.from_config(batch_plan, config.train, config.optim)
            prompts, directories = load_preview_prompts(config.preview), _list_sample_dirs(encoders, prepared)
            fingerprint = compute_text_encoder_fingerprint(encoders, directories[0])
            caches.append(
                build_text_cache(
                    encoders,
                    prepared,
                    run_plan,
                    config.preservation,
                    prompts=prompts,
                    cache_dirs=directories,
                    encoder_fingerprint=fingerprint,
                )
            )
        yield RunCaches(strategy.comm, tuple(caches), not config.cache.skip_cache_check)


def _build_latent_cache(encoders: FrozenEncoders, prepared: PreparedData) -> tuple[CacheSpec, CacheEncoder]:
    directories = _list_sample_dirs(encoders, prepared)
    return build_latent_cache(encoders, prepared, directories, compute_vae_fingerprint(encoders, directories[0]))


def _list_sample_dirs(encoders: FrozenEncoders, prepared: PreparedData) -> list[Path]:
    return resolve_cache_dirs(prepared.merge_validation().manifest, encoders.cache)


def build_caches(caches: RunCaches) -> tuple[str, int]:
    """Encode what is missing or damaged; return a message and an exit code, as all functions below."""
    return _fill_caches(caches, verify_existing=caches.verify_existing)


def repair_caches(caches: RunCaches) -> tuple[str, int]:
    """Drop every damaged entry, needed or not, then encode what is missing."""
    report, _ = verify_caches(caches)
    for spec, _ in caches.caches:
        store = CacheStore(spec.unique_directories)
        for row in store.find_damaged(range(len(store))) if caches.comm.is_main else []:
            with CacheWriter(store.get_directory(row)) as writer:
                writer.drop(store.entries[[row]])
    caches.comm.barrier()
    coverage, code = _fill_caches(caches, verify_existing=False)
    return f"{report}\n{coverage}", code


def verify_caches(caches: RunCaches) -> tuple[str, int]:
    """Read every entry and list the damaged ones."""
    lines, count = [], 0
    for spec, _ in caches.caches:
        store = CacheStore(spec.unique_directories)
        damaged = store.find_damaged(range(len(store)))
        count += len(damaged)
        lines.append(f"{spec.name}: {len(store)} entries, {len(damaged)} damaged; {_format_coverage(store, spec)}")
        lines += [f"  damaged: {store.read_name(row)}" for row in damaged[:MAX_NAMES_SHOWN]]
        lines += [f"  and {len(damaged) - MAX_NAMES_SHOWN} more"] if len(damaged) > MAX_NAMES_SHOWN else []
    if count:
        lines.append(
            "`python -m library cache repair` encodes damaged entries again, and so does the next training run"
        )
    return "\n".join(lines), int(count > 0)


def summarize_caches(caches: RunCaches) -> tuple[str, int]:
    """Count entries, files and bytes."""
    lines = []
    for spec, _ in caches.caches:
        store = CacheStore(spec.unique_directories)
        lines.append(f"{spec.name}: {_format_coverage(store, spec)}")
        all_files = list_writer_files(store, spec.keys)
        for directory in store.directories:
            own = [item for item in all_files if item.directory == directory]
            entries, needed = sum(item.num_entries for item in own), sum(len(item.needed_rows) for item in own)
            num_files, num_bytes = sum(len(item.files) for item in own), sum(item.num_bytes for item in own)
            size = f"{format_bytes(num_bytes)} in {num_files} files"
            lines.append(f"  {directory}: {entries} entries, {needed} of them needed, {size}")
    return "\n".join(lines), 0


def prune_caches(caches: RunCaches, *, is_confirmed: bool) -> tuple[str, int]:
    """Remove what this run does not need, or list what would be removed."""
    lines: list[str] = []
    count = 0
    for spec, _ in caches.caches if caches.comm.is_main else ():
        store = CacheStore(spec.unique_directories)
        all_files = list_writer_files(store, spec.keys)
        prunable, orphans = select_prunable_files(all_files), find_orphan_files(store)
        count += len(prunable) + len(orphans)
        lines += [_format_pruned(spec, store, item) for item in prunable]
        lines += [f"{path}: orphaned file, {format_bytes(path.stat().st_size)}" for path in orphans]
        busy = [item for item in all_files if item.has_unneeded_entries and item.is_busy]
        lines += [f"{_format_unneeded(spec, item)}; kept, modified less than a minute ago" for item in busy]
        if is_confirmed:
            kept = [path for item in prunable for path in prune_writer_files(store, item)] + _delete_files(orphans)
            lines += [f"{path}: cannot be deleted, another process may use it; prune again later" for path in kept]
    if not lines:
        return "nothing to prune", 0
    if count:
        lines.append("removed" if is_confirmed else "nothing was removed; add --yes to remove it")
    else:
        lines.append("nothing was removed; try again in a minute")
    return "\n".join(lines), 0


def _format_unneeded(spec: CacheSpec, files: WriterFiles) -> str:
    return f"{files.directory}: {files.num_unneeded} of {files.num_entries} {spec.name} not needed"


def _format_pruned(spec: CacheSpec, store: CacheStore, files: WriterFiles) -> str:
    needed = store.entries[files.needed_rows]
    num_bytes = files.num_bytes - int((needed["length"] + needed["name_length"]).sum())
    return f"{_format_unneeded(spec, files)}, {format_bytes(num_bytes)}"


def _fill_caches(caches: RunCaches, *, verify_existing: bool) -> tuple[str, int]:
    lines, code = [], 0
    for spec, encoder in caches.caches:
        store, failures = fill_cache(caches.comm, spec, encoder, verify_existing=verify_existing)
        lines.append(f"{spec.name}: {_format_coverage(store, spec)}")
        lines += [f"  {reason}" for reason in dict.fromkeys(failures.values())]
        code |= bool(failures)
    return "\n".join(lines), int(code)


def _format_coverage(store: CacheStore, spec: CacheSpec) -> str:
    keys = np.unique(spec.keys)
    return f"{int((store.find_rows(keys) >= 0).sum())} of {len(keys)} cached"
