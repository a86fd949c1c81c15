"""Images without a dataset file: sd-scripts' folders named ``REPEATS_CLASS``, or its metadata file of ``in_json``.

Both become the document that a dataset file would be, so that everything after it is the same.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema_data import DataConfig
from ..config.toml_positions import KeyPath
from ..problems import Place, Problem
from ..storage.filesystems import RemoteError
from ..storage.remote_path import is_remote
from ..storage.remote_store import RemoteStore
from .file_discovery import describe_missing_path, describe_missing_url
from .listing import SubsetListing, format_count, format_first_names, is_image_file
from .schema import resolve_path

_MAX_PLAUSIBLE_REPEATS = 1000
_SUBSETS: KeyPath = ("datasets", 0, "subsets")


@dataclass(frozen=True)
class RepeatsFolder:
    """A folder whose name sets the repeats of its images and the caption of those without a caption file."""

    path: Path
    num_repeats: int
    class_tokens: str


@dataclass
class KohyaDataset:
    """A dataset in the structure of a dataset file, where each value comes from, and what is wrong with it."""

    subsets: list[dict[str, Any]] = field(default_factory=list)
    locations: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def document(self) -> dict[str, Any]:
        return {"datasets": [{"subsets": self.subsets}]}

    def locate(self, key_path: KeyPath) -> Place:
        """Return the option or the folder that sets a value."""
        while key_path not in self.locations:
            key_path = key_path[:-1]
        return self.locations[key_path]

    def add_subset(
        self, values: dict[str, Any], location: Place, key_locations: dict[str, Place] | None = None
    ) -> None:
        key_path = (*_SUBSETS, len(self.subsets))
        self.subsets.append(values)
        self.locations[key_path] = location
        for key, where in (key_locations or {}).items():
            self.locations[(*key_path, key)] = where


def parse_folder_name(name: str) -> tuple[int, str] | None:
    """Split ``10_mika dog`` into repeats and class; None if the name does not start with a number."""
    number, _, class_tokens = name.partition("_")
    try:
        return int(number), class_tokens
    except ValueError:
        return None


def find_repeats_folders(folder: Path) -> list[RepeatsFolder]:
    """List the folders in ``folder`` whose names set repeats, sorted by name."""
    found = []
    for name in _list_folder_names(folder):
        if (parsed := parse_folder_name(name)) is not None and parsed[0] > 0:
            found.append(RepeatsFolder(folder / name, *parsed))
    return found


def find_unused_folder_names(listing: SubsetListing, folder: Path, subfolders: Sequence[str]) -> Iterator[str]:
    """Yield a hint if folders have names as for ``train_data_dir``, which set nothing in a dataset file."""
    subset, where = listing.subset, listing.subset.locate("image_dir")
    option = "--reg_data_dir" if subset.is_reg else "--train_data_dir"
    parsed = _parse_plausible_name(folder.absolute().name)
    if parsed is not None:
        is_repeats_set = subset.num_repeats != 1 or not subset.locate("num_repeats").flag
        keys = [] if is_repeats_set or parsed[0] == 1 else [f"num_repeats = {parsed[0]}"]
        if listing.uncaptioned and subset.class_tokens is None and parsed[1]:
            keys.append(f"class_tokens = {parsed[1]!r}")
        if keys:
            parent = str(folder.absolute().parent)
            yield (
                f"{where}: the folder name {folder.absolute().name!r} sets nothing in a dataset file; set"
                f" {' and '.join(keys)}, or give {option} {parent!r} instead of the file"
            )
    names = [f"{name}/" for name in subfolders if _parse_plausible_name(name)]
    if names and subset.recursive:
        yield (
            f"{where}: folder names set nothing in a dataset file: {format_first_names(names)}; give {option}"
            f" {str(folder.absolute())!r} instead of the file, or a subset with num_repeats and class_tokens for each"
        )


def _parse_plausible_name(name: str) -> tuple[int, str] | None:
    """Split a name as ``train_data_dir`` would, unless its number is more likely a year."""
    parsed = parse_folder_name(name) if "_" in name else None
    return parsed if parsed is not None and 0 < parsed[0] < _MAX_PLAUSIBLE_REPEATS else None


def read_kohya_dataset(config: DataConfig, remote: RemoteStore) -> KohyaDataset:
    """Build the dataset of ``train_data_dir`` and ``reg_data_dir``, or of ``in_json``."""
    dataset = KohyaDataset()
    if config.in_json:
        _add_metadata_file(config.in_json, config, dataset)
        return dataset
    dataset.locations[()] = Place(flag="--train_data_dir")
    if not config.train_data_dir:
        dataset.problems.append(
            Problem("reg_data_dir", "no images to train on", "give their folder with --train_data_dir")
        )
        return dataset
    train, reg = (_resolve_folder(name, config, dataset, remote) for name in ("train_data_dir", "reg_data_dir"))
    if train is not None and reg is not None and is_remote(train) == is_remote(reg) and train.samefile(reg):
        dataset.problems.append(
            Problem("reg_data_dir", "is the same folder as --train_data_dir", "remove one of the two")
        )
        reg = None
    for option, folder in (("train_data_dir", train), ("reg_data_dir", reg)):
        if folder is not None:
            _add_repeats_folders(option, folder, dataset)
    return dataset


def _add_metadata_file(in_json: str, config: DataConfig, dataset: KohyaDataset) -> None:
    dataset.locations[()] = place = Place(flag="--in_json")
    image_dir = {"image_dir": config.train_data_dir} if config.train_data_dir else {}
    dataset.add_subset({"metadata_file": in_json, **image_dir}, place, {"image_dir": Place(flag="--train_data_dir")})
    if config.reg_data_dir:
        dataset.problems.append(
            Problem("reg_data_dir", "not used with in_json, in sd-scripts neither", "remove one of the two")
        )


def _resolve_folder(option: str, config: DataConfig, dataset: KohyaDataset, remote: RemoteStore) -> Path | None:
    """Return the folder of an option; None, and a problem, if it does not exist."""
    name = getattr(config, option)
    folder = resolve_path(None, name, remote) if name else None
    try:
        if folder is None or folder.is_dir():
            return folder
        if is_remote(folder):
            dataset.problems.append(Problem(option, describe_missing_url([folder])))
            return None
    except RemoteError as error:
        dataset.problems.append(Problem(option, f"{folder}: {error}"))
        return None
    if folder.exists():
        dataset.problems.append(Problem(option, f"{folder} is a file, not a folder"))
    else:
        dataset.problems.append(Problem(option, describe_missing_path([str(folder)])))
    return None


def _add_repeats_folders(option: str, folder: Path, dataset: KohyaDataset) -> None:
    """Add a subset for each folder with repeats and images; what is left out is a problem if nothing remains."""
    try:
        found = find_repeats_folders(folder)
    except OSError as error:
        dataset.problems.append(Problem(option, f"{folder}: cannot be read: {error.strerror}"))
        return
    for item in found:
        if has_images(item.path):
            values = {"num_repeats": item.num_repeats, "is_reg": option == "reg_data_dir"}
            # the location is the folder: its name is what there is to change
            dataset.add_subset(
                {"image_dir": str(item.path), **values, "class_tokens": item.class_tokens}, Place(str(item.path))
            )
    if not any(has_images(item.path) for item in found):
        dataset.problems.append(Problem(option, _describe_unusable_folder(option, folder, found)))
        return
    if empty := [f"{item.path.name}/" for item in found if not has_images(item.path)]:
        dataset.notices.append(f"{folder}: no images in {format_first_names(empty)}")
    names = {item.path.name for item in found}
    unnamed = [f"{name}/" for name in _list_folder_names(folder) if name not in names and has_images(folder / name)]
    if unnamed:
        hint = "rename a folder to 'REPEATS_CLASS', such as '10_mika dog', to use it"
        dataset.notices.append(f"{folder}: no repeats in the name, not used: {format_first_names(unnamed)}; {hint}")
    if loose := _list_images(folder):
        count = format_count(len(loose), "image")
        dataset.notices.append(
            f"{folder}: {count} outside of folders with repeats, not used: {format_first_names(loose)}"
        )


def _describe_unusable_folder(option: str, folder: Path, found: Sequence[RepeatsFolder]) -> str:
    """Say why no image of the folder can be used, and what to give instead."""
    path = folder.absolute()
    if parse_folder_name(path.name) is not None and has_images(path):
        return f"{path} has the images itself; give the folder above it: --{option} {str(path.parent)!r}"
    if found:
        names = format_first_names([f"{item.path.name}/" for item in found])
        return f"{path}: no images in {names}; subfolders of these are not searched"
    expected = "no folder named 'REPEATS_CLASS', such as '10_mika dog'"
    if images := _list_images(path):
        return f"{path}: {expected}, but {format_count(len(images), 'image')}; move them into such a folder"
    names = format_first_names([f"{name}/" for name in _list_folder_names(path)]) or "no folder"
    return f"{path}: {expected}; it contains {names}"


def _list_folder_names(folder: Path) -> list[str]:
    if is_remote(folder):
        return [name for name in folder.list_folder(recursive=False).folders if not name.startswith(".")]
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _list_images(folder: Path) -> list[str]:
    return sorted(_iter_images(folder))


def has_images(folder: Path) -> bool:
    """Whether the folder itself contains an image file."""
    try:
        return next(_iter_images(folder), None) is not None
    except OSError:
        return False


def _iter_images(folder: Path) -> Iterator[str]:
    if is_remote(folder):
        yield from filter(is_image_file, folder.list_folder(recursive=False).files)
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_image_file(entry.name) and not entry.name.startswith("."):
                yield entry.name
