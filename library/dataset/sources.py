"""List the images of every subset: from a folder, a metadata file, tables or tar shards; check subsets for overlap."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..problems import Problem
from ..storage.filesystems import RemoteError
from ..storage.remote_path import resolve_links
from .file_discovery import resolve_shards
from .folder import list_folder_images
from .listing import SubsetListing, format_count, format_first_names
from .metadata_file import list_metadata_images
from .schema import DatasetConfig, SubsetConfig
from .tables import PYARROW_NEEDED, is_pyarrow_installed, list_table_images
from .webdataset import list_webdataset_images


def find_missing_sources(subset: SubsetConfig) -> Iterator[Problem]:
    """Report shards that do not exist, and pyarrow if it is needed and not installed."""
    yield from resolve_shards(subset).problems
    needs_pyarrow = subset.parquet or str(subset.metadata_file).lower().endswith(".parquet")
    if needs_pyarrow and not is_pyarrow_installed():
        yield Problem(subset.source_key, PYARROW_NEEDED, place=subset.locate(subset.source_key))


def list_images(subset: SubsetConfig, dataset: int, index: int) -> SubsetListing:
    """List the images of a subset in an order that does not depend on the machine."""
    if subset.parquet:
        return list_table_images(subset, dataset, index)
    if subset.webdataset:
        return list_webdataset_images(subset, dataset, index)
    metadata = subset.resolve_metadata_file()
    if metadata is not None:
        return list_metadata_images(subset, metadata, dataset, index)
    folder = subset.resolve_image_dir()
    if folder is None:
        raise AssertionError("a subset without another source has an image_dir")
    return list_folder_images(subset, folder, dataset, index)


def _list_or_report(subset: SubsetConfig, dataset: int, index: int) -> SubsetListing:
    try:
        return list_images(subset, dataset, index)
    except RemoteError as error:
        listing = SubsetListing(subset, dataset, index)
        listing.add_problem(subset.source_key, str(error))
        return listing


def list_all_images(datasets: Sequence[DatasetConfig]) -> list[SubsetListing]:
    """List the images of every subset of every dataset."""
    listings = [
        [_list_or_report(subset, number, index) for index, subset in enumerate(dataset.subsets)]
        for number, dataset in enumerate(datasets)
    ]
    flat = [listing for members in listings for listing in members]
    used = {setting for listing in flat for setting in listing.used_settings}
    for listing in flat:
        listing.problems += [line for setting, line in listing.unused_settings.items() if setting not in used]
        used |= listing.unused_settings.keys()  # reported once
    for dataset, members in zip(datasets, listings, strict=True):
        members[-1].problems += _find_overlaps(dataset, members)
    return flat


def _find_overlaps(dataset: DatasetConfig, listings: Sequence[SubsetListing]) -> Iterator[Problem]:
    """Report images that two subsets share: they would be trained more often than either ``num_repeats`` says.

    Metadata files may list an image again, as in sd-scripts.
    """
    subsets = [
        (subset, _list_roots(listing), listing)
        for subset, listing in zip(dataset.subsets, listings, strict=True)
        if subset.source_key != "metadata_file"
    ]
    for position, (subset, roots, listing) in enumerate(subsets):
        for other, other_roots, other_listing in subsets[:position]:
            is_nested = _is_inside(roots, other, other_roots) or _is_inside(other_roots, subset, roots)
            if not (is_nested or roots & other_roots):
                continue
            other_names = {name for name, _ in _list_real_names(other_listing)}
            shared = [shown for name, shown in _list_real_names(listing) if name in other_names]
            if shared:
                key = subset.source_key
                hint = "exclude them in one of the two" if key == "image_dir" else "list each file once"
                yield Problem(
                    key,
                    f"{format_count(len(shared), 'image')} also in {other.locate(other.source_key).without_key()}:"
                    f" {format_first_names(shared)}",
                    hint,
                    place=subset.locate(key),
                )


def _list_roots(listing: SubsetListing) -> set[str]:
    """List the real paths of the folders of images, or of the files that contain them."""
    roots = {(item.image.folder, "" if item.image.part is None else item.image.file) for item in listing.images}
    return {str(resolve_links(folder / file)) for folder, file in roots}


def _is_inside(roots: set[str], other: SubsetConfig, other_roots: set[str]) -> bool:
    """Whether a folder may also be reached by the recursive search of the other subset."""
    return other.recursive and any(
        root.startswith(os.path.join(parent, "")) for root in roots for parent in other_roots
    )


def _list_real_names(listing: SubsetListing) -> Iterator[tuple[str, str]]:
    """Yield each image as its real path and as it is shown."""
    real_paths: dict[Path, str] = {}
    for item in listing.images:
        image = item.image
        if image.folder not in real_paths:
            real_paths[image.folder] = str(resolve_links(image.folder))
        part = "" if image.part is None else f":{image.part.name}"
        yield os.path.join(real_paths[image.folder], image.file) + part, str(image)
