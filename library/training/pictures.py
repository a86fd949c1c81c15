"""The pictures of a run, looked at once on each machine, and the same on every process."""

from ..config import RunConfig
from ..data.prepare import PreparedData, prepare_data
from ..distributed.strategy import Strategy


def prepare_dataset(config: RunConfig, strategy: Strategy, pixel_step: int) -> PreparedData:
    """One process of each machine looks at the pictures; the others read what it found out, beside the pictures."""
    prepared = strategy.run_local_main_first(lambda: prepare_data(config.data, pixel_step, config.cache.cache_dir))
    strategy.assert_equal_across_ranks({
        "number of pictures": len(prepared.manifest.samples),
        "pictures, captions or dataset settings": prepared.manifest.compute_fingerprint(),
    })  # fmt: skip
    return prepared
