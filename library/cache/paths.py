"""In which folders a run keeps what it computes: beside the pictures, in one that was named, or for this run only."""

import shutil
import tempfile
from pathlib import Path

from ..atomic_files import find_write_error
from ..config.schema_data import CacheConfig
from ..data.manifest import Manifest
from ..errors import UserError

CACHE_DIR_NAME = ".cache-lorikeet"
"""In a folder of pictures; hidden, so that no search for pictures enters it."""


LATENTS_DIR_NAME, TEXTS_DIR_NAME = "latents", "texts"


def resolve_cache_dirs(manifest: Manifest, config: CacheConfig) -> list[Path]:
    """Where what belongs to each sample is kept on disk: beside its folder's pictures, unless a folder is named."""
    of_subset: dict[tuple[int, int], Path] = {}
    for sample in manifest.samples:
        place = (sample.dataset_index, sample.subset_index)
        if place not in of_subset:
            subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
            metadata = subset.resolve_metadata_file()
            home = subset.resolve_image_dir() or (metadata.parent if metadata is not None else sample.image.folder)
            named = None if config.cache_dir is None else Path(config.cache_dir).expanduser()
            of_subset[place] = (
                subset.resolve_cache_directory() or named or (home if home.is_dir() else home.parent) / CACHE_DIR_NAME
            )
    return [of_subset[sample.dataset_index, sample.subset_index] for sample in manifest.samples]


def get_temporary_cache_dir(config: CacheConfig, run_token: str) -> Path:
    """A folder for one run; it is emptied as soon as all processes have opened what is in it."""
    base = Path(config.cache_dir).expanduser() if config.cache_dir is not None else Path(tempfile.gettempdir())
    return base / f"lorikeet-{run_token}"


def check_writable(directory: Path, option: str) -> None:
    """``UserError`` when nothing can be written into ``folder``, which is made if need be."""
    if why := find_write_error(directory):
        raise UserError(f"--{option}: {directory} cannot be written to: {why}; name another folder with --cache_dir")


def check_disk_space(directory: Path, num_bytes: int, description: str, hint: str) -> None:
    """``UserError`` when ``wanted`` bytes do not fit on the disk that ``folder`` is on."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise UserError(
            f"{description} need about {format_bytes(num_bytes)}, and {format_bytes(free)} are free in {directory}; {hint}"
        )


def format_bytes(num_bytes: float) -> str:
    """A number of bytes for people: ``1.4 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
