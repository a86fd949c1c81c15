"""Read a dataset file in sd-scripts' format; everything that is wrong with it is found at once, with its line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config.toml_lines import KeyPath, read_toml
from ..config.values import Size
from ..errors import ConfigError
from ..registry import did_you_mean
from .dataset_rules import LACKS, Found, dataset_problems, kind_of, subset_problems
from .dataset_schema import DATASET, GENERAL, KEYS, SUBSET, DatasetConfig, SubsetConfig

_FLAT = {"image_directory": "image_dir", "image_jsonl_file": "metadata_file"}
"""musubi-tuner's names; a dataset there has no subsets."""
_FLAT_NOT_YET = ("cache_directory", "control_directory", "multiple_target", "no_resize_control", "control_resolution",
                 "video_directory", "video_jsonl_file")  # fmt: skip
_NO_RESOLUTION = Size(1, 1)  # stands in a configuration that is refused anyway


@dataclass(frozen=True)
class Reading:
    """What the file says, as far as it can be understood, and everything that is wrong with it."""

    datasets: tuple[DatasetConfig, ...]
    problems: list[str]

    def require(self) -> tuple[DatasetConfig, ...]:
        """The datasets, if nothing was wrong."""
        if self.problems:
            raise ConfigError(self.problems)
        return self.datasets


def read_datasets(path: Path, flags: Mapping[str, Any]) -> Reading:
    """Read the file; ``flags`` (see ``flags_of``) stand in where it is silent. Looks at no folder."""
    if path.suffix.lower() == ".json":
        return Reading((), [f"{path}: not yet: dataset files in JSON; write the same as TOML"])
    try:
        data, lines = read_toml(path)
    except ConfigError as error:
        return Reading((), error.problems)
    reader = _Reader(path, lines, flags)
    datasets = tuple(reader.file(data))
    return Reading(datasets, reader.problems)


def resolved(datasets: Sequence[DatasetConfig]) -> list[dict[str, Any]]:
    """The datasets in sd-scripts' own names and values, as its config_util makes them."""
    return [_as_sd_scripts(dataset) for dataset in datasets]


