"""What a LoRA file says of the pictures that it was trained on: sd-scripts' keys, names of folders and no paths."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import PureWindowsPath
from typing import Any

from ..dataset.schema import DatasetConfig, SubsetConfig
from .buckets import BucketAssignment
from .manifest import Manifest, Sample

SampleRows = Sequence[tuple[Sample, BucketAssignment]]


def build_dataset_metadata(manifest: Manifest, assignments: Sequence[BucketAssignment], dp_size: int) -> dict[str, str]:
    """``ss_datasets``, ``ss_tag_frequency``, ``ss_dataset_dirs`` and, of a single dataset, what sd-scripts tells."""
    rows = list(zip(manifest.samples, assignments, strict=True))
    own = [[row for row in rows if row[0].dataset_index == number] for number in range(len(manifest.datasets))]
    datasets = [_build_dataset_entry(config, found) for config, found in zip(manifest.datasets, own, strict=True)]
    latest = {
        config.dataset_number: number for number, config in enumerate(manifest.datasets)
    }  # of those in several stages
    frequency: dict[str, Any] = {}
    for each in (datasets[number] for number in latest.values()):
        for name, tags in each["tag_frequency"].items():
            frequency[_make_unique_name(name, frequency)] = tags
    values = {"ss_datasets": datasets, "ss_tag_frequency": frequency}
    for key, is_reg in (("ss_dataset_dirs", False), ("ss_reg_dataset_dirs", True)):
        folders: dict[str, Any] = {}
        for number in latest.values():
            config = manifest.datasets[number]
            for index, subset in enumerate(config.subsets):
                if subset.is_reg == is_reg:
                    count = sum(sample.subset_index == index for sample, _ in own[number])
                    folders[_make_unique_name(get_source_name(subset), folders)] = {
                        "n_repeats": subset.num_repeats,
                        "img_count": count,
                    }
        values[key] = folders
    found = {key: json.dumps(value) for key, value in values.items()}
    return found | (
        _build_single_dataset_entries(manifest.datasets[-1], datasets[-1], dp_size) if len(latest) == 1 else {}
    )


def get_source_name(subset: SubsetConfig) -> str:
    """The last part of where the pictures come from; never a path."""
    first = (subset.parquet or subset.webdataset or (str(subset.metadata_file or subset.image_dir),))[0]
    return PureWindowsPath(first).name or "pictures"


def _make_unique_name(name: str, taken_names: dict[str, Any]) -> str:
    """As sd-scripts tells apart folders of the same name."""
    number, free = 2, name
    while free in taken_names:
        free, number = f"{name} ({number})", number + 1
    return free


def _build_single_dataset_entries(config: DatasetConfig, dataset: dict[str, Any], dp_size: int) -> dict[str, str]:
    """What stands at the top where there is one dataset only."""
    width, height = dataset["resolution"]
    return {
        "ss_bucket_info": json.dumps(dataset["bucket_info"]),
        "ss_batch_size_per_device": str(config.batch_size),
        "ss_total_batch_size": str(config.batch_size * dp_size),
        "ss_resolution": f"({width}, {height})",
        **{
            f"ss_{key}": str(getattr(config, key))
            for key in ("enable_bucket", "bucket_no_upscale", "min_bucket_reso", "max_bucket_reso")
        },
    }


def _build_dataset_entry(config: DatasetConfig, rows: SampleRows) -> dict[str, Any]:
    tags: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for sample, _ in rows:
        words = (word.strip().lower() for word in sample.caption.replace("\n", ",").split(","))
        tags[get_source_name(config.subsets[sample.subset_index])].update(word for word in words if word)
    return {
        "is_dreambooth": config.kind != "finetuning",
        "batch_size_per_device": config.batch_size,
        "num_train_images": round(sum(sample.repeats for sample, _ in rows if not sample.is_reg)),
        "num_reg_images": round(sum(sample.repeats for sample, _ in rows if sample.is_reg)),
        "resolution": [config.resolution.width, config.resolution.height],
        **({"from_step": config.from_step, "to_step": config.to_step} if config.from_step or config.to_step else {}),
        "enable_bucket": config.enable_bucket,
        "min_bucket_reso": config.min_bucket_reso,
        "max_bucket_reso": config.max_bucket_reso,
        "resize_interpolation": config.resize_interpolation,
        "tag_frequency": {name: dict(sorted(counts.items())) for name, counts in tags.items()},
        "bucket_info": _build_bucket_info(rows) if config.enable_bucket else None,
        "subsets": [_build_subset_entry(config, index, rows) for index in range(len(config.subsets))],
    }


def _build_bucket_info(rows: SampleRows) -> dict[str, Any]:
    shown: Counter[tuple[int, int]] = Counter()
    for sample, placement in rows:
        shown[placement.bucket_resolution] += round(sample.repeats)
    errors = [
        abs(placement.bucket_resolution[0] / placement.bucket_resolution[1] - sample.size[0] / sample.size[1])
        for sample, placement in rows
    ]
    buckets = {
        str(number): {"resolution": list(size), "count": count}
        for number, (size, count) in enumerate(sorted(shown.items()))
    }
    return {"buckets": buckets, "mean_img_ar_error": sum(errors) / max(len(errors), 1)}


_SUBSET_KEYS = (
    "num_repeats",
    "color_aug",
    "flip_aug",
    "random_crop",
    "shuffle_caption",
    "keep_tokens",
    "keep_tokens_separator",
    "secondary_separator",
    "enable_wildcard",
    "caption_prefix",
    "caption_suffix",
    "resize_interpolation",
    "class_tokens",
    "is_reg",
)


def _build_subset_entry(config: DatasetConfig, subset_index: int, rows: SampleRows) -> dict[str, Any]:
    subset = config.subsets[subset_index]
    where = "metadata_file" if config.kind == "finetuning" else "image_dir"
    return {
        where: get_source_name(subset),
        "img_count": sum(sample.subset_index == subset_index for sample, _ in rows),
        **{key: getattr(subset, key) for key in _SUBSET_KEYS},
    }
