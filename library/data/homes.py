"""In which folder is kept what was found out about a picture: that which its subset is about."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from .dataset_schema import DatasetConfig
from .files import FoundPicture
from .origin import Origin


class Homes:
    """The folders of the subsets of a run."""

    def __init__(self, datasets: Sequence[DatasetConfig]):
        self.datasets = datasets
        self.found: dict[tuple[int, int], Path] = {}

    def of(self, item: FoundPicture) -> Path:
        """By its real path: one folder by two ways is one, or the two would take turns in writing one store."""
        place = (item.dataset, item.subset)
        if place not in self.found:
            subset = self.datasets[item.dataset].subsets[item.subset]
            metadata = subset.metadata()
            home = subset.folder() or (metadata.parent if metadata is not None else item.image.folder)
            self.found[place] = Path(os.path.realpath(home if home.is_dir() else home.parent))
        return self.found[place]

    def sorted(self, items: Iterable[FoundPicture]) -> dict[Path, dict[Origin, None]]:
        """Every picture once below its home, in order."""
        by_home: dict[Path, dict[Origin, None]] = {}
        for item in items:
            by_home.setdefault(self.of(item), {})[item.image] = None
        return by_home
