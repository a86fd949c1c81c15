"""Validate the keys of a dataset file against each other: within a subset, within a dataset and across datasets."""

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.types import Resolution
from ..name_suggestions import suggest_name
from ..problems import Place, Problem
from .file_discovery import PathPattern
from .musubi_format import MUSUBI_BUCKET_STEP, MUSUBI_SUBSET_KEYS, explain_unsupported_musubi_key
from .schema import DATASET_KEYS, DATASET_TABLE, DatasetConfig, DatasetFormat, DatasetKind


@dataclass(frozen=True)
class LocatedValue:
    """A value and where it was set; None for defaults."""

    value: Any
    location: Place | None
    is_invalid: bool = False  # the value in the file is invalid; this is its default

    @property
    def is_in_file(self) -> bool:
        return self.location is not None and not self.location.flag

    def locate(self, key: str, table: Place) -> Place:
        """Return where ``key`` was set, or the table where it is missing."""
        return (self.location or table).with_key(key)


UNSUPPORTED_KEYS_BY_KIND: Mapping[DatasetKind, tuple[str, ...]] = {
    "finetuning": (
        "is_reg",
        "class_tokens",
        "caption_extension",
        "cache_info",
        "conditioning_data_dir",
        "control_directory",
    ),
    "controlnet": ("is_reg", "class_tokens", "alpha_mask", "metadata_file"),
    "dreambooth": ("metadata_file", "conditioning_data_dir"),
}
"""Subset keys that sd-scripts rejects for a kind of dataset."""

_KIND_KEYS: Mapping[DatasetKind, str] = {"finetuning": "metadata_file", "controlnet": "conditioning_data_dir"}
_SOURCE_KEYS = ("image_dir", "parquet", "webdataset", "video_dir")
_UNSUPPORTED_KEYS_BY_SOURCE: Mapping[str, tuple[str, ...]] = {
    "image_dir": ("control_column",),
    "video_dir": ("metadata_file", "control_column", "cache_info"),
    "parquet": ("metadata_file", "conditioning_data_dir", "control_directory", "cache_info", "caption_extension"),
    "webdataset": ("metadata_file", "conditioning_data_dir", "control_directory", "cache_info", "control_column"),
}
"""sd-scripts' keys that a source cannot use: an error in the subset itself, ignored in the tables above it."""

_UNSUPPORTED_EXTRA_KEYS_BY_SOURCE: Mapping[str, tuple[str, ...]] = {
    "image_dir": (),
    "video_dir": (),
    "parquet": ("include", "exclude"),
    "webdataset": ("include", "exclude", "image_column"),
    "metadata_file": ("include", "exclude", "recursive"),
}
"""Our own keys that a source cannot use: an error unless another subset of the table uses them."""

_EXTRA_KEYS = ("recursive", "include", "exclude", "image_column", "caption_column")
_LIST_KEYS = ("caption_extension", "include", "exclude", "parquet", "webdataset", "control_column")


def explain_misplaced_key(name: str, table_name: str) -> str | None:
    """Explain a key that exists but is not supported, or not in this table."""
    if reason := explain_unsupported_musubi_key(name):
        return reason
    if name in MUSUBI_SUBSET_KEYS and name not in DATASET_KEYS:
        return f"belongs in {DATASET_TABLE}, not in {table_name}"
    key = DATASET_KEYS.get(name)
    if key is None or table_name in key.tables:
        return None
    if not key.tables:
        return f"not a key of dataset files; set it for the run: --{key.flag}"
    return f"belongs in {' or '.join(key.tables)}, not in {table_name}"


def explain_unknown_key(name: str, table_name: str, allowed_in_musubi: Collection[str] = ()) -> str:
    """Explain a key that does not exist; ``allowed_in_musubi`` are those of a file in musubi-tuner's format."""
    for key in DATASET_KEYS.values():
        if name == key.flag:
            return f"unknown key; in dataset files it is called {key.name}"
    allowed = [key.name for key in DATASET_KEYS.values() if table_name in key.tables]
    allowed += ["subsets"] if table_name == DATASET_TABLE else []
    allowed = list(allowed_in_musubi) or allowed
    hint = suggest_name(name, allowed) or suggest_name(name, DATASET_KEYS)
    return f"unknown key{hint or '; allowed in ' + table_name + ': ' + ', '.join(sorted(allowed))}"


def infer_dataset_kind(subsets: Sequence[Mapping[str, LocatedValue]]) -> DatasetKind:
    """Infer the kind of a dataset from its subsets, as sd-scripts does."""
    kinds = {_infer_subset_kind(subset) for subset in subsets}
    return next(iter(kinds)) if len(kinds) == 1 else "dreambooth"


def _infer_subset_kind(subset: Mapping[str, LocatedValue]) -> DatasetKind:
    if subset["conditioning_data_dir"].location is not None:
        return "controlnet"
    return "finetuning" if subset["metadata_file"].location is not None else "dreambooth"


