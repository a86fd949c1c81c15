"""Directories of the caches: next to the images, in ``--cache_dir``, or a temporary one; and the space they need."""

import shutil
import tempfile
from pathlib import Path

from ..atomic_files import find_write_error
from ..config.schema_data import CacheConfig
from ..dataloader.manifest import Manifest
from ..dataset.scan_cache import get_cache_folder
from ..errors import UserError
from ..problems import Problem
from ..storage.remote_path import is_remote

LATENTS_DIR_NAME, TEXTS_DIR_NAME = "latents", "texts"
TEMPORARY_FINGERPRINT = ""
"""Encoder fingerprint in the keys of a cache that only this run uses."""


def resolve_cache_dirs(manifest: Manifest, config: CacheConfig) -> list[Path]:
    """Return the cache directory of each sample: its subset's, ``--cache_dir``, or one next to the subset's images."""
    cache_dir = None if config.cache_dir is None else Path(config.cache_dir).expanduser()
    by_subset: dict[tuple[int, int], Path] = {}
    for sample in manifest.samples:
        key = sample.dataset_index, sample.subset_index
        if key not in by_subset:
            subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
            metadata = subset.resolve_metadata_file()
            images = subset.resolve_image_dir() or (metadata.parent if metadata is not None else sample.image.folder)
            default = get_cache_folder(images if is_remote(images) or images.is_dir() else images.parent)
            by_subset[key] = subset.resolve_cache_directory() or cache_dir or default
    return [by_subset[sample.dataset_index, sample.subset_index] for sample in manifest.samples]


def get_temporary_cache_dir(config: CacheConfig, run_token: str) -> Path:
    """Return the directory of caches that only this run uses; it is deleted once all ranks have opened the files."""
    base = Path(config.cache_dir).expanduser() if config.cache_dir is not None else Path(tempfile.gettempdir())
    return base / f"lorikeet-{run_token}"


def check_writable(directory: Path, option: str) -> None:
    """Raise ``UserError`` if no file can be created in ``directory``, which is created if missing."""
    if reason := find_write_error(directory):
        raise UserError(
            Problem(option, f"{directory} is not writable: {reason}", "set another directory with --cache_dir")
        )


def check_disk_space(directory: Path, num_bytes: int, description: str, hint: str) -> None:
    """Raise ``UserError`` if ``num_bytes`` do not fit on the disk of ``directory``."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        needed, available = format_bytes(num_bytes), format_bytes(free)
        raise UserError(f"{description}: about {needed} needed, {available} free in {directory}; {hint}")


def format_bytes(num_bytes: float) -> str:
    """Format a size: ``1.4 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
