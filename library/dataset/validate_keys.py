"""Rules across the keys of a dataset file, the folders it names, and what this version cannot do with it yet."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .file_discovery import PathPattern
from .schema import DatasetConfig, DatasetKind


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


def validate_subset_keys(
    values: Mapping[str, LocatedValue], own_keys: Mapping[str, LocatedValue], location: str
) -> Iterator[str]:
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


def validate_dataset_keys(
    values: Mapping[str, LocatedValue], subsets: Sequence[Mapping[str, LocatedValue]], location: str
) -> Iterator[str]:
    """What is wrong across the keys of one dataset and between its subsets."""
    kinds = {_infer_subset_kind(subset): subset[""].location for subset in reversed(subsets)}
    if len(kinds) > 1:
        seen = ", ".join(f"{_KIND_KEYS.get(kind, 'neither')} ({place})" for kind, place in sorted(kinds.items()))
        yield (
            f"{location}: subsets of different kinds in one dataset: {seen}; metadata_file or conditioning_data_dir"
            " stands in all of them or in none; use a [[datasets]] for each kind"
        )
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


_SYMMETRIC_ONLY_KEYS = {"bucket_max_crop": 1, "bucket_min_images": 1}
"""Keys of bucket_mode symmetric, with the values that ask for nothing."""


def _validate_bucket_mode(values: Mapping[str, LocatedValue], location: str) -> Iterator[str]:
    """What the modes of buckets do not have; it is refused, since neither key nor flag is one of sd-scripts."""

    def format_key(name: str) -> str:
        return f"{values[name].location}: {name}" if values[name].is_in_file else f"--{name} (for {location})"

    if any(
        values[name].is_invalid for name in ("bucket_mode", "enable_bucket", "bucket_no_upscale", *_SYMMETRIC_ONLY_KEYS)
    ):
        return
    if values["bucket_mode"].value == "kohya":
        for name, nothing in _SYMMETRIC_ONLY_KEYS.items():
            if values[name].value != nothing:
                yield f"{format_key(name)}: needs bucket_mode symmetric; set bucket_mode = 'symmetric', or take it out"
    elif not values["enable_bucket"].value:
        yield f"{format_key('bucket_mode')}: there are no buckets; set enable_bucket = true"
    elif values["bucket_no_upscale"].value:
        yield (
            f"{format_key('bucket_mode')}: all buckets have one area in bucket_mode symmetric, so that small pictures"
            " are enlarged; take out bucket_no_upscale"
        )


def _validate_bucket_resolutions(
    values: Mapping[str, LocatedValue], location: str, resolution_key: str
) -> Iterator[str]:
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
        yield (
            f"{place['min_bucket_reso']}: min_bucket_reso: {smallest} is above the shorter side of {resolution_key}"
            f" {size}; at most {shortest}"
        )
    if largest + -largest % step < longest:
        yield (
            f"{place['max_bucket_reso']}: max_bucket_reso: {largest} is below the longer side of {resolution_key}"
            f" {size}; at least {longest}"
        )
    if smallest < step:
        yield (
            f"{place['min_bucket_reso']}: min_bucket_reso: {smallest} is below bucket_reso_steps {step};"
            f" at least {step}"
        )


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


_SOURCE_KEYS = ("image_dir", "parquet", "webdataset")


_UNSUPPORTED_KEYS_BY_SOURCE: Mapping[str, tuple[str, ...]] = {
    "image_dir": (),
    "parquet": ("metadata_file", "conditioning_data_dir", "cache_info", "caption_extension"),
    "webdataset": ("metadata_file", "conditioning_data_dir", "cache_info"),
}
"""Keys of sd-scripts that a source cannot use; standing above the subset they are no mistake, as there."""


_UNSUPPORTED_EXTRA_KEYS_BY_SOURCE: Mapping[str, tuple[str, ...]] = {
    "image_dir": (),
    "parquet": ("include", "exclude"),
    "webdataset": ("include", "exclude", "image_column"),
    "metadata_file": ("include", "exclude", "recursive"),
}
"""The same for keys that sd-scripts does not know."""


_EXTRA_KEYS = ("recursive", "include", "exclude", "image_column", "caption_column")


_LIST_KEYS = ("caption_extension", "include", "exclude", "parquet", "webdataset")


def validate_source_keys(values: Mapping[str, LocatedValue], own_keys: Mapping[str, LocatedValue]) -> Iterator[str]:
    """What is wrong with the sources of one subset; ``own`` are the keys written in it."""
    sources = [name for name in _SOURCE_KEYS if values[name].value]
    for name in sources[1:]:
        yield (
            f"{values[name].location}: {name}: stands beside {sources[0]}; a subset has one of the two, so write another"
            " [[datasets.subsets]]"
        )
    for name in _UNSUPPORTED_KEYS_BY_SOURCE[sources[0]] if sources else ():
        if name in own_keys:
            yield f"{own_keys[name].location}: {name}: has no meaning beside {sources[0]}; take one of the two out"
    for name in _LIST_KEYS:
        item = values[name]
        is_empty = not item.value and item.location is not None and not item.is_invalid
        # an ending may be nothing: sd-scripts reads captions from files without one, then
        if is_empty or (name != "caption_extension" and "" in item.value):
            yield f"{item.location}: {name}: is empty; name at least one, or take it out"
    for name in ("include", "exclude"):
        yield from (f"{values[name].location}: {name}: {reason}" for reason in _validate_patterns(values[name].value))


def _validate_patterns(patterns: Sequence[str]) -> Iterator[str]:
    for text in patterns:
        try:
            PathPattern.compile(text)
        except ValueError as error:
            yield str(error)


def validate_across_datasets(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """What is wrong between datasets, or on the levels above them."""
    yield from _find_ineffective_keys(datasets)
    yield from _validate_weights(datasets)


def _find_ineffective_keys(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Keys that none of the subsets below them can use."""
    reached: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for subset in (subset for dataset in datasets for subset in dataset.subsets):
        source = subset.source_key
        for name in _EXTRA_KEYS:
            if name in subset.locations:
                reached[name, subset.locations[name]].append(source)
    for (name, place), sources in reached.items():
        if all(name in _UNSUPPORTED_EXTRA_KEYS_BY_SOURCE[source] for source in sources):
            yield f"{place}: {name}: has no meaning beside {' and '.join(dict.fromkeys(sources))}; take it out"


def _validate_weights(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    places = [dataset.locations["weight"] for dataset in datasets if "weight" in dataset.locations]
    for dataset in datasets:
        if dataset.weight is not None and dataset.weight <= 0:
            yield (
                f"{dataset.locate('weight')}: weight: {dataset.weight:g} would leave the dataset out; write a share"
                " such as 0.5"
            )
        if places and "weight" not in dataset.locations:
            yield f"{dataset.locate('')}: weight: missing here; {places[0]} has one: give all [[datasets]] one, or none"
