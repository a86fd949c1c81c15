"""Validate dataset settings before any image is opened: paths, masks, caching, validation and stages of steps."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ..config.option_needs import Circumstances, explain_no_effect
from ..config.schema import TrainConfig
from ..config.schema_data import CacheConfig, DataConfig
from ..registry import suggest_name
from ..storage.filesystems import RemoteError
from ..storage.remote_path import RemotePath, is_remote, is_remote_url
from .controls import CONTROLS_FROM_IMAGE
from .dataset_config import can_load_datasets, load_dataset_config
from .file_discovery import describe_missing_path, describe_missing_url
from .masks import get_mask_source
from .resolution_stages import build_stages, expand_resolution_schedule
from .schema import DATASET_KEYS, DatasetConfig, SubsetConfig
from .sources import find_missing_sources

_RANDOM_AUGMENTATIONS = {"random_crop": "cropped", "color_aug": "recolored"}
"""Subset keys that change an image each time it is read; flip_aug is no problem, both versions are cached."""

MAX_SAMPLES_PER_EPOCH = 100_000_000
"""Repeats and dataset weights that need more than this are rejected."""

_SET_RUN_LENGTH = "the length of the run is set by --max_train_steps or --max_train_epochs"

_KNOWN_ATTRIBUTE = "diff_output_preservation"
"""The only custom attribute that has an effect in sd-scripts."""


def validate_dataset_config(
    config: DataConfig,
    cache: CacheConfig | None = None,
    train: TrainConfig | None = None,
    invalid_flags: Set[str] = frozenset(),
) -> list[str]:
    """List all problems of the datasets, without opening an image or importing anything heavy.

    ``invalid_flags`` are options of the run that could not be parsed and are reported already.
    """
    if not can_load_datasets(config):
        return []  # reported by the validation of the options
    parsed = load_dataset_config(config, invalid_flags)
    datasets = parsed.datasets
    problems = [
        *parsed.problems,
        *validate_paths(datasets),
        *validate_supported_features(datasets),
        *validate_repeats(datasets),
        *validate_masks(datasets),
        *validate_control_settings(datasets),
        *validate_latent_caching(datasets, cache or CacheConfig()),
        *validate_stages(datasets, train),
    ]
    return list(dict.fromkeys(problems))


def validate_paths(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield folders and files of the dataset file that do not exist, with what is there instead."""
    for subset in _iter_subsets(datasets):
        if is_remote(cache_directory := subset.resolve_cache_directory()):
            where = f"{subset.format_location('cache_directory')}: {cache_directory}"
            yield f"{where} is a URL; files are written to folders only, such as one that mounts the bucket"
        paths = (
            ("image_dir", subset.resolve_image_dir(), "folder"),
            ("conditioning_data_dir", subset.resolve_mask_dir(), "folder"),
            (subset.control_key or "control_directory", subset.resolve_control_dir(), "folder"),
            ("metadata_file", subset.resolve_metadata_file(), "file"),
        )
        for key, path, expected in paths:
            where = subset.format_location(key)
            if is_remote(path):
                yield from (f"{where}: {problem}" for problem in _validate_remote_path(path, expected))
                continue
            if path is None or (path.is_dir() if expected == "folder" else path.is_file()):
                continue
            if path.exists():
                yield f"{where}: {path} is a {'file' if expected == 'folder' else 'folder'}, not a {expected}"
            else:
                yield f"{where}: {describe_missing_path([str(path)], subset.dataset_file)}"
        yield from find_missing_sources(subset)


def _validate_remote_path(path: RemotePath, expected: str) -> Iterator[str]:
    """Yield why a remote folder or file cannot be used: the server, the credentials, or what is there."""
    try:
        if expected == "folder" and not path.can_list:
            path.list_folder(recursive=False)  # says what to give instead
        elif not (path.is_dir() if expected == "folder" else path.is_file()):
            is_other_kind = path.is_file() if expected == "folder" else path.is_dir()
            other = "file" if expected == "folder" else "folder"
            yield f"{path} is a {other}, not a {expected}" if is_other_kind else describe_missing_url([path])
    except RemoteError as error:
        yield f"{path}: {error}"


def _iter_subsets(datasets: Iterable[DatasetConfig]) -> Iterator[SubsetConfig]:
    for dataset in datasets:
        yield from dataset.subsets