def validate_subset_keys(
    values: Mapping[str, LocatedValue], own_keys: Mapping[str, LocatedValue], location: Place
) -> Iterator[Problem]:
    """Yield problems of one subset; ``own_keys`` are those set in it, not inherited."""
    kind = _infer_subset_kind(values)
    for name in UNSUPPORTED_KEYS_BY_KIND[kind]:
        if name in own_keys:
            place = own_keys[name].locate(name, location)
            yield Problem(name, f"not supported with {_KIND_KEYS[kind]}", "remove one of the two", place)
    sources = [values[name] for name in _SOURCE_KEYS]
    if kind != "finetuning" and not any(item.value or item.is_invalid for item in sources):
        place = values["image_dir"].locate("image_dir", location)
        yield Problem("image_dir", "missing", "set the folder of images: image_dir = 'FOLDER'", place)
    separator = values["caption_separator"]
    if not separator.value:
        place = separator.locate("caption_separator", location)
        yield Problem("caption_separator", "must not be empty", "the default is ','", place)


def validate_source_keys(values: Mapping[str, LocatedValue], own_keys: Mapping[str, LocatedValue]) -> Iterator[Problem]:
    """Yield problems of the image source of one subset, and of the keys that depend on it."""
    table = values[""].location or Place()
    sources = [name for name in _SOURCE_KEYS if values[name].value]
    for name in sources[1:]:
        text, place = f"{sources[0]} is set too, and a subset has one source", values[name].locate(name, table)
        yield Problem(name, text, "use a [[datasets.subsets]] for each", place)
    for name in _UNSUPPORTED_KEYS_BY_SOURCE[sources[0]] if sources else ():
        if name in own_keys:
            place = own_keys[name].locate(name, table)
            yield Problem(name, f"not supported with {sources[0]}", "remove one of the two", place)
    for name in _LIST_KEYS:
        item = values[name]
        is_empty = item.value == () and item.location is not None and not item.is_invalid
        # an empty caption extension is valid: sd-scripts then reads caption files without one
        if is_empty or (name != "caption_extension" and "" in item.value):
            yield Problem(name, "is empty", "set at least one value, or remove it", item.locate(name, table))
    for name in ("include", "exclude"):
        place = values[name].locate(name, table)
        yield from (Problem(name, reason, place=place) for reason in _find_invalid_patterns(values[name].value))


def _find_invalid_patterns(patterns: Sequence[str]) -> Iterator[str]:
    for text in patterns:
        try:
            PathPattern.compile(text)
        except ValueError as error:
            yield str(error)


def validate_dataset_keys(
    values: Mapping[str, LocatedValue],
    subsets: Sequence[Mapping[str, LocatedValue]],
    location: Place,
    file_format: DatasetFormat = "sd-scripts",
) -> Iterator[Problem]:
    """Yield problems of the keys of one dataset, and between its subsets."""
    kinds = {_infer_subset_kind(subset): subset[""].location for subset in reversed(subsets)}
    if len(kinds) > 1:
        names = ", ".join(f"{_KIND_KEYS.get(kind, 'neither')} ({where})" for kind, where in sorted(kinds.items()))
        fix = (
            "set metadata_file or conditioning_data_dir in all of them or in none, or use a [[datasets]] for each type"
        )
        yield Problem("", f"subsets of different types in one dataset: {names}", fix, location)
    yield from _validate_duplicate_sources(subsets)
    if subsets and all(subset["is_reg"].value for subset in subsets):
        text, fix = "all subsets are regularization images (is_reg)", "add a subset of images to train on"
        yield Problem("is_reg", text, fix, location)
    yield from _validate_bucket_mode(values, location)
    resolution, schedule = values["resolution"], values["resolution_schedule"]
    if resolution.is_invalid or schedule.is_invalid:
        return
    key = "resolution"
    if schedule.value is not None:
        if schedule.value.largest is None:
            return
        key, resolution = "resolution_schedule", LocatedValue(schedule.value.largest, schedule.location)
    if resolution.value is None:
        if location.flag:
            yield Problem(
                "resolution", "missing", f"{location.flag.removeprefix('--')} needs it, such as 512 or 512,768"
            )
        else:
            fix = "set it here, in [general] or with --resolution, such as 512 or [512, 768]"
            yield Problem("resolution", "missing", fix, location.with_key("resolution"))
    elif values["enable_bucket"].value and file_format == "sd-scripts":
        yield from _validate_bucket_limits({**values, "resolution": resolution}, location, key)
    elif values["enable_bucket"].value and (reason := describe_too_small_area(resolution.value, MUSUBI_BUCKET_STEP)):
        place = resolution.location or location
        yield Problem(key, reason, place=None if place.flag else place.with_key(key))


def describe_too_small_area(resolution: Resolution, step: int) -> str | None:
    """Say that a resolution leaves no bucket of musubi-tuner, whose sides go down to half a square's."""
    if math.sqrt(resolution.width * resolution.height) >= 2 * step:
        return None
    return f"{resolution} is too small for buckets in steps of {step}: it needs the area of {2 * step}x{2 * step}"


