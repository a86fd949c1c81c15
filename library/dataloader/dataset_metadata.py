"""Build the dataset metadata of a LoRA file: sd-scripts' ``ss_*`` keys, with names of folders and no paths."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import PureWindowsPath
from typing import Any

from ..dataset.schema import DatasetConfig, SubsetConfig
from ..storage.remote_path import strip_query
from .buckets import BucketAssignment
from .manifest import Manifest, Sample

SampleRows = Sequence[tuple[Sample, BucketAssignment]]


def build_dataset_metadata(manifest: Manifest, assignments: Sequence[BucketAssignment], dp_size: int) -> dict[str, str]:
    """Build ``ss_datasets``, ``ss_tag_frequency``, ``ss_dataset_dirs`` and, for one dataset, its own keys."""
    rows: list[list[tuple[Sample, BucketAssignment]]] = [[] for _ in manifest.datasets]
    for sample, assignment in zip(manifest.samples, assignments, strict=True):
        rows[sample.dataset_index].append((sample, assignment))
    datasets = [_build_dataset_entry(config, own) for config, own in zip(manifest.datasets, rows, strict=True)]
    # Of a dataset with several stages, the last one.
    latest = {config.dataset_index_in_file: index for index, config in enumerate(manifest.datasets)}.values()
    frequency: dict[str, Any] = {}
    folders: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for index in latest:
        for name, tags in datasets[index]["tag_frequency"].items():
            frequency[_make_unique_name(name, frequency)] = tags
        for subset_index, subset in enumerate(manifest.datasets[index].subsets):
            own_folders = folders[subset.is_reg]
            count = sum(sample.subset_index == subset_index for sample, _ in rows[index])
            name = _make_unique_name(_get_source_name(subset), own_folders)
            own_folders[name] = {"n_repeats": subset.num_repeats, "img_count": count}
    values = {
        "ss_datasets": datasets,
        "ss_tag_frequency": frequency,
        "ss_dataset_dirs": folders[False],
        "ss_reg_dataset_dirs": folders[True],
    }
    metadata = {key: json.dumps(value) for key, value in values.items()}
    if len(latest) == 1:
        metadata |= _build_single_dataset_entries(manifest.datasets[-1], datasets[-1], dp_size)
    return metadata


def _get_source_name(subset: SubsetConfig) -> str:
    """Return the last part of the path of the images; metadata never has whole paths."""
    first = (subset.parquet or subset.webdataset or (str(subset.metadata_file or subset.image_dir),))[0]
    return PureWindowsPath(strip_query(first)).name or "images"


def _make_unique_name(name: str, taken_names: dict[str, Any]) -> str:
    """Number folders of the same name, as sd-scripts does."""
    number, free = 2, name
    while free in taken_names:
        free, number = f"{name} ({number})", number + 1
    return free


def _build_single_dataset_entries(config: DatasetConfig, dataset: dict[str, Any], dp_size: int) -> dict[str, str]:
    width, height = dataset["resolution"]
    keys = ("enable_bucket", "bucket_no_upscale", *_list_limit_keys(config))
    return {
        "ss_bucket_info": json.dumps(dataset["bucket_info"]),
        "ss_batch_size_per_device": str(config.batch_size),
        "ss_total_batch_size": str(config.batch_size * dp_size),
        "ss_resolution": f"({width}, {height})",
        **{f"ss_{key}": str(getattr(config, key)) for key in keys},
        **_build_common_subset_entries(config),
    }


def _list_limit_keys(config: DatasetConfig) -> tuple[str, ...]:
    """List the keys that limit the sides of buckets, which musubi-tuner's do not have."""
    return ("min_bucket_reso", "max_bucket_reso") if config.file_format == "sd-scripts" else ()


def _build_common_subset_entries(config: DatasetConfig) -> dict[str, str]:
    """Build the keys that sd-scripts writes of a run without dataset file, where all subsets have the same value."""
    values = {key: {getattr(subset, key) for subset in config.subsets} for key in _RUN_KEYS_OF_SUBSETS}
    return {f"ss_{key}": str(each.pop()) for key, each in values.items() if len(each) == 1}


def _build_dataset_entry(config: DatasetConfig, rows: SampleRows) -> dict[str, Any]:
    tags: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for sample, _ in rows:
        words = (word.strip().lower() for word in sample.caption.replace("\n", ",").split(","))
        tags[_get_source_name(config.subsets[sample.subset_index])].update(word for word in words if word)
    return {
        "is_dreambooth": config.kind != "finetuning",
        "batch_size_per_device": config.batch_size,
        "num_train_images": round(sum(sample.repeats for sample, _ in rows if not sample.is_reg)),
        "num_reg_images": round(sum(sample.repeats for sample, _ in rows if sample.is_reg)),
        "resolution": [config.resolution.width, config.resolution.height],
        **({"from_step": config.from_step, "to_step": config.to_step} if config.from_step or config.to_step else {}),
        "enable_bucket": config.enable_bucket,
        **{key: getattr(config, key) for key in _list_limit_keys(config)},
        "resize_interpolation": config.resize_interpolation,
        "tag_frequency": {name: dict(sorted(counts.items())) for name, counts in tags.items()},
        "bucket_info": _build_bucket_info(rows) if config.enable_bucket else None,
        "subsets": [_build_subset_entry(config, index, rows) for index in range(len(config.subsets))],
    }


def _build_bucket_info(rows: SampleRows) -> dict[str, Any]:
    counts: Counter[tuple[int, ...]] = Counter()  # by width, height and, of clips, frames
    errors = []
    for sample, assignment in rows:
        width, height = assignment.bucket_resolution
        size = (width, height, sample.num_frames) if sample.num_frames > 1 else (width, height)
        counts[size] += round(sample.repeats)
        errors.append(abs(width / height - sample.size[0] / sample.size[1]))
    buckets = {
        str(number): {"resolution": list(size), "count": count}
        for number, (size, count) in enumerate(sorted(counts.items()))
    }
    return {"buckets": buckets, "mean_img_ar_error": sum(errors) / max(len(errors), 1)}


_RUN_KEYS_OF_SUBSETS = ("color_aug", "flip_aug", "random_crop", "shuffle_caption", "keep_tokens")

_SUBSET_KEYS = (
    *("num_repeats", "color_aug", "flip_aug", "random_crop", "shuffle_caption", "keep_tokens"),
    *("keep_tokens_separator", "secondary_separator", "enable_wildcard", "caption_prefix", "caption_suffix"),
    *("resize_interpolation", "class_tokens", "is_reg"),
)


def _build_subset_entry(config: DatasetConfig, subset_index: int, rows: SampleRows) -> dict[str, Any]:
    subset = config.subsets[subset_index]
    return {
        "metadata_file" if config.kind == "finetuning" else "image_dir": _get_source_name(subset),
        "img_count": sum(sample.subset_index == subset_index for sample, _ in rows),
        **{key: getattr(subset, key) for key in _SUBSET_KEYS},
    }
