"""Which pictures the subsets of a dataset file mean and what their captions are, before any picture is opened."""

from collections.abc import Sequence

from ..dataset.schema import DatasetConfig, SubsetConfig
from .listing import PICTURE_ENDINGS, FoundPicture, Listing
from .overlaps import overlaps
from .sources.folder import from_folder
from .sources.metadata import from_metadata
from .sources.parquet import from_parquet
from .sources.webdataset import from_webdataset

__all__ = ["PICTURE_ENDINGS", "FoundPicture", "Listing", "find_all", "find_pictures"]


def find_pictures(subset: SubsetConfig, dataset: int, index: int) -> Listing:
    """The pictures of a subset in an order that does not depend on the machine."""
    if subset.parquet:
        return from_parquet(subset, dataset, index)
    if subset.webdataset:
        return from_webdataset(subset, dataset, index)
    metadata = subset.metadata()
    if metadata is not None:
        return from_metadata(subset, metadata, dataset, index)
    folder = subset.folder()
    if folder is None:
        raise AssertionError("a subset without any other source has an image_dir")
    return from_folder(subset, folder, dataset, index)


def find_all(datasets: Sequence[DatasetConfig]) -> list[tuple[int, int, Listing]]:
    """The pictures of every subset, with the positions of dataset and subset."""
    found = [(number, index, find_pictures(subset, number, index))
             for number, dataset in enumerate(datasets) for index, subset in enumerate(dataset.subsets)]  # fmt: skip
    used = {setting for _, _, listing in found for setting in listing.used}
    for _, _, listing in found:
        listing.problems += [line for setting, line in listing.unused.items() if setting not in used]
        used |= listing.unused.keys()  # told once
    for number, dataset in enumerate(datasets):
        mine = [listing for at, _, listing in found if at == number]
        mine[-1].problems += overlaps(dataset, mine)
    return found