def _validate_duplicate_sources(subsets: Sequence[Mapping[str, LocatedValue]]) -> Iterator[Problem]:
    first_locations: dict[str, Place] = {}
    for subset in subsets:
        if subset["include"].value or subset["exclude"].value:
            continue  # parts of one folder; overlaps are found when the images are listed
        key = "video_dir" if subset["video_dir"].value else "image_dir"
        key = "metadata_file" if _infer_subset_kind(subset) == "finetuning" else key
        value, location = subset[key].value, subset[key].location
        if not value or location is None:
            continue
        path = os.path.normpath(value)
        if path in first_locations:
            text = f"{value!r} is already set in {first_locations[path].without_key()}"
            yield Problem(key, text, "for more repeats raise num_repeats there", location.with_key(key))
        first_locations.setdefault(path, location)


def _validate_bucket_mode(values: Mapping[str, LocatedValue], location: Place) -> Iterator[Problem]:
    """Yield keys that contradict bucket_mode."""

    def report(name: str, text: str, fix: str, other: str) -> Problem:
        if values[name].is_in_file:
            return Problem(name, text, fix, values[name].locate(name, location), others=(other,))
        return Problem(name, text, fix, value="" if location.flag else f"(for {location})", others=(other,))

    if any(values[name].is_invalid for name in ("bucket_mode", "enable_bucket", "bucket_no_upscale")):
        return
    is_symmetric = values["bucket_mode"].value == "symmetric" and values["enable_bucket"].value
    if is_symmetric and values["bucket_no_upscale"].value:
        text = "symmetric buckets all have the same area, so that small images are upscaled"
        yield report("bucket_mode", text, "remove bucket_no_upscale", "bucket_no_upscale")


def _validate_bucket_limits(values: Mapping[str, LocatedValue], location: Place, key: str) -> Iterator[Problem]:
    """Yield limits that leave no bucket: sd-scripts rounds them to steps and requires the resolution between them.

    ``key`` is the one that sets the resolution.
    """
    names = ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
    if any(values[name].is_invalid for name in names):
        return
    smallest, largest, step = (values[name].value for name in names)
    size = values["resolution"].value
    shorter, longer = min(size.width, size.height), max(size.width, size.height)

    def locate(name: str, written_name: str) -> Place | None:
        place = values[name].location if values[name].is_in_file else location
        return None if place is None or place.flag else place.with_key(written_name)

    minimum, maximum = (locate(name, name) for name in names[:2])
    others = () if values["bucket_reso_steps"].is_in_file else ("bucket_reso_steps",)
    if values["bucket_no_upscale"].value:
        if size.width * size.height < step * step:
            text, place = f"{size} is too small for a bucket with bucket_reso_steps {step}", locate("resolution", key)
            yield Problem(key, text, place=place, others=others)
        return
    if smallest > largest:
        if values["min_bucket_reso"].is_in_file or values["max_bucket_reso"].is_in_file:
            name, place = (names[0], minimum) if values["min_bucket_reso"].is_in_file else (names[1], maximum)
            yield Problem(name, f"min_bucket_reso {smallest} is above max_bucket_reso {largest}", place=place)
        return
    if smallest - smallest % step > shorter:
        text = f"{smallest} is above the shorter side of {key} {size}"
        yield Problem(names[0], text, f"at most {shorter}", minimum)
    if largest + -largest % step < longer:
        yield Problem(names[1], f"{largest} is below the longer side of {key} {size}", f"at least {longer}", maximum)
    if smallest < step:
        text, fix = f"{smallest} is below bucket_reso_steps {step}", f"at least {step}"
        yield Problem(names[0], text, fix, minimum, others=others)


def validate_across_datasets(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Yield problems between datasets, and of keys above them."""
    yield from _validate_inherited_keys(datasets)
    yield from _validate_weights(datasets)


def _validate_inherited_keys(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Yield keys that no subset of their table can use."""
    sources_by_key: defaultdict[tuple[str, Place], list[str]] = defaultdict(list)
    for subset in (subset for dataset in datasets for subset in dataset.subsets):
        for name in _EXTRA_KEYS:
            if name in subset.locations:
                sources_by_key[name, subset.locations[name]].append(subset.source_key)
    for (name, location), sources in sources_by_key.items():
        if all(name in _UNSUPPORTED_EXTRA_KEYS_BY_SOURCE[source] for source in sources):
            text = f"not supported with {' and '.join(dict.fromkeys(sources))}"
            yield Problem(name, text, "remove it", location.with_key(name))


def _validate_weights(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    locations = [dataset.locations["weight"] for dataset in datasets if "weight" in dataset.locations]
    for dataset in datasets:
        place = dataset.locate("weight")
        if dataset.weight is not None and dataset.weight <= 0:
            text = f"{dataset.weight:g} would exclude the dataset"
            yield Problem("weight", text, "set a positive weight, such as 0.5", place)
        if locations and "weight" not in dataset.locations:
            text = f"missing here, but set in {locations[0].without_key()}"
            yield Problem("weight", text, "set it for all [[datasets]] or for none", place)
