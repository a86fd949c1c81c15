"""Rules across the keys of a dataset file, the folders it names, and what this version cannot do with it yet."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dataset.schema import DatasetConfig, Kind, SubsetConfig
from ..dataset.sources import find_missing_sources
from ..registry import did_you_mean


@dataclass(frozen=True)
class Found:
    """A value and where it was written; values by default stand nowhere."""

    value: Any
    place: str | None
    is_wrong: bool = False  # the value in the file is not usable; this is the one behind it

    @property
    def is_in_file(self) -> bool:
        return self.place is not None and not self.place.startswith("--")


def kind_of(subsets: Sequence[Mapping[str, Found]]) -> Kind:
    """What sd-scripts makes of a dataset with these subsets."""
    kinds = {_subset_kind(subset) for subset in subsets}
    return next(iter(kinds)) if len(kinds) == 1 else "dreambooth"


def _subset_kind(subset: Mapping[str, Found]) -> Kind:
    if subset["conditioning_data_dir"].place is not None:
        return "controlnet"
    return "finetuning" if subset["metadata_file"].place is not None else "dreambooth"


LACKS: Mapping[Kind, tuple[str, ...]] = {
    "finetuning": ("is_reg", "class_tokens", "caption_extension", "cache_info", "conditioning_data_dir"),
    "controlnet": ("is_reg", "class_tokens", "alpha_mask", "metadata_file"),
    "dreambooth": ("metadata_file", "conditioning_data_dir"),
}
"""Keys of a subset that a kind does not have."""
_DECIDED_BY: Mapping[Kind, str] = {"finetuning": "metadata_file", "controlnet": "conditioning_data_dir"}


def subset_problems(found: Mapping[str, Found], own: Mapping[str, Found], where: str) -> Iterator[str]:
    """What is wrong inside one subset; ``own`` are the keys written in it."""
    kind = _subset_kind(found)
    for name in LACKS[kind]:
        if name in own:
            yield f"{own[name].place}: {name}: has no meaning beside {_DECIDED_BY[kind]}; take one of the two out"
    sources = [found[name] for name in ("image_dir", "parquet", "webdataset")]
    if kind != "finetuning" and not any(item.value or item.is_wrong for item in sources):
        place = found["image_dir"].place or where
        yield f"{place}: image_dir: missing; name the folder of pictures: image_dir = 'FOLDER'"
    if not found["caption_separator"].value:
        yield f"{found['caption_separator'].place or where}: caption_separator: is empty; the usual one is ','"


def dataset_problems(found: Mapping[str, Found], subsets: Sequence[Mapping[str, Found]], where: str) -> Iterator[str]:
    """What is wrong across the keys of one dataset and between its subsets."""
    kinds = {_subset_kind(subset): subset[""].place for subset in reversed(subsets)}
    if len(kinds) > 1:
        seen = ", ".join(f"{_DECIDED_BY.get(kind, 'neither')} ({place})" for kind, place in sorted(kinds.items()))
        yield (f"{where}: subsets of different kinds in one dataset: {seen}; metadata_file or conditioning_data_dir"
               " stands in all of them or in none; use a [[datasets]] for each kind")  # fmt: skip
    yield from _duplicates(subsets)
    if subsets and all(subset["is_reg"].value for subset in subsets):
        yield f"{where}: all subsets are regularisation pictures (is_reg); add a subset of pictures to train on"
    yield from _bucket_mode(found, where)
    if found["resolution"].is_wrong or found["resolution_schedule"].is_wrong:
        return
    key = "resolution"
    if (schedule := found["resolution_schedule"]).value is not None:
        key = "resolution_schedule"
        found = {**found, "resolution": Found(schedule.value.largest, schedule.place)}
        if schedule.value.largest is None:
            return
    if found["resolution"].value is None:
        yield f"{where}: resolution: missing; set it here, in [general] or with --resolution, such as 512 or [512, 768]"
    elif found["enable_bucket"].value:
        yield from _bucket_limits(found, where, key)


_SYMMETRIC_ONLY = {"bucket_max_crop": 1, "bucket_min_pictures": 1}
"""Keys of bucket_mode symmetric, with the values that ask for nothing."""


def _bucket_mode(found: Mapping[str, Found], where: str) -> Iterator[str]:
    """What the modes of buckets do not have; it is refused, since neither key nor flag is one of sd-scripts."""

    def named(name: str) -> str:
        return f"{found[name].place}: {name}" if found[name].is_in_file else f"--{name} (for {where})"

    if any(found[name].is_wrong for name in ("bucket_mode", "enable_bucket", "bucket_no_upscale", *_SYMMETRIC_ONLY)):
        return
    if found["bucket_mode"].value == "kohya":
        for name, nothing in _SYMMETRIC_ONLY.items():
            if found[name].value != nothing:
                yield f"{named(name)}: needs bucket_mode symmetric; set bucket_mode = 'symmetric', or take it out"
    elif not found["enable_bucket"].value:
        yield f"{named('bucket_mode')}: there are no buckets; set enable_bucket = true"
    elif found["bucket_no_upscale"].value:
        yield (f"{named('bucket_mode')}: all buckets have one area in bucket_mode symmetric, so that small pictures"
               " are enlarged; take out bucket_no_upscale")  # fmt: skip


def _bucket_limits(found: Mapping[str, Found], where: str, key: str) -> Iterator[str]:
    """sd-scripts rounds the limits to steps and wants the resolution between them, which ``key`` says."""
    names = ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
    smallest, largest, step = (found[name].value for name in names)
    if any(found[name].is_wrong for name in names):
        return
    size = found["resolution"].value
    shortest, longest = min(size.width, size.height), max(size.width, size.height)
    place = {name: (item.place if item.is_in_file else where) for name, item in found.items()}
    if found["bucket_no_upscale"].value:
        if size.width * size.height < step * step:
            yield f"{place['resolution']}: {key}: {size} has no room for one bucket of bucket_reso_steps {step}"
        return
    if smallest > largest:
        if found["min_bucket_reso"].is_in_file or found["max_bucket_reso"].is_in_file:
            blamed = "min_bucket_reso" if found["min_bucket_reso"].is_in_file else "max_bucket_reso"
            yield f"{place[blamed]}: {blamed}: min_bucket_reso {smallest} is above max_bucket_reso {largest}"
        return
    if smallest - smallest % step > shortest:
        yield (f"{place['min_bucket_reso']}: min_bucket_reso: {smallest} is above the shorter side of {key}"
               f" {size}; at most {shortest}")  # fmt: skip
    if largest + -largest % step < longest:
        yield (f"{place['max_bucket_reso']}: max_bucket_reso: {largest} is below the longer side of {key}"
               f" {size}; at least {longest}")  # fmt: skip
    if smallest < step:
        yield (f"{place['min_bucket_reso']}: min_bucket_reso: {smallest} is below bucket_reso_steps {step};"
               f" at least {step}")  # fmt: skip


def _duplicates(subsets: Sequence[Mapping[str, Found]]) -> Iterator[str]:
    first: dict[str, str] = {}
    for subset in subsets:
        if subset["include"].value or subset["exclude"].value:
            continue  # parts of one folder; whether they overlap shows when they are listed
        name = _DECIDED_BY["finetuning"] if _subset_kind(subset) == "finetuning" else "image_dir"
        value, place = subset[name].value, subset[name].place
        if not value:
            continue
        path = os.path.normpath(value)
        if path in first:
            yield f"{place}: {name}: {value!r} stands in {first[path]}, too; for more repeats raise num_repeats there"
        first.setdefault(path, str(place))


def missing_folders(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Folders and files that the dataset file names and that are not there, with what was seen in their place."""
    for subset in _subsets(datasets):
        metadata = subset.metadata()
        for key, folder in (("image_dir", subset.folder()), ("conditioning_data_dir", subset.mask_folder())):
            if folder is not None and not folder.is_dir():
                yield f"{subset.place(key)}: {key}: {_absence(folder, subset.file)}"
        if metadata is not None and not metadata.is_file():
            yield f"{subset.place('metadata_file')}: metadata_file: {_absence(metadata, subset.file)}"
        yield from find_missing_sources(subset)


