"""The pictures of a run, looked at once on each machine, and the same on every process."""

from ..config import RunConfig
from ..data.prepare import Prepared, prepare
from ..distributed.strategy import DataParallel


def same_pictures(config: RunConfig, strategy: DataParallel, pixel_step: int) -> Prepared:
    """One process of each machine looks at the pictures; the others read what it found out, beside the pictures."""
    prepared = strategy.first_on_each_machine(lambda: prepare(config.data, pixel_step, config.cache.cache_dir))
    strategy.agree({
        "number of pictures": len(prepared.manifest.samples),
        "pictures, captions or dataset settings": prepared.manifest.fingerprint(),
    })  # fmt: skip
    return prepared
