"""Validate dataset settings before any image is opened: paths, masks, caching, validation and stages of steps."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ..config.option_needs import Circumstances, explain_no_effect
from ..config.schema import TrainConfig
from ..config.schema_data import CacheConfig, DataConfig
from ..name_suggestions import suggest_name
from ..problems import Place, Problem
from ..storage.filesystems import RemoteError
from ..storage.remote_path import RemotePath, is_remote, is_remote_url
from .controls import CONTROLS_FROM_IMAGE
from .dataset_config import can_load_datasets, load_dataset_config
from .file_discovery import describe_missing_path, describe_missing_url
from .mask_files import get_mask_source
from .metadata_file import find_missing_frame_keys
from .musubi_format import set_musubi_bucket_steps
from .resolution_stages import build_stages, expand_resolution_schedule
from .schema import DATASET_KEYS, DatasetConfig, SubsetConfig
from .sources import find_missing_sources
from .validate_keys import describe_too_small_area

_RANDOM_AUGMENTATIONS = {"random_crop": "cropped", "face_crop_aug_range": "cropped", "color_aug": "recolored"}
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
) -> list[Problem]:
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
        *validate_clip_settings(datasets),
        *validate_latent_caching(datasets, cache or CacheConfig()),
        *validate_stages(datasets, train),
    ]
    return list(dict.fromkeys(problems))


def validate_paths(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Yield folders and files of the dataset file that do not exist, with what is there instead."""
    for subset in _iter_subsets(datasets):
        if is_remote(cache_directory := subset.resolve_cache_directory()):
            fix = "files are written to folders only, such as one that mounts the bucket"
            yield subset.report("cache_directory", f"{cache_directory} is a URL", fix)
        paths = (
            ("image_dir" if subset.video_dir is None else "video_dir", subset.resolve_image_dir(), "folder"),
            ("conditioning_data_dir", subset.resolve_mask_dir(), "folder"),
            (subset.control_key or "control_directory", subset.resolve_control_dir(), "folder"),
            ("metadata_file", subset.resolve_metadata_file(), "file"),
        )
        for key, path, expected in paths:
            if is_remote(path):
                if text := _describe_remote_error(path, expected):
                    yield subset.report(key, text)
                continue
            if path is None or (path.is_dir() if expected == "folder" else path.is_file()):
                continue
            if path.exists():
                found = "file" if expected == "folder" else "folder"
                yield subset.report(key, f"{path} is a {found}, not a {expected}")
            else:
                yield subset.report(key, describe_missing_path([str(path)], subset.dataset_file))
        yield from find_missing_sources(subset)


def _describe_remote_error(path: RemotePath, expected: str) -> str:
    """Return why a remote folder or file cannot be used: the server, the credentials, or what is there."""
    try:
        if expected == "folder" and not path.can_list:
            path.list_folder(recursive=False)  # says what to give instead
        elif not (path.is_dir() if expected == "folder" else path.is_file()):
            is_other_kind = path.is_file() if expected == "folder" else path.is_dir()
            other = "file" if expected == "folder" else "folder"
            return f"{path} is a {other}, not a {expected}" if is_other_kind else describe_missing_url([path])
    except RemoteError as error:
        return f"{path}: {error}"
    return ""


def _iter_subsets(datasets: Iterable[DatasetConfig]) -> Iterator[SubsetConfig]:
    for dataset in datasets:
        yield from dataset.subsets