def validate_supported_features(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield sd-scripts' settings that are not implemented; nothing is accepted and then ignored."""
    for dataset in datasets:
        if dataset.network_multiplier != 1:
            where = dataset.format_location("network_multiplier")
            yield f"{where}: not supported yet: values other than 1"
    for subset in _iter_subsets(datasets):
        if subset.face_crop_aug_range:
            where = subset.format_location("face_crop_aug_range")
            yield f"{where}: not supported yet: cropping around faces; crop the images beforehand"
        for name, value in (subset.custom_attributes or {}).items():
            where = f"{subset.format_location('custom_attributes')}: {name}"
            if name == _KNOWN_ATTRIBUTE and value:
                yield f"{where}: not supported yet: the loss against the output of the base model"
            elif name != _KNOWN_ATTRIBUTE and (hint := suggest_name(name, [_KNOWN_ATTRIBUTE])):
                yield f"{where}: unknown attribute{hint}"


def validate_repeats(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield repeats that are too many even for a single image."""
    for subset in _iter_subsets(datasets):
        if subset.num_repeats > MAX_SAMPLES_PER_EPOCH:
            where = subset.format_location("num_repeats")
            yield f"{where}: {subset.num_repeats} is too large; {_SET_RUN_LENGTH}"


def collect_subset_settings(datasets: Sequence[DatasetConfig]) -> list[dict[str, Any]]:
    """Collect what a dataset file sets for each subset, by the names of options, and what kinds of images it has.

    Settings that only an option of the run sets are left out: that option has them.
    """
    return [
        {**_collect_values(dataset, subset, is_from_file=True), **_find_kinds_of_images(dataset, subset)}
        for dataset in datasets
        for subset in dataset.subsets
    ]


def _collect_values(dataset: DatasetConfig, subset: SubsetConfig, *, is_from_file: bool) -> dict[str, Any]:
    values = dict[str, Any]()
    for key in DATASET_KEYS.values():
        table = _get_table(key.name, dataset, subset)
        is_option = key.flag is not None and table.locate(key.name).startswith("--")
        if not (is_from_file and is_option):
            values[key.flag or key.name] = getattr(table, key.name)
    return values


def _get_table(key: str, dataset: DatasetConfig, subset: SubsetConfig) -> DatasetConfig | SubsetConfig:
    return subset if hasattr(subset, key) else dataset


def _find_kinds_of_images(dataset: DatasetConfig, subset: SubsetConfig) -> dict[str, Any]:
    """Return what the needs of options ask about images: masks, control images, URLs, images of native size."""
    schedule = dataset.resolution_schedule
    has_table = bool(subset.metadata_file or subset.parquet)  # whose files may be URLs
    return {
        "mask_source": get_mask_source(subset),
        "has_controls": _can_have_controls(subset),
        "has_native_stage": schedule is not None and schedule.has_native,
        "is_remote": has_table or is_remote(subset.resolve_image_dir()) or any(map(is_remote_url, subset.webdataset)),
    }


def find_unused_keys(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield keys of the file that have no effect next to others; sd-scripts accepts them, so these are notes."""
    reasons = defaultdict[tuple[str, str], list[str | None]](list)
    for dataset, subset in ((each, subset) for each in datasets for subset in each.subsets):
        values = _collect_values(dataset, subset, is_from_file=False) | _find_kinds_of_images(dataset, subset)
        for key in DATASET_KEYS.values():
            table = _get_table(key.name, dataset, subset)
            location = table.locations.get(key.name, "--")
            if location.startswith("--") or key.option.needs is None:
                continue
            unmet = explain_no_effect(key.option, [Circumstances(values)])
            is_asked = unmet is not None and (
                unmet[0].counts_for_defaults or not key.option.is_off(getattr(table, key.name))
            )
            reasons[location, key.name].append(unmet[1] if unmet is not None and is_asked else None)
    for (location, name), found in reasons.items():
        if all(found):  # a key of [general] may have an effect on some subsets only
            yield f"{location}: {name}: not used, because {found[0]}"
    for subset in _iter_subsets(datasets):
        if names := set(subset.custom_attributes or {}) - {_KNOWN_ATTRIBUTE}:
            where = subset.format_location("custom_attributes")
            yield f"{where}: {', '.join(sorted(names))}: not used, training reads no such attributes"


def validate_masks(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield problems of mask folders; as in sd-scripts they need ``masked_loss``, ``alpha_mask`` does not."""
    for subset in _iter_subsets(datasets):
        if get_mask_source(subset) == "folder":
            yield from _validate_second_dir(subset, "conditioning_data_dir", subset.resolve_mask_dir(), "masks")


def validate_control_settings(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield problems of the folders and sizes of control images."""
    for subset in _iter_subsets(datasets):
        if (key := subset.control_key) is not None:
            yield from _validate_second_dir(subset, key, subset.resolve_control_dir(), "control images")
        yield from _validate_control_from_image(subset)
        if subset.control_directory is not None and subset.conditioning_is_control:
            where = subset.format_location("conditioning_data_dir")
            yield f"{where}: control_directory is set too; remove one of the two, or set --masked_loss if it has masks"


def _can_have_controls(subset: SubsetConfig) -> bool:
    return any((subset.control_key, subset.metadata_file, subset.control_from_image, subset.parquet, subset.webdataset))


def _validate_control_from_image(subset: SubsetConfig) -> Iterator[str]:
    kind, where = subset.control_from_image, subset.format_location("control_from_image")
    if kind == "depth":
        yield f"{where}: no depth model is part of this program; set control_directory to depth maps made elsewhere"
    elif kind is not None and kind not in CONTROLS_FROM_IMAGE:
        hint = suggest_name(kind, CONTROLS_FROM_IMAGE)
        yield f"{where}: expected {', '.join(CONTROLS_FROM_IMAGE)}, got {kind!r}{hint}"


def _validate_second_dir(subset: SubsetConfig, key: str, folder: Path | None, content: str) -> Iterator[str]:
    """Yield problems of a folder of masks or control images next to ``image_dir``."""
    image_dir, where = subset.resolve_image_dir(), subset.format_location(key)
    if image_dir is None or folder is None or is_remote(image_dir) != is_remote(folder):
        return
    if not is_remote(image_dir) and not (image_dir.is_dir() and folder.is_dir()):
        return  # reported by validate_paths
    if image_dir.samefile(folder):
        yield f"{where}: is the same folder as image_dir; put the {content} into a folder of their own"
    elif subset.recursive and not subset.exclude and folder.resolve().is_relative_to(image_dir.resolve()):
        pattern = folder.resolve().relative_to(image_dir.resolve()).as_posix() + "/**"
        yield (
            f"{where}: is inside image_dir, so that recursive lists the {content} as images; move it, or set"
            f" exclude = ['{pattern}']"
        )


def validate_latent_caching(datasets: Iterable[DatasetConfig], cache: CacheConfig) -> Iterator[str]:
    """Yield random augmentations of images whose latents are to be cached."""
    if not cache.caches_latents:
        return
    option = "cache_latents_to_disk" if cache.cache_latents_to_disk else "cache_latents"
    for subset in _iter_subsets(datasets):
        for key, change in _RANDOM_AUGMENTATIONS.items():
            if getattr(subset, key):
                yield (
                    f"{subset.format_location(key)}: cannot be used with {option}, because images are {change} at"
                    " random each time; remove one of the two"
                )
        if CONTROLS_FROM_IMAGE.get(subset.control_from_image or ""):
            where = f"{subset.format_location('control_from_image')}: {subset.control_from_image}"
            yield f"{where} cannot be used with {option}, because it is drawn anew each time; remove {option}"


def validate_resolution_multiple(
    datasets: Sequence[DatasetConfig], size_multiple: int, model: str = "this model"
) -> list[str]:
    """List resolutions and bucket steps that are not multiples of what the model needs."""
    problems = []
    for where, sides in _iter_sizes(datasets):
        if not any(side % size_multiple for side in sides):
            continue
        rounded = [_round_to_multiple(side, size_multiple) for side in sides]
        multiple, fix = (size_multiple, rounded[0]) if len(sides) == 1 else (f"{size_multiple} on each side", rounded)
        size = _format_sides(sides)
        problems.append(f"{where}: {size} is not a multiple of {multiple}, which {model} needs; set {fix}")
    return problems


def find_sizes_for_some_models(datasets: Sequence[DatasetConfig], size_multiples: Mapping[str, int]) -> Iterator[str]:
    """Yield resolutions and bucket steps that some models reject, for a plan without a model."""
    for where, sides in dict.fromkeys(_iter_sizes(datasets)):
        rejecting = [
            f"{title} ({step})" for title, step in size_multiples.items() if any(side % step for side in sides)
        ]
        if rejecting:
            yield (
                f"{where}: {_format_sides(sides)} is not a multiple of what these models need: {', '.join(rejecting)};"
                " give --pretrained_model_name_or_path to check yours"
            )


def _iter_sizes(datasets: Sequence[DatasetConfig]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the bucket steps, or width and height of each resolution without buckets, and where they are set."""
    for dataset in datasets:
        if dataset.enable_bucket:
            yield dataset.format_location("bucket_reso_steps"), (dataset.bucket_reso_steps,)
            continue
        where = dataset.format_location("resolution" if dataset.resolution_schedule is None else "resolution_schedule")
        for size in [expanded.resolution for expanded in expand_resolution_schedule(dataset)]:
            yield where, (size.width, size.height)


def _format_sides(sides: Sequence[int]) -> str:
    return ",".join(map(str, sides))


def _round_to_multiple(value: int, multiple: int) -> int:
    """Round to the nearest multiple above zero."""
    return max(multiple, round(value / multiple) * multiple)


def validate_stages(datasets: Sequence[DatasetConfig], train: TrainConfig | None = None) -> Iterator[str]:
    """Yield contradictions in the steps of datasets, steps without training images, and a run length that differs."""
    problems = [problem for dataset in datasets for problem in _validate_dataset_steps(dataset)]
    yield from problems
    if problems or not datasets:
        return
    stages, location = build_stages(datasets), _locate_steps(datasets)
    for stage in stages:
        if all(subset.is_reg for subset in _iter_subsets(stage.datasets)):
            steps = f"from step {stage.first_step} {'on' if stage.end_step is None else f'to {stage.end_step}'}"
            yield f"{location}: no dataset to train on {steps}"
    if train is not None and train.max_train_epochs is None and train.max_train_steps:
        yield from validate_run_length(stages[-1].first_step, stages[-1].end_step, train.max_train_steps, location)


def validate_run_length(
    first_step: int, end_step: int | None, total_steps: int, location: str = "steps of datasets"
) -> Iterator[str]:
    """Yield a problem unless a run of ``total_steps`` reaches the last stage, from ``first_step``, and ends with it."""
    fix = "change the steps there, or set --max_train_steps"
    if first_step >= total_steps:
        yield f"{location}: the last stage starts at step {first_step}, but the run has only {total_steps} steps; {fix}"
    elif end_step is not None and end_step < total_steps:
        yield (
            f"{location}: the last stage ends at step {end_step}, but the run has {total_steps} steps; {fix}, or"
            " leave out the last number of steps"
        )
    elif end_step is not None and end_step > total_steps:
        yield f"{location}: the last stage ends at step {end_step}, but the run has only {total_steps} steps; {fix}"


def validate_stages_not_empty(datasets: Sequence[DatasetConfig], used_datasets: Set[int]) -> Iterator[str]:
    """Yield a problem if a stage has no images; ``used_datasets`` are the indices of datasets with training images."""
    used = {datasets[index].from_step for index in used_datasets}
    if empty := {dataset.from_step for dataset in datasets} - used:
        yield "no images left to train on" + (f" from step {min(empty)} on" if max(empty) else "")


def validate_epoch_length(
    datasets: Sequence[DatasetConfig], weight_factors: Mapping[int, float], samples_per_epoch: float
) -> Iterator[str]:
    """Yield a problem if repeats are so many, or weights so different, that an epoch would be absurdly long."""
    if samples_per_epoch <= MAX_SAMPLES_PER_EPOCH:
        return
    if weight_factors:
        heaviest = max(weight_factors, key=lambda number: weight_factors[number])
        where, fix = datasets[heaviest].format_location("weight"), "choose less different weights"
    else:
        subset = max(_iter_subsets(datasets), key=lambda subset: subset.num_repeats)
        where, fix = subset.format_location("num_repeats"), f"lower it; {_SET_RUN_LENGTH}"
    yield (
        f"{where}: an epoch would have {samples_per_epoch:.3g} images with repeats, more than"
        f" {MAX_SAMPLES_PER_EPOCH}; {fix}"
    )


def _validate_dataset_steps(dataset: DatasetConfig) -> Iterator[str]:
    schedule = dataset.resolution_schedule
    if dataset.to_step is not None and dataset.to_step <= dataset.from_step:
        yield f"{dataset.format_location('to_step')}: {dataset.to_step} is not above from_step {dataset.from_step}"
    if schedule is None:
        return
    where = dataset.format_location("resolution_schedule")
    for key, default in (("from_step", 0), ("to_step", None)):
        if getattr(dataset, key) != default:
            yield f"{dataset.format_location(key)}: resolution_schedule sets the steps already; remove {key}"
    if schedule.has_native and not dataset.enable_bucket:
        yield f"{where}: native needs buckets; set enable_bucket = true"
    elif schedule.has_native and dataset.bucket_mode == "symmetric":
        yield f"{where}: native keeps the size of each image, but symmetric buckets all have one area; remove native"
    step = dataset.bucket_reso_steps
    for size in [entry.resolution for entry in schedule.entries if dataset.enable_bucket and entry.resolution]:
        if min(size.width, size.height) < step:
            yield f"{where}: {size} is too small for a bucket with bucket_reso_steps {step}"


def _locate_steps(datasets: Sequence[DatasetConfig]) -> str:
    """Return the first location that sets steps."""
    for dataset in datasets:
        for key in ("resolution_schedule", "from_step", "to_step"):
            if getattr(dataset, key):
                return dataset.format_location(key)
    return "--dataset_config"
