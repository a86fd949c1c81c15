"""Dataset files in sd-scripts' own names and values, as its config_util resolves them; and what goes beyond them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..config.resolution_schedule import ResolutionSchedule
from ..dataset.schema import KEYS, DatasetConfig, SubsetConfig
from .dataset_rules import LACKS

_OF_DATASETS = ("bucket_mode", "bucket_max_crop", "bucket_min_pictures", "weight", "resolution_schedule", "from_step",
                "to_step")  # fmt: skip
_OF_SUBSETS = ("parquet", "webdataset", "recursive", "include", "exclude", "image_column", "caption_column",
               "cache_directory")  # fmt: skip
_NO_KEYS = ("kind", "subsets", "places", "file", "joins_lines", "number")


def resolved(datasets: Sequence[DatasetConfig]) -> list[dict[str, Any]]:
    """Each dataset with the keys that sd-scripts knows."""
    return [_as_sd_scripts(dataset) for dataset in datasets]


def beyond(dataset: DatasetConfig) -> dict[str, Any]:
    """The keys that sd-scripts does not know, of a dataset and of its subsets, where they are not as by default."""
    own = _changed(dataset, _OF_DATASETS)
    subsets = [_changed(subset, _OF_SUBSETS) for subset in dataset.subsets]
    return {**own, "subsets": subsets} if any(subsets) else own


def _changed(config: DatasetConfig | SubsetConfig, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in names}
    return {name: _plain(value) for name, value in values.items() if value != KEYS[name].option.default}


def _as_sd_scripts(dataset: DatasetConfig) -> dict[str, Any]:
    params = _values(dataset, _OF_DATASETS)
    params["resolution"] = [dataset.resolution.width, dataset.resolution.height]
    params["debug_dataset"] = False
    if dataset.kind != "dreambooth":
        del params["prior_loss_weight"]
    subsets = []
    for subset in dataset.subsets:
        values = _values(subset, (*_OF_SUBSETS, *LACKS[dataset.kind]))
        if len(subset.caption_extension) == 1 and "caption_extension" in values:
            (values["caption_extension"],) = subset.caption_extension
        # sd-scripts keeps these two in its subsets, too
        subsets.append({**values, "validation_seed": 0, "validation_split": subset.validation_split})
    # its masked datasets count as dreambooth ones
    kind = "finetuning" if dataset.kind == "finetuning" else "dreambooth"
    return {"kind": kind, "params": params, "subsets": subsets}


def _values(config: DatasetConfig | SubsetConfig, left_out: Sequence[str]) -> dict[str, Any]:
    names = [item.name for item in fields(config) if item.name not in (*left_out, *_NO_KEYS)]
    values: Mapping[str, Any] = {name: getattr(config, name) for name in names}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, ResolutionSchedule) else value
