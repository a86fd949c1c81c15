"""Rules across the keys of a dataset file, the folders it names, and what this version cannot do with it yet."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dataset.schema import DatasetConfig, DatasetKind, SubsetConfig
from ..dataset.sources import find_missing_sources
from ..registry import suggest_name


@dataclass(frozen=True)
class LocatedValue:
    """A value and where it was written; values by default stand nowhere."""

    value: Any
    location: str | None
    is_invalid: bool = False  # the value in the file is not usable; this is the one behind it

    @property
    def is_in_file(self) -> bool:
        return self.location is not None and not self.location.startswith("--")


def infer_dataset_kind(subsets: Sequence[Mapping[str, LocatedValue]]) -> DatasetKind:
    """What sd-scripts makes of a dataset with these subsets."""
    kinds = {_infer_subset_kind(subset) for subset in subsets}
    return next(iter(kinds)) if len(kinds) == 1 else "dreambooth"


def _infer_subset_kind(subset: Mapping[str, LocatedValue]) -> DatasetKind:
    if subset["conditioning_data_dir"].location is not None:
        return "controlnet"
    return "finetuning" if subset["metadata_file"].location is not None else "dreambooth"


UNSUPPORTED_KEYS_BY_KIND: Mapping[DatasetKind, tuple[str, ...]] = {
    "finetuning": ("is_reg", "class_tokens", "caption_extension", "cache_info", "conditioning_data_dir"),
    "controlnet": ("is_reg", "class_tokens", "alpha_mask", "metadata_file"),
    "dreambooth": ("metadata_file", "conditioning_data_dir"),
}
"""Keys of a subset that a kind does not have."""
_KIND_KEYS: Mapping[DatasetKind, str] = {"finetuning": "metadata_file", "controlnet": "conditioning_data_dir"}


def validate_subset_keys(values: Mapping[str, LocatedValue], own_keys: Mapping[str, LocatedValue], location: str) -> Iterator[str]:
    """What is wrong inside one subset; ``own`` are the keys written in it."""
    kind = _infer_subset_kind(values)
    for name in UNSUPPORTED_KEYS_BY_KIND[kind]:
        if name in own_keys:
            yield f"{own_keys[name].location}: {name}: has no meaning beside {_KIND_KEYS[kind]}; take one of the two out"
    sources = [values[name] for name in ("image_dir", "parquet", "webdataset")]
    if kind != "finetuning" and not any(item.value or item.is_invalid for item in sources):
        place = values["image_dir"].location or location
        yield f"{place}: image_dir: missing; name the folder of pictures: image_dir = 'FOLDER'"
    if not values["caption_separator"].value:
        yield f"{values['caption_separator'].location or location}: caption_separator: is empty; the usual one is ','"


def validate_dataset_keys(values: Mapping[str, LocatedValue], subsets: Sequence[Mapping[str, LocatedValue]], location: str) -> Iterator[str]:
    """What is wrong across the keys of one dataset and between its subsets."""
    kinds = {_infer_subset_kind(subset): subset[""].location for subset in reversed(subsets)}
    if len(kinds) > 1:
        seen = ", ".join(f"{_KIND_KEYS.get(kind, 'neither')} ({place})" for kind, place in sorted(kinds.items()))
        yield (f"{location}: subsets of different kinds in one dataset: {seen}; metadata_file or conditioning_data_dir"
               " stands in all of them or in none; use a [[datasets]] for each kind")  # fmt: skip
    yield from _find_duplicate_sources(subsets)
    if subsets and all(subset["is_reg"].value for subset in subsets):
        yield f"{location}: all subsets are regularisation pictures (is_reg); add a subset of pictures to train on"
    yield from _validate_bucket_mode(values, location)
    if values["resolution"].is_invalid or values["resolution_schedule"].is_invalid:
        return
    key = "resolution"
    if (schedule := values["resolution_schedule"]).value is not None:
        key = "resolution_schedule"
        values = {**values, "resolution": LocatedValue(schedule.value.largest, schedule.location)}
        if schedule.value.largest is None:
            return
    if values["resolution"].value is None:
        yield f"{location}: resolution: missing; set it here, in [general] or with --resolution, such as 512 or [512, 768]"
    elif values["enable_bucket"].value:
        yield from _validate_bucket_resolutions(values, location, key)


_SYMMETRIC_ONLY_KEYS = {"bucket_max_crop": 1, "bucket_min_pictures": 1}
"""Keys of bucket_mode symmetric, with the values that ask for nothing."""


def _validate_bucket_mode(values: Mapping[str, LocatedValue], location: str) -> Iterator[str]:
    """What the modes of buckets do not have; it is refused, since neither key nor flag is one of sd-scripts."""

    def format_key(name: str) -> str:
        return f"{values[name].location}: {name}" if values[name].is_in_file else f"--{name} (for {location})"

    if any(values[name].is_invalid for name in ("bucket_mode", "enable_bucket", "bucket_no_upscale", *_SYMMETRIC_ONLY_KEYS)):
        return
    if values["bucket_mode"].value == "kohya":
        for name, nothing in _SYMMETRIC_ONLY_KEYS.items():
            if values[name].value != nothing:
                yield f"{format_key(name)}: needs bucket_mode symmetric; set bucket_mode = 'symmetric', or take it out"
    elif not values["enable_bucket"].value:
        yield f"{format_key('bucket_mode')}: there are no buckets; set enable_bucket = true"
    elif values["bucket_no_upscale"].value:
        yield (f"{format_key('bucket_mode')}: all buckets have one area in bucket_mode symmetric, so that small pictures"
               " are enlarged; take out bucket_no_upscale")  # fmt: skip


def _validate_bucket_resolutions(values: Mapping[str, LocatedValue], location: str, resolution_key: str) -> Iterator[str]:
    """sd-scripts rounds the limits to steps and wants the resolution between them, which ``key`` says."""
    names = ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
    smallest, largest, step = (values[name].value for name in names)
    if any(values[name].is_invalid for name in names):
        return
    size = values["resolution"].value
    shortest, longest = min(size.width, size.height), max(size.width, size.height)
    place = {name: (item.location if item.is_in_file else location) for name, item in values.items()}
    if values["bucket_no_upscale"].value:
        if size.width * size.height < step * step:
            yield f"{place['resolution']}: {resolution_key}: {size} has no room for one bucket of bucket_reso_steps {step}"
        return
    if smallest > largest:
        if values["min_bucket_reso"].is_in_file or values["max_bucket_reso"].is_in_file:
            blamed = "min_bucket_reso" if values["min_bucket_reso"].is_in_file else "max_bucket_reso"
            yield f"{place[blamed]}: {blamed}: min_bucket_reso {smallest} is above max_bucket_reso {largest}"
        return
    if smallest - smallest % step > shortest:
        yield (f"{place['min_bucket_reso']}: min_bucket_reso: {smallest} is above the shorter side of {resolution_key}"
               f" {size}; at most {shortest}")  # fmt: skip
    if largest + -largest % step < longest:
        yield (f"{place['max_bucket_reso']}: max_bucket_reso: {largest} is below the longer side of {resolution_key}"
               f" {size}; at least {longest}")  # fmt: skip
    if smallest < step:
        yield (f"{place['min_bucket_reso']}: min_bucket_reso: {smallest} is below bucket_reso_steps {step};"
               f" at least {step}")  # fmt: skip


def _find_duplicate_sources(subsets: Sequence[Mapping[str, LocatedValue]]) -> Iterator[str]:
    first: dict[str, str] = {}
    for subset in subsets:
        if subset["include"].value or subset["exclude"].value:
            continue  # parts of one folder; whether they overlap shows when they are listed
        name = _KIND_KEYS["finetuning"] if _infer_subset_kind(subset) == "finetuning" else "image_dir"
        value, place = subset[name].value, subset[name].location
        if not value:
            continue
        path = os.path.normpath(value)
        if path in first:
            yield f"{place}: {name}: {value!r} stands in {first[path]}, too; for more repeats raise num_repeats there"
        first.setdefault(path, str(place))


def validate_paths(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Folders and files that the dataset file names and that are not there, with what was seen in their place."""
    for subset in _iter_subsets(datasets):
        metadata = subset.resolve_metadata_file()
        for key, folder in (("image_dir", subset.resolve_image_dir()), ("conditioning_data_dir", subset.resolve_mask_dir())):
            if folder is not None and not folder.is_dir():
                yield f"{subset.locate(key)}: {key}: {_explain_missing_path(folder, subset.dataset_file)}"
        if metadata is not None and not metadata.is_file():
            yield f"{subset.locate('metadata_file')}: metadata_file: {_explain_missing_path(metadata, subset.dataset_file)}"
        yield from find_missing_sources(subset)


