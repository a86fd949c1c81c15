"""What cannot be kept, told while the settings are read."""

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import fields
from pathlib import Path

from ..config.schema import TrainConfig
from ..config.schema_data import CacheConfig, DataConfig, ValidateConfig
from ..registry import suggest_name
from .dataset_config import load_dataset_config
from .masks import get_mask_source
from .schema import DatasetConfig, SubsetConfig
from .sources import find_missing_sources
from .stages import expand_resolution_schedule, validate_stages

_RANDOM_AUGMENTATIONS = {"random_crop": "cut in another place", "color_aug": "given other colours"}
"""Keys of a subset by which a picture is another one each time; both ways round of flip_aug are kept."""


def validate_latent_caching(datasets: Iterable[DatasetConfig], cache: CacheConfig) -> Iterator[str]:
    """Pictures that are not the same each time have no latents that could be kept."""
    if not cache.caches_latents:
        return
    option = "cache_latents_to_disk" if cache.cache_latents_to_disk else "cache_latents"
    for dataset in datasets:
        for subset in dataset.subsets:
            for key, what in _RANDOM_AUGMENTATIONS.items():
                if getattr(subset, key):
                    yield (
                        f"{subset.locate(key)}: {key}: pictures are {what} each time, and {option} keeps one way;"
                        f" take out {key} or {option}"
                    )


def validate_paths(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Folders and files that the dataset file names and that are not there, with what was seen in their place."""
    for subset in _iter_subsets(datasets):
        metadata = subset.resolve_metadata_file()
        for key, folder in (
            ("image_dir", subset.resolve_image_dir()),
            ("conditioning_data_dir", subset.resolve_mask_dir()),
        ):
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


def validate_validation_options(datasets: Sequence[DatasetConfig], validate: ValidateConfig) -> Iterator[str]:
    """Settings of a validation that has no pictures."""
    if any(subset.validation_split for dataset in datasets for subset in dataset.subsets):
        return
    way_out = "no pictures are kept for validation; set validation_split, or leave this out"
    for option in fields(ValidateConfig):
        if getattr(validate, option.name) is not None:
            yield f"--{option.name}: {way_out}"
    places = {dataset.locate("validation_seed") for dataset in datasets if dataset.validation_seed is not None}
    for place in sorted(places):
        yield f"{place}: {way_out}" if place.startswith("--") else f"{place}: validation_seed: {way_out}"


def validate_masks(datasets: Sequence[DatasetConfig], config: DataConfig) -> Iterator[str]:
    """What is wrong with the settings, without a look at any folder.

    As in sd-scripts a folder of masks needs ``masked_loss`` and ``alpha_mask`` does not.
    """
    subsets = [subset for dataset in datasets for subset in dataset.subsets]
    sources = {get_mask_source(subset) for subset in subsets}
    for subset in subsets:
        folder, masks, place = (
            subset.resolve_image_dir(),
            subset.resolve_mask_dir(),
            subset.locate("conditioning_data_dir"),
        )
        if masks is None:
            continue
        if not config.masked_loss:
            yield f"{place}: conditioning_data_dir: masks in a folder are used with --masked_loss; set it for the run"
        if folder is None or not folder.is_dir() or not masks.is_dir():
            continue  # which is told elsewhere
        if folder.samefile(masks):
            yield f"{place}: conditioning_data_dir: is the folder of the pictures; masks need a folder of their own"
        elif subset.recursive and not subset.exclude and masks.resolve().is_relative_to(folder.resolve()):
            pattern = masks.resolve().relative_to(folder.resolve()).as_posix() + "/**"
            yield (
                f"{place}: conditioning_data_dir: lies below image_dir, where recursive takes masks for pictures;"
                f" move it, or set exclude = ['{pattern}']"
            )
    if not subsets:
        return
    way_out = "set conditioning_data_dir or alpha_mask in a subset, or take this option out"
    for name in ("masked_loss", "masked_loss_normalize"):
        if getattr(config, name) and sources == {None}:
            yield f"--{name}: no subset has masks; {way_out}"
    if config.alpha_mask and sources == {"folder"}:
        yield "--alpha_mask: every subset has its masks in conditioning_data_dir; take one of the two out"


def validate_dataset_config(
    config: DataConfig,
    cache: CacheConfig | None = None,
    validate: ValidateConfig | None = None,
    train: TrainConfig | None = None,
    invalid_flags: Set[str] = frozenset(),
) -> list[str]:
    """Everything that is wrong with the dataset file, without opening a picture or importing anything heavy.

    ``wrong`` are options of the run that could not be read.
    """
    if config.dataset_config is None or not Path(config.dataset_config).is_file():
        return []  # the rules across options say so
    reading = load_dataset_config(config, invalid_flags)
    datasets = reading.datasets
    found = [
        *reading.problems,
        *validate_paths(datasets),
        *validate_supported_features(datasets),
        *validate_masks(datasets, config),
    ]
    found += validate_latent_caching(datasets, cache or CacheConfig())
    found += validate_validation_options(datasets, validate or ValidateConfig())
    found += validate_stages(datasets, train)
    return list(dict.fromkeys(found))


def validate_resolution_multiple(datasets: Sequence[DatasetConfig], size_multiple: int) -> list[str]:
    """Sizes that the model cannot take."""
    problems = []
    for dataset in datasets:
        if dataset.enable_bucket:
            if (step := dataset.bucket_reso_steps) % size_multiple:
                problems.append(
                    f"{dataset.locate('bucket_reso_steps')}: bucket_reso_steps: {step} is no multiple of"
                    f" {size_multiple}, as this model needs; write {_round_to_multiple(step, size_multiple)}"
                )
            continue
        where = dataset.format_location("resolution" if dataset.resolution_schedule is None else "resolution_schedule")
        for size in [piece.resolution for piece in expand_resolution_schedule(dataset)]:
            if size.width % size_multiple or size.height % size_multiple:
                sides = [_round_to_multiple(side, size_multiple) for side in (size.width, size.height)]
                problems.append(
                    f"{where}: {size} is no multiple of {size_multiple} on each side, as this model needs;"
                    f" write {sides}"
                )
    return problems


def _round_to_multiple(value: int, multiple: int) -> int:
    """The multiple of ``step`` that is nearest, but not nothing."""
    return max(multiple, round(value / multiple) * multiple)