def _absence(path: Path, file: Path) -> str:
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
    also = "" if path.is_absolute() else f" (also looked beside {file})"
    hint = did_you_mean(missing, [name.rstrip("/") for name in names])
    return f"{str(path)!r} is not there{also}; {there} has {seen}{hint}"


def not_yet(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """What the file asks for and training cannot do yet; nothing is accepted and then ignored."""
    for dataset in datasets:
        if dataset.network_multiplier != 1:
            yield f"{dataset.place('network_multiplier')}: network_multiplier: not yet: other values than 1"
    for subset in _subsets(datasets):
        for key, what in _NOT_YET.items():
            if getattr(subset, key):
                yield f"{subset.place(key)}: {key}: not yet: {what}"
        for name, value in (subset.custom_attributes or {}).items():
            place = f"{subset.place('custom_attributes')}: custom_attributes: {name}"
            if name == _READ_ATTRIBUTE and value:
                yield f"{place}: not yet: comparing with the model as it was"
            elif name != _READ_ATTRIBUTE and (hint := did_you_mean(name, [_READ_ATTRIBUTE])):
                yield f"{place}: no attribute that means anything{hint}"


def unused(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Keys of the file that change nothing beside the others; they are no mistakes in sd-scripts, so they are said."""
    for dataset in datasets:
        where = dataset.places.get("resolution", "--")
        if dataset.resolution_schedule is not None and not where.startswith("--"):
            by = "resolution_schedule"
            by = f"--{by}" if dataset.place(by).startswith("--") else by
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
            if key in dataset.places and not dataset.places[key].startswith("--"):
                yield f"{dataset.places[key]}: {key}: not used, because {why}"
    for subset in _subsets(datasets):
        if names := set(subset.custom_attributes or {}) - {_READ_ATTRIBUTE}:
            place = subset.place("custom_attributes")
            yield f"{place}: custom_attributes: {', '.join(sorted(names))}: not used; training reads no such attributes"


_NOT_YET = {
    "face_crop_aug_range": "cutting around faces; cut them out beforehand",
}
_READ_ATTRIBUTE = "diff_output_preservation"
"""The one attribute that means something in sd-scripts; all others are carried along and read by nobody."""


def _subsets(datasets: Iterable[DatasetConfig]) -> Iterator[SubsetConfig]:
    for dataset in datasets:
        yield from dataset.subsets
