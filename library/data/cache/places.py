"""In which folders a run keeps what it computes: beside the pictures, in one that was named, or for this run only."""

import shutil
import tempfile
from pathlib import Path

from ...config.schema import CacheConfig
from ...durable import why_not_writable
from ...errors import UserError
from ..manifest import Manifest

FOLDER = ".cache-lorikeet"
"""In a folder of pictures; hidden, so that no search for pictures enters it."""
LATENTS, TEXTS = "latents", "texts"


def homes(manifest: Manifest, config: CacheConfig) -> list[Path]:
    """Where what belongs to each sample is kept on disk: beside its folder's pictures, unless a folder is named."""
    of_subset: dict[tuple[int, int], Path] = {}
    for sample in manifest.samples:
        place = (sample.dataset, sample.subset)
        if place not in of_subset:
            subset = manifest.datasets[sample.dataset].subsets[sample.subset]
            metadata = subset.metadata()
            home = subset.folder() or (metadata.parent if metadata is not None else sample.image.folder)
            named = None if config.cache_dir is None else Path(config.cache_dir).expanduser()
            of_subset[place] = subset.cache_folder() or named or (home if home.is_dir() else home.parent) / FOLDER
    return [of_subset[sample.dataset, sample.subset] for sample in manifest.samples]


def temporary(config: CacheConfig, token: str) -> Path:
    """A folder for one run; it is emptied as soon as all processes have opened what is in it."""
    base = Path(config.cache_dir).expanduser() if config.cache_dir is not None else Path(tempfile.gettempdir())
    return base / f"lorikeet-{token}"


def check_writable(folder: Path, option: str) -> None:
    """``UserError`` when nothing can be written into ``folder``, which is made if need be."""
    if why := why_not_writable(folder):
        raise UserError(f"--{option}: {folder} cannot be written to: {why}; name another folder with --cache_dir")


def check_room(folder: Path, wanted: int, what: str, way_out: str) -> None:
    """``UserError`` when ``wanted`` bytes do not fit on the disk that ``folder`` is on."""
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise UserError(f"{what} need about {size_of(wanted)}, and {size_of(free)} are free in {folder}; {way_out}")


def size_of(count: float) -> str:
    """A number of bytes for people: ``1.4 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