def _explain_missing_path(path: Path, dataset_file: Path) -> str:
    if path.exists():
        return f"{path} is a {'file' if path.is_file() else 'folder'}, not a {'folder' if path.is_file() else 'file'}"
    there = path.absolute().parent
    while not there.is_dir():
        there = there.parent
    missing = path.absolute().relative_to(there).parts[0]
    try:
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in os.scandir(there))
    except OSError as error:
        return f"{path} cannot be looked for: {there}: {error.strerror}"
    seen = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"
    also = "" if path.is_absolute() else f" (also looked beside {dataset_file})"
    hint = suggest_name(missing, [name.rstrip("/") for name in names])
    return f"{str(path)!r} is not there{also}; {there} has {seen}{hint}"


def validate_supported_features(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """What the file asks for and training cannot do yet; nothing is accepted and then ignored."""
    for dataset in datasets:
        if dataset.network_multiplier != 1:
            yield f"{dataset.locate('network_multiplier')}: network_multiplier: not yet: other values than 1"
    for subset in _iter_subsets(datasets):
        for key, what in _UNSUPPORTED_SUBSET_KEYS.items():
            if getattr(subset, key):
                yield f"{subset.locate(key)}: {key}: not yet: {what}"
        for name, value in (subset.custom_attributes or {}).items():
            place = f"{subset.locate('custom_attributes')}: custom_attributes: {name}"
            if name == _KNOWN_ATTRIBUTE and value:
                yield f"{place}: not yet: comparing with the model as it was"
            elif name != _KNOWN_ATTRIBUTE and (hint := suggest_name(name, [_KNOWN_ATTRIBUTE])):
                yield f"{place}: no attribute that means anything{hint}"


def find_unused_keys(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Keys of the file that change nothing beside the others; they are no mistakes in sd-scripts, so they are said."""
    for dataset in datasets:
        where = dataset.locations.get("resolution", "--")
        if dataset.resolution_schedule is not None and not where.startswith("--"):
            by = "resolution_schedule"
            by = f"--{by}" if dataset.locate(by).startswith("--") else by
            yield f"{where}: resolution: not used, because {by} is set"
        keys: tuple[str, ...]
        if not dataset.enable_bucket:
            keys, why = ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"), "enable_bucket is not set"
        elif dataset.bucket_no_upscale:
            keys, why = ("min_bucket_reso", "max_bucket_reso"), "bucket_no_upscale is set"
            if dataset.resolution_schedule is not None and dataset.resolution_schedule.has_native:
                keys = keys[:1]
        else:
            continue
        for key in keys:
            if key in dataset.locations and not dataset.locations[key].startswith("--"):
                yield f"{dataset.locations[key]}: {key}: not used, because {why}"
    for subset in _iter_subsets(datasets):
        if names := set(subset.custom_attributes or {}) - {_KNOWN_ATTRIBUTE}:
            place = subset.locate("custom_attributes")
            yield f"{place}: custom_attributes: {', '.join(sorted(names))}: not used; training reads no such attributes"


_UNSUPPORTED_SUBSET_KEYS = {
    "face_crop_aug_range": "cutting around faces; cut them out beforehand",
}
_KNOWN_ATTRIBUTE = "diff_output_preservation"
"""The one attribute that means something in sd-scripts; all others are carried along and read by nobody."""


def _iter_subsets(datasets: Iterable[DatasetConfig]) -> Iterator[SubsetConfig]:
    for dataset in datasets:
        yield from dataset.subsets