def validate_supported_features(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Yield sd-scripts' settings that are not implemented; nothing is accepted and then ignored."""
    for dataset in datasets:
        if dataset.network_multiplier == 0:
            yield dataset.report("network_multiplier", "0 trains nothing")
    for subset in _iter_subsets(datasets):
        for name, value in (subset.custom_attributes or {}).items():
            if name == _KNOWN_ATTRIBUTE and value:
                text = f"{name}: not supported yet: the loss against the output of the base model"
                yield subset.report("custom_attributes", text)
            elif name != _KNOWN_ATTRIBUTE and (hint := suggest_name(name, [_KNOWN_ATTRIBUTE])):
                yield subset.report("custom_attributes", f"{name}: unknown attribute{hint}")


def validate_repeats(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Yield repeats that are too many even for a single image."""
    for subset in _iter_subsets(datasets):
        if subset.num_repeats > MAX_SAMPLES_PER_EPOCH:
            yield subset.report("num_repeats", f"{subset.num_repeats} is too large", _SET_RUN_LENGTH)


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
        is_option = key.flag is not None and bool(table.locate(key.name).flag)
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
        "has_clips": _can_have_clips(subset),
        "has_native_stage": schedule is not None and schedule.has_native,
        "file_format": dataset.file_format,
        "is_remote": has_table or is_remote(subset.resolve_image_dir()) or any(map(is_remote_url, subset.webdataset)),
    }


def find_unused_keys(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield keys of the file that have no effect next to others; sd-scripts accepts them, so these are notes."""
    reasons = defaultdict[Place, list[str | None]](list)
    for dataset, subset in ((each, subset) for each in datasets for subset in each.subsets):
        values = _collect_values(dataset, subset, is_from_file=False) | _find_kinds_of_images(dataset, subset)
        for key in DATASET_KEYS.values():
            table = _get_table(key.name, dataset, subset)
            if not table.is_set_in_file(key.name) or key.option.needs is None:
                continue
            unmet = explain_no_effect(key.option, [Circumstances(values)])
            is_asked = unmet is not None and (
                unmet[0].counts_for_defaults or not key.option.is_off(getattr(table, key.name))
            )
            reasons[table.locate(key.name)].append(unmet[1] if unmet is not None and is_asked else None)
    for place, found in reasons.items():
        if all(found):  # a key of [general] may have an effect on some subsets only
            yield f"{place}: not used, because {found[0]}"
    for subset in _iter_subsets(datasets):
        if names := set(subset.custom_attributes or {}) - {_KNOWN_ATTRIBUTE}:
            where = subset.locate("custom_attributes")
            yield f"{where}: {', '.join(sorted(names))}: not used, training reads no such attributes"


def validate_masks(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Yield problems of mask folders; as in sd-scripts they need ``masked_loss``, ``alpha_mask`` does not."""
    for subset in _iter_subsets(datasets):
        if get_mask_source(subset) == "folder":
            yield from _validate_second_dir(subset, "conditioning_data_dir", subset.resolve_mask_dir(), "masks")


def validate_control_settings(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Yield problems of the folders and sizes of control images."""
    for subset in _iter_subsets(datasets):
        if (key := subset.control_key) is not None:
            yield from _validate_second_dir(subset, key, subset.resolve_control_dir(), "control images")
        yield from _validate_control_from_image(subset)
        if subset.control_directory is not None and subset.conditioning_is_control:
            fix = "remove one of the two, or set --masked_loss if it has masks"
            yield subset.report("conditioning_data_dir", "control_directory is set too", fix)


_KEYS_FOR_IMAGES_ONLY = {
    "alpha_mask": "clips have no alpha channel here; put a mask for all frames into conditioning_data_dir",
    "color_aug": "changes each frame in another way",
    "control_from_image": "makes control images of single images",
}
"""Subset keys that clips do not support, and why."""


def _can_have_clips(subset: SubsetConfig) -> bool:
    return bool(subset.video_dir or subset.metadata_file)


def validate_clip_settings(datasets: Sequence[DatasetConfig]) -> Iterator[Problem]:
    """Yield problems of folders of clips: keys that only images have, missing lengths, and URLs."""
    for subset in _iter_subsets(datasets):
        if subset.video_dir is None:
            continue
        if is_remote(subset.resolve_image_dir()):
            yield subset.report("video_dir", "clips cannot be read from URLs", "download them")
        for key, reason in _KEYS_FOR_IMAGES_ONLY.items():
            if getattr(subset, key):
                yield subset.report(key, reason, "remove it for clips")
        if problem := find_missing_frame_keys(subset):
            yield problem


def find_clips_for_image_models(datasets: Sequence[DatasetConfig], title: str, video_models: str) -> list[Problem]:
    """Find the folders of clips of a run whose model makes images only."""
    subsets = [subset for subset in _iter_subsets(datasets) if subset.video_dir is not None]
    return [report_clips(subset, title, video_models) for subset in subsets]


def report_clips(subset: SubsetConfig, title: str = "this model", video_models: str = "") -> Problem:
    """Build the problem of clips for a model that makes images only."""
    models = f" ({video_models})" if video_models else ""
    fix = f"choose a model of videos{models}, or train single frames as images"
    return subset.report(subset.source_key, f"{title} makes images, not videos", fix)


def find_untimed_clips(subsets: Iterable[SubsetConfig]) -> Iterator[Problem]:
    """Find the clips of a run that trains sound whose frames are counted, so that their sound has no time."""
    for subset in subsets:
        if subset.source_fps is not None:
            reason, fix = "frames are counted, not timed, so that their sound is unknown (train_audio)", "remove it"
            yield subset.report("source_fps", reason, fix, others=("train_audio",))
        elif subset.keeps_all_frames:
            reason = "without source_fps all frames are used, whatever their times, so that their sound is unknown"
            fix = "set video_dir instead, or remove train_audio"
            yield subset.report(subset.source_key, f"{reason} (train_audio)", fix, others=("train_audio",))


def _can_have_controls(subset: SubsetConfig) -> bool:
    return any((subset.control_key, subset.metadata_file, subset.control_from_image, subset.parquet, subset.webdataset))


def _validate_control_from_image(subset: SubsetConfig) -> Iterator[Problem]:
    key, kind = "control_from_image", subset.control_from_image
    if kind == "depth":
        fix = "set control_directory to depth maps made elsewhere"
        yield subset.report(key, "no depth model is part of this program", fix)
    elif kind is not None and kind not in CONTROLS_FROM_IMAGE:
        hint = suggest_name(kind, CONTROLS_FROM_IMAGE)
        yield subset.report(key, f"expected {', '.join(CONTROLS_FROM_IMAGE)}, got {kind!r}{hint}")


def _validate_second_dir(subset: SubsetConfig, key: str, folder: Path | None, content: str) -> Iterator[Problem]:
    """Yield problems of a folder of masks or control images next to ``image_dir``."""
    image_dir = subset.resolve_image_dir()
    if image_dir is None or folder is None or is_remote(image_dir) != is_remote(folder):
        return
    if not is_remote(image_dir) and not (image_dir.is_dir() and folder.is_dir()):
        return  # reported by validate_paths
    if image_dir.samefile(folder):
        yield subset.report(key, "is the same folder as image_dir", f"put the {content} into a folder of their own")
    elif subset.recursive and not subset.exclude and folder.resolve().is_relative_to(image_dir.resolve()):
        pattern = folder.resolve().relative_to(image_dir.resolve()).as_posix() + "/**"
        text = f"is inside image_dir, so that recursive lists the {content} as images"
        yield subset.report(key, text, f"move it, or set exclude = ['{pattern}']")


def validate_latent_caching(datasets: Iterable[DatasetConfig], cache: CacheConfig) -> Iterator[Problem]:
    """Yield random augmentations of images whose latents are to be cached."""
    if not cache.caches_latents:
        return
    option = "cache_latents_to_disk" if cache.cache_latents_to_disk else "cache_latents"
    for subset, is_in_buckets in ((each, dataset.enable_bucket) for dataset in datasets for each in dataset.subsets):
        for key, change in _RANDOM_AUGMENTATIONS.items():
            if getattr(subset, key) and not (key == "face_crop_aug_range" and is_in_buckets):
                text = f"cannot be used with {option}, because images are {change} at random each time"
                yield subset.report(key, text, "remove one of the two", others=(option,))
        if CONTROLS_FROM_IMAGE.get(subset.control_from_image or ""):
            kind = subset.control_from_image
            text = f"{kind} cannot be used with {option}, because it is drawn anew each time"
            yield subset.report("control_from_image", text, f"remove {option}", others=(option,))


def validate_resolution_multiple(
    datasets: Sequence[DatasetConfig], size_multiple: int, model: str = "this model"
) -> list[Problem]:
    """List resolutions and bucket steps that are not multiples of what the model needs."""
    problems = list[Problem]()
    for dataset in set_musubi_bucket_steps(datasets, size_multiple):
        if dataset.file_format == "musubi-tuner" and dataset.enable_bucket:
            problems += _find_too_small_areas(dataset, model)
    for key, place, sides in _iter_sizes(datasets):
        if not any(side % size_multiple for side in sides):
            continue
        rounded = [_round_to_multiple(side, size_multiple) for side in sides]
        multiple, fix = (size_multiple, rounded[0]) if len(sides) == 1 else (f"{size_multiple} on each side", rounded)
        size = _format_sides(sides)
        problems.append(
            Problem(key, f"{size} is not a multiple of {multiple}, which {model} needs", f"set {fix}", place)
        )
    return problems


def _find_too_small_areas(dataset: DatasetConfig, model: str) -> Iterator[Problem]:
    """Yield resolutions that leave no bucket in the steps that the model needs."""
    key = "resolution" if dataset.resolution_schedule is None else "resolution_schedule"
    for size in dict.fromkeys(expanded.resolution for expanded in expand_resolution_schedule(dataset)):
        if text := describe_too_small_area(size, dataset.bucket_reso_steps):
            yield dataset.report(key, f"{text} ({model})")


def find_sizes_for_some_models(datasets: Sequence[DatasetConfig], size_multiples: Mapping[str, int]) -> Iterator[str]:
    """Yield resolutions and bucket steps that some models reject, for a plan without a model."""
    for _, place, sides in dict.fromkeys(_iter_sizes(datasets)):
        rejecting = [
            f"{title} ({step})" for title, step in size_multiples.items() if any(side % step for side in sides)
        ]
        if rejecting:
            yield (
                f"{place}: {_format_sides(sides)} is not a multiple of what these models need: {', '.join(rejecting)};"
                " give --pretrained_model_name_or_path to check yours"
            )


def _iter_sizes(datasets: Sequence[DatasetConfig]) -> Iterator[tuple[str, Place, tuple[int, ...]]]:
    """Yield key, place and value of the bucket steps, or of width and height of each resolution without buckets."""
    for dataset in datasets:
        if dataset.enable_bucket and dataset.file_format == "musubi-tuner":
            continue  # its steps are those of the model
        if dataset.enable_bucket:
            yield "bucket_reso_steps", dataset.locate("bucket_reso_steps"), (dataset.bucket_reso_steps,)
            continue
        key = "resolution" if dataset.resolution_schedule is None else "resolution_schedule"
        for size in [expanded.resolution for expanded in expand_resolution_schedule(dataset)]:
            yield key, dataset.locate(key), (size.width, size.height)


def _format_sides(sides: Sequence[int]) -> str:
    return ",".join(map(str, sides))


def _round_to_multiple(value: int, multiple: int) -> int:
    """Round to the nearest multiple above zero."""
    return max(multiple, round(value / multiple) * multiple)


def validate_stages(datasets: Sequence[DatasetConfig], train: TrainConfig | None = None) -> Iterator[Problem]:
    """Yield contradictions in the steps of datasets, steps without training images, and a run length that differs."""
    problems = [problem for dataset in datasets for problem in _validate_dataset_steps(dataset)]
    yield from problems
    if problems or not datasets:
        return
    if any(all(subset.is_reg for subset in dataset.subsets) for dataset in datasets):
        return  # a dataset without images to train on, which its own keys report
    stages, (key, place) = build_stages(datasets), _locate_steps(datasets)
    for stage in stages:
        if all(subset.is_reg for subset in _iter_subsets(stage.datasets)):
            steps = f"from step {stage.first_step} {'on' if stage.end_step is None else f'to {stage.end_step}'}"
            yield Problem(key, f"no dataset to train on {steps}", place=place)
    if train is not None and train.max_train_epochs is None and train.max_train_steps:
        yield from validate_run_length(
            stages[-1].first_step, stages[-1].end_step, train.max_train_steps, key=key, place=place
        )


def validate_run_length(
    first_step: int,
    end_step: int | None,
    total_steps: int,
    *,
    key: str = "",
    place: Place | None = None,
    value: str = "",
) -> Iterator[Problem]:
    """Yield a problem unless a run of ``total_steps`` reaches the last stage, from ``first_step``, and ends with it.

    ``key``, ``place`` and ``value`` are those of the setting with which the steps do not agree.
    """
    fix = "change the steps there, or set --max_train_steps"
    if first_step >= total_steps:
        text = f"the last stage starts at step {first_step}, but the run has only {total_steps} steps"
    elif end_step is not None and end_step < total_steps:
        text = f"the last stage ends at step {end_step}, but the run has {total_steps} steps"
        fix = f"{fix}, or leave out the last number of steps"
    elif end_step is not None and end_step > total_steps:
        text = f"the last stage ends at step {end_step}, but the run has only {total_steps} steps"
    else:
        return
    yield Problem(key, text, fix, place if key else Place(flag="steps of datasets"), value)


def validate_stages_not_empty(datasets: Sequence[DatasetConfig], used_datasets: Set[int]) -> Iterator[Problem]:
    """Yield a problem if a stage has no images; ``used_datasets`` are the indices of datasets with training images."""
    used = {datasets[index].from_step for index in used_datasets}
    if empty := {dataset.from_step for dataset in datasets} - used:
        yield Problem("", f"no images left to train on{f' from step {min(empty)} on' if max(empty) else ''}")


def validate_epoch_length(
    datasets: Sequence[DatasetConfig], weight_factors: Mapping[int, float], samples_per_epoch: float
) -> Iterator[Problem]:
    """Yield a problem if repeats are so many, or weights so different, that an epoch would be absurdly long."""
    if samples_per_epoch <= MAX_SAMPLES_PER_EPOCH:
        return
    text = f"an epoch would have {samples_per_epoch:.3g} images with repeats, more than {MAX_SAMPLES_PER_EPOCH}"
    if weight_factors:
        heaviest = max(weight_factors, key=lambda number: weight_factors[number])
        yield datasets[heaviest].report("weight", text, "choose less different weights")
    else:
        subset = max(_iter_subsets(datasets), key=lambda subset: subset.num_repeats)
        yield subset.report("num_repeats", text, f"lower it; {_SET_RUN_LENGTH}")


def _validate_dataset_steps(dataset: DatasetConfig) -> Iterator[Problem]:
    schedule = dataset.resolution_schedule
    if dataset.to_step is not None and dataset.to_step <= dataset.from_step:
        yield dataset.report("to_step", f"{dataset.to_step} is not above from_step {dataset.from_step}")
    if schedule is None:
        return
    for key, default in (("from_step", 0), ("to_step", None)):
        if getattr(dataset, key) != default:
            yield dataset.report(key, "resolution_schedule sets the steps already", f"remove {key}")
    if schedule.has_native and not dataset.enable_bucket:
        yield dataset.report("resolution_schedule", "native needs buckets", "set enable_bucket = true")
    elif schedule.has_native and dataset.bucket_mode == "symmetric":
        text = "native keeps the size of each image, but symmetric buckets all have one area"
        yield dataset.report("resolution_schedule", text, "remove native")
    step = dataset.bucket_reso_steps
    others = ("bucket_reso_steps",) if dataset.locate("bucket_reso_steps").flag else ()
    has_kohya_buckets = dataset.enable_bucket and dataset.file_format == "sd-scripts"
    for size in [entry.resolution for entry in schedule.entries if has_kohya_buckets and entry.resolution]:
        if min(size.width, size.height) < step:
            text = f"{size} is too small for a bucket with bucket_reso_steps {step}"
            yield dataset.report("resolution_schedule", text, others=others)


def _locate_steps(datasets: Sequence[DatasetConfig]) -> tuple[str, Place | None]:
    """Return the first key that sets steps, and where."""
    for dataset in datasets:
        for key in ("resolution_schedule", "from_step", "to_step"):
            if getattr(dataset, key):
                return key, dataset.locate(key)
    return "dataset_config", None