class _Reader:
    def __init__(self, path: Path, lines: Mapping[KeyPath, int], flags: Mapping[str, Any]):
        self.path, self.lines, self.flags = path, lines, flags
        self.problems: list[str] = []

    def file(self, data: Mapping[str, Any]) -> list[DatasetConfig]:
        for name in data:
            if name not in ("general", "datasets"):
                level = self.level_hint(name, "the top of the file")
                self.wrong((name,), level or "unknown; there are [general] and [[datasets]]")
        general = self.keys(("general",), data.get("general", {}), GENERAL)
        tables = data.get("datasets", [])
        if not self.is_tables(("datasets",), tables, DATASET):
            return []
        if not tables:
            self.problems.append(f"{self.path}: no [[datasets]]; add one, and [[datasets.subsets]] with image_dir")
        return [self.dataset(("datasets", index), table, general) for index, table in enumerate(tables)]

    def dataset(self, at: KeyPath, table: Mapping[str, Any], general: Mapping[str, Found]) -> DatasetConfig:
        is_flat = "subsets" not in table and any(name in table for name in _FLAT)
        own = {name: value for name, value in table.items() if name != "subsets" and not (is_flat and name in _FLAT)}
        values = {**general, **self.keys(at, own, DATASET)}
        if is_flat:
            subsets = [self.flat_subset(at, table, values)]
        else:
            tables = table.get("subsets", [])
            if not self.is_tables((*at, "subsets"), tables, SUBSET):
                tables = []
            elif not tables:
                self.wrong(at, "no [[datasets.subsets]]; add one with image_dir = 'FOLDER'")
            subsets = [self.subset((*at, "subsets", index), item, values) for index, item in enumerate(tables)]
        found = self.with_flags(values)
        where = self.where(at)
        self.problems += dataset_problems(found, subsets, where)
        return DatasetConfig(kind=kind_of(subsets), subsets=tuple(self.built(item) for item in subsets),
                             **self.members(DatasetConfig, found, where))  # fmt: skip

    def flat_subset(self, at: KeyPath, table: Mapping[str, Any], above: Mapping[str, Found]) -> dict[str, Found]:
        """musubi-tuner's way to write a dataset: the folder stands in it, there are no subsets."""
        own = {name: table[name] for name in table if name in _FLAT}
        values = dict(above)
        for name, value in own.items():
            if isinstance(value, str):
                values[_FLAT[name]] = Found(value, self.where((*at, name)))
            else:
                self.wrong((*at, name), f"expected a text, got {value!r}")
        return self.checked_subset(self.with_flags(values), {}, self.where(at))

    def subset(self, at: KeyPath, table: Mapping[str, Any], above: Mapping[str, Found]) -> dict[str, Found]:
        own = self.keys(at, table, SUBSET)
        return self.checked_subset(self.with_flags({**above, **own}), own, self.where(at))

    def checked_subset(self, found: dict[str, Found], own: Mapping[str, Found], where: str) -> dict[str, Found]:
        found[""] = Found(None, where)
        self.problems += subset_problems(found, own, where)
        return found

    def keys(self, at: KeyPath, table: Any, level: str) -> dict[str, Found]:
        """The values of one table; what is wrong is noted and left out."""
        found: dict[str, Found] = {}
        if not isinstance(table, dict):
            self.wrong(at, f"expected the table {level}, got {table!r}")
            return found
        for name, value in table.items():
            key = KEYS.get(name)
            if key is None or level not in key.levels:
                self.wrong((*at, name), self.level_hint(name, level) or self.unknown(name, level))
                continue
            try:
                found[name] = Found(key.option.from_toml(value), self.where((*at, name)))
            except ValueError as error:
                self.wrong((*at, name), str(error))
                found[name] = Found(None, self.where((*at, name)), is_wrong=True)
        return found

    def level_hint(self, name: str, level: str) -> str | None:
        """For names that are right, but not here."""
        if name in _FLAT_NOT_YET:
            return "not yet: this key of musubi-tuner; take it out"
        if name in _FLAT:
            return f"goes with {DATASET} that has no subsets; in a subset it is called {_FLAT[name]}"
        key = KEYS.get(name)
        if key is None or level in key.levels:
            return None
        if not key.levels:
            return f"not a key of dataset files; set it for the run: --{key.flag}"
        return f"belongs in {' or '.join(key.levels)}, not in {level}"

    def unknown(self, name: str, level: str) -> str:
        for key in KEYS.values():
            if name == key.flag:
                return f"unknown key; in dataset files it is called {key.name}"
        here = [key.name for key in KEYS.values() if level in key.levels]
        hint = did_you_mean(name, here) or did_you_mean(name, KEYS)
        return f"unknown key{hint or '; allowed in ' + level + ': ' + ', '.join(sorted(here))}"

    def is_tables(self, at: KeyPath, value: Any, level: str) -> bool:
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return True
        self.wrong(at, f"expected tables, each headed {level}")
        return False

    def with_flags(self, values: Mapping[str, Found]) -> dict[str, Found]:
        """Every key with its value: from the file, from the run's options, or as it is by default."""
        found = {}
        for key in KEYS.values():
            flag = f"--{key.flag}" if key.flag is not None else None
            found[key.name] = Found(self.flags.get(key.name, key.option.default), flag)
        for name, item in values.items():
            found[name] = Found(found[name].value, item.place, is_wrong=True) if item.is_wrong else item
        return found

    def built(self, found: Mapping[str, Found]) -> SubsetConfig:
        where = found[""].place or ""
        return SubsetConfig(file=self.path, **self.members(SubsetConfig, found, where))

    def members(self, kind: type, found: Mapping[str, Found], where: str) -> dict[str, Any]:
        names = [item.name for item in fields(kind) if item.name in KEYS]
        values = {name: found[name].value for name in names}
        if "resolution" in values:
            values["resolution"] = values["resolution"] or _NO_RESOLUTION
        places = {name: place for name in names if (place := found[name].place)}
        return {**values, "places": {**places, "": where}}

    def where(self, at: KeyPath) -> str:
        return f"{self.path}:{self.lines[at]}"

    def wrong(self, at: KeyPath, message: str) -> None:
        name = f"{at[-1]}: " if isinstance(at[-1], str) else ""
        self.problems.append(f"{self.where(at)}: {name}{message}")


def _as_sd_scripts(dataset: DatasetConfig) -> dict[str, Any]:
    own = {"kind", "subsets", "places", "file", "bucket_mode", "bucket_max_crop", "bucket_min_pictures"}
    params = {item.name: getattr(dataset, item.name) for item in fields(dataset) if item.name not in own}
    params["resolution"] = [dataset.resolution.width, dataset.resolution.height]
    params["debug_dataset"] = False
    if dataset.kind != "dreambooth":
        del params["prior_loss_weight"]
    left_out = {*own, *LACKS[dataset.kind]}
    subsets = []
    for subset in dataset.subsets:
        values = {item.name: getattr(subset, item.name) for item in fields(subset) if item.name not in left_out}
        if subset.face_crop_aug_range is not None:
            values["face_crop_aug_range"] = list(subset.face_crop_aug_range)
        # sd-scripts keeps these two fields in its subsets, where no key sets them
        subsets.append({**values, "validation_seed": 0, "validation_split": 0.0})
    # its masked datasets count as dreambooth ones
    kind = "finetuning" if dataset.kind == "finetuning" else "dreambooth"
    return {"kind": kind, "params": params, "subsets": subsets}
