"""What cannot be kept, told while the settings are read."""

from collections.abc import Iterable, Iterator

from ...config.schema import CacheConfig
from ...dataset.schema import DatasetConfig

_RANDOM_AUGMENTATIONS = {"random_crop": "cut in another place", "color_aug": "given other colours"}
"""Keys of a subset by which a picture is another one each time; both ways round of flip_aug are kept."""


def validate_latent_caching(datasets: Iterable[DatasetConfig], cache: CacheConfig) -> Iterator[str]:
    """Pictures that are not the same each time have no latents that could be kept."""
    if not cache.caches_latents:
        return
    option = "cache_latents_to_disk" if cache.cache_latents_to_disk else "cache_latents"
    for dataset in datasets:
        for subset in dataset.subsets:
            for key, what in _RANDOM_AUGMENTATIONS.items():
                if getattr(subset, key):
                    yield (f"{subset.locate(key)}: {key}: pictures are {what} each time, and {option} keeps one way;"
                           f" take out {key} or {option}")  # fmt: skip
