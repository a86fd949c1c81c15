"""In which folder is kept what was found out about a picture: that which its subset is about."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..dataset.schema import DatasetConfig
from .files import FoundPicture
from .origin import Origin


class Homes:
    """The folders of the subsets of a run."""

    def __init__(self, datasets: Sequence[DatasetConfig], cache_dir: Path | None):
        """``cache_dir`` is for those that have no folder of their own for what is kept."""
        self.datasets, self._cache_dir = datasets, cache_dir
        self.found: dict[tuple[int, int], Path] = {}
        self._own: dict[Path, Path] = {}

    def of(self, item: FoundPicture) -> Path:
        """By its real path: one folder by two ways is one, or the two would take turns in writing one store."""
        place = (item.dataset, item.subset)
        if place not in self.found:
            subset = self.datasets[item.dataset].subsets[item.subset]
            metadata = subset.metadata()
            home = subset.folder() or (metadata.parent if metadata is not None else item.image.folder)
            self.found[place] = Path(os.path.realpath(home if home.is_dir() else home.parent))
            if (own := subset.cache_folder()) is not None:
                self._own.setdefault(self.found[place], own)
        return self.found[place]

    def cache_dir(self, home: Path) -> Path | None:
        """The folder in which something else than the home itself keeps what is known of it."""
        return self._own.get(home, self._cache_dir)

    def sorted(self, items: Iterable[FoundPicture]) -> dict[Path, dict[Origin, None]]:
        """Every picture once below its home, in order."""
        by_home: dict[Path, dict[Origin, None]] = {}
        for item in items:
            by_home.setdefault(self.of(item), {})[item.image] = None
        return by_home
