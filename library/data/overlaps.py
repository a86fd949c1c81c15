"""Pictures that two subsets of a dataset mean at once, and that would be trained more often than either says."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..dataset.schema import DatasetConfig, SubsetConfig
from .listing import Listing, first_of
from .source_rules import source_key


def overlaps(dataset: DatasetConfig, listings: Sequence[Listing]) -> Iterator[str]:
    """A line for each two subsets that share pictures; metadata files may name a picture again, as in sd-scripts."""
    named = [(subset, _roots(listing), listing) for subset, listing in zip(dataset.subsets, listings, strict=True)
             if source_key(subset) != "metadata_file"]  # fmt: skip
    for later, (subset, roots, listing) in enumerate(named):
        for other, other_roots, other_listing in named[:later]:
            if not (roots & other_roots or _within(roots, other, other_roots) or _within(other_roots, subset, roots)):
                continue
            taken = {name for name, _ in _names(other_listing)}
            shared = [shown for name, shown in _names(listing) if name in taken]
            if shared:
                key = source_key(subset)
                way_out = "leave them out of one of the two with exclude" if key == "image_dir" else "name files once"
                yield (f"{subset.place(key)}: {key}: {len(shared)} pictures are in {other.place(source_key(other))},"
                       f" too: {first_of(shared)}; {way_out}")  # fmt: skip


def _roots(listing: Listing) -> set[str]:
    """The folders, or the files that hold pictures, without links."""
    places = {(item.image.folder, "" if item.image.part is None else item.image.file) for item in listing.found}
    return {os.path.realpath(folder / file) for folder, file in places}


def _within(roots: set[str], above: SubsetConfig, above_roots: set[str]) -> bool:
    return above.recursive and any(root.startswith(os.path.join(one, "")) for root in roots for one in above_roots)


def _names(listing: Listing) -> Iterator[tuple[str, str]]:
    """Each picture by a name that does not depend on the way to its folder, and as it is shown."""
    real: dict[Path, str] = {}
    for item in listing.found:
        image = item.image
        if image.folder not in real:
            real[image.folder] = os.path.realpath(image.folder)
        part = "" if image.part is None else f":{image.part.name}"
        yield os.path.join(real[image.folder], image.file) + part, str(image)
