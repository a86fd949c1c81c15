"""Dataset files in sd-scripts' own names and values, as its config_util resolves them; and what goes beyond them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..config.resolution_schedule import ResolutionSchedule
from ..dataset.schema import DATASET_KEYS, DatasetConfig, SubsetConfig
from .dataset_rules import UNSUPPORTED_KEYS_BY_KIND

_EXTRA_DATASET_KEYS = ("bucket_mode", "bucket_max_crop", "bucket_min_pictures", "weight", "resolution_schedule", "from_step",
                "to_step")  # fmt: skip
_EXTRA_SUBSET_KEYS = ("parquet", "webdataset", "recursive", "include", "exclude", "image_column", "caption_column",
               "cache_directory")  # fmt: skip
_INTERNAL_FIELDS = ("kind", "subsets", "places", "file", "joins_lines", "number")


def convert_to_sd_scripts(datasets: Sequence[DatasetConfig]) -> list[dict[str, Any]]:
    """Each dataset with the keys that sd-scripts knows."""
    return [_convert_dataset(dataset) for dataset in datasets]


def collect_extra_keys(dataset: DatasetConfig) -> dict[str, Any]:
    """The keys that sd-scripts does not know, of a dataset and of its subsets, where they are not as by default."""
    own = _collect_non_default(dataset, _EXTRA_DATASET_KEYS)
    subsets = [_collect_non_default(subset, _EXTRA_SUBSET_KEYS) for subset in dataset.subsets]
    return {**own, "subsets": subsets} if any(subsets) else own


def _collect_non_default(config: DatasetConfig | SubsetConfig, keys: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in keys}
    return {name: _convert_to_json(value) for name, value in values.items() if value != DATASET_KEYS[name].option.default}


def _convert_dataset(dataset: DatasetConfig) -> dict[str, Any]:
    params = _collect_values(dataset, _EXTRA_DATASET_KEYS)
    params["resolution"] = [dataset.resolution.width, dataset.resolution.height]
    params["debug_dataset"] = False
    if dataset.kind != "dreambooth":
        del params["prior_loss_weight"]
    subsets = []
    for subset in dataset.subsets:
        values = _collect_values(subset, (*_EXTRA_SUBSET_KEYS, *UNSUPPORTED_KEYS_BY_KIND[dataset.kind]))
        if len(subset.caption_extension) == 1 and "caption_extension" in values:
            (values["caption_extension"],) = subset.caption_extension
        # sd-scripts keeps these two in its subsets, too
        subsets.append({**values, "validation_seed": 0, "validation_split": subset.validation_split})
    # its masked datasets count as dreambooth ones
    kind = "finetuning" if dataset.kind == "finetuning" else "dreambooth"
    return {"kind": kind, "params": params, "subsets": subsets}


def _collect_values(config: DatasetConfig | SubsetConfig, excluded: Sequence[str]) -> dict[str, Any]:
    names = [item.name for item in fields(config) if item.name not in (*excluded, *_INTERNAL_FIELDS)]
    values: Mapping[str, Any] = {name: getattr(config, name) for name in names}
    return {name: _convert_to_json(value) for name, value in values.items()}


def _convert_to_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, ResolutionSchedule) else value
