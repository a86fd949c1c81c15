"""Read a dataset file in sd-scripts' format, TOML or JSON; what is wrong with it is found at once."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config.kohya_compat import RENAMED_OPTIONS, format_rename_notice
from ..config.schema_data import DataConfig
from ..config.toml_positions import KeyPath, read_text_file, read_toml_with_lines
from ..config.types import Resolution, ResolutionSchedule
from ..errors import ConfigError
from ..registry import suggest_name
from .schema import (
    DATASET_KEYS,
    DATASET_TABLE,
    GENERAL_TABLE,
    SUBSET_TABLE,
    DatasetConfig,
    SubsetConfig,
    collect_flag_defaults,
)
from .validate_keys import (
    UNSUPPORTED_KEYS_BY_KIND,
    LocatedValue,
    infer_dataset_kind,
    validate_across_datasets,
    validate_dataset_keys,
    validate_source_keys,
    validate_subset_keys,
)

_PLACEHOLDER_RESOLUTION = Resolution(1, 1)  # stands in a configuration that is refused anyway


@dataclass(frozen=True)
class ParsedDatasetConfig:
    """What the file says, as far as it can be understood, and everything that is wrong with it."""

    datasets: tuple[DatasetConfig, ...]
    problems: list[str]
    notices: tuple[str, ...] = ()  # deprecated keys

    def require_valid(self) -> tuple[DatasetConfig, ...]:
        """The datasets, if nothing was wrong."""
        if self.problems:
            raise ConfigError(self.problems)
        return self.datasets


def parse_dataset_config(
    path: Path, flag_defaults: Mapping[str, Any], invalid_flags: Set[str] = frozenset()
) -> ParsedDatasetConfig:
    """Read the file; ``flags`` (see ``flags_of``) stand in where it is silent. Looks at no folder.

    ``wrong`` are options of the run that could not be read.
    """
    lines: Mapping[KeyPath, int] | None = None  # a JSON file has none
    try:
        if path.suffix.lower() == ".json":
            data = _read_json(path)
        else:
            data, lines = read_toml_with_lines(path)
    except ConfigError as error:
        return ParsedDatasetConfig((), error.problems)
    reader = _DatasetConfigParser(path, lines, flag_defaults, invalid_flags)
    datasets = tuple(reader.parse_file(data))
    problems = [*reader.problems, *validate_across_datasets(datasets)]
    return ParsedDatasetConfig(datasets, problems, tuple(reader.notices))


class _JsonObject(dict[str, Any]):
    """An object of a JSON file that knows which of its keys are duplicates: the json module keeps the last value."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]):
        pairs = list(pairs)
        super().__init__(pairs)
        self.duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def _read_json(path: Path) -> dict[str, Any]:
    """Read a dataset file in JSON; syntax errors have the line and column that the json module gives."""
    text = read_text_file(path)
    try:
        data = json.loads(text, object_pairs_hook=_JsonObject, parse_constant=_reject_constant)
        duplicates = list(_find_duplicates(data, ()))
    except json.JSONDecodeError as error:
        raise ConfigError([f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: not valid JSON: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: nested too deeply"]) from None
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: expected an object {{...}}"])
    if duplicates:
        raise ConfigError([f"{_format_json_location(path, at)}: {at[-1]}: duplicate key" for at in duplicates])
    return data


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _find_duplicates(value: Any, at: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, _JsonObject):
        yield from ((*at, key) for key in value.duplicates)
    members = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, member in members:
        yield from _find_duplicates(member, (*at, key))


def _format_json_location(path: Path, at: KeyPath) -> str:
    """Return the file and the table of a key, as ``set.json: datasets[0].subsets[1]``; lines are not known."""
    table = at[:-1] if isinstance(at[-1], str) else at
    keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in table).removeprefix(".")
    return f"{path}: {keys}" if keys else str(path)


class _DatasetConfigParser:
    def __init__(
        self,
        path: Path,
        key_lines: Mapping[KeyPath, int] | None,
        flag_defaults: Mapping[str, Any],
        invalid_flags: Set[str],
    ):
        self.path, self.key_lines, self.flag_defaults, self.invalid_flags = (
            path,
            key_lines,
            flag_defaults,
            invalid_flags,
        )
        self.problems: list[str] = []
        self.notices: list[str] = []

    def parse_file(self, document: Mapping[str, Any]) -> list[DatasetConfig]:
        for name in document:
            if name not in ("general", "datasets"):
                level = self.suggest_table(name, "the top of the file")
                self.add_problem((name,), level or "unknown; there are [general] and [[datasets]]")
        general = self.parse_table(("general",), document.get("general", {}), GENERAL_TABLE)
        tables = document.get("datasets", [])
        if not self.is_array_of_tables(("datasets",), tables, DATASET_TABLE):
            return []
        if not tables:
            self.problems.append(f"{self.path}: no [[datasets]]; add one, and [[datasets.subsets]] with image_dir")
        return [self.parse_dataset(("datasets", index), table, general) for index, table in enumerate(tables)]

    def parse_dataset(
        self, key_path: KeyPath, table: Mapping[str, Any], general_values: Mapping[str, LocatedValue]
    ) -> DatasetConfig:
        flat = is_musubi_dataset(table)
        own = {
            name: value
            for name, value in table.items()
            if name != "subsets" and not (flat and name in MUSUBI_SUBSET_KEYS)
        }
        values = {**general_values, **self.parse_table(key_path, own, DATASET_TABLE)}
        if flat:
            subsets = [
                {**self.parse_musubi_subset(key_path, table, values), "join_caption_lines": LocatedValue(True, None)}
            ]
        else:
            tables = table.get("subsets", [])
            if not self.is_array_of_tables((*key_path, "subsets"), tables, SUBSET_TABLE):
                tables = []
            elif not tables:
                self.add_problem(key_path, "no [[datasets.subsets]]; add one with image_dir = 'FOLDER'")
            subsets = [
                self.parse_subset((*key_path, "subsets", index), item, values) for index, item in enumerate(tables)
            ]
        found = self.apply_flag_defaults(values)
        where = self.format_location(key_path)
        self.problems += validate_dataset_keys(found, subsets, where)
        return DatasetConfig(
            kind=infer_dataset_kind(subsets),
            subsets=tuple(self.build_subset_config(item) for item in subsets),
            dataset_number=int(key_path[-1]),
            **self.collect_fields(DatasetConfig, found, where),
        )

    def parse_musubi_subset(
        self, key_path: KeyPath, table: Mapping[str, Any], inherited: Mapping[str, LocatedValue]
    ) -> dict[str, LocatedValue]:
        """musubi-tuner's way to write a dataset: the folder stands in it, there are no subsets."""
        values = dict(inherited)
        named = [name for name in MUSUBI_SUBSET_KEYS if name in table]
        if not named:  # pictures are not what it is about, which is told with the key that says so
            values["image_dir"] = LocatedValue(None, self.format_location(key_path), is_invalid=True)
        for name in named:
            value = table[name]
            is_wrong = not isinstance(value, str)
            values[MUSUBI_SUBSET_KEYS[name]] = LocatedValue(
                None if is_wrong else value, self.format_location((*key_path, name)), is_invalid=is_wrong
            )
            if is_wrong:
                self.add_problem((*key_path, name), f"expected a string, got {value!r}")
        return self.validate_subset(self.apply_flag_defaults(values), {}, self.format_location(key_path))

    def parse_subset(
        self, key_path: KeyPath, table: Mapping[str, Any], inherited: Mapping[str, LocatedValue]
    ) -> dict[str, LocatedValue]:
        own = self.parse_table(key_path, table, SUBSET_TABLE)
        return self.validate_subset(self.apply_flag_defaults({**inherited, **own}), own, self.format_location(key_path))

    def validate_subset(
        self, values: dict[str, LocatedValue], own_keys: Mapping[str, LocatedValue], location: str
    ) -> dict[str, LocatedValue]:
        values[""] = LocatedValue(None, location)
        self.problems += [*validate_subset_keys(values, own_keys, location), *validate_source_keys(values, own_keys)]
        return values

    def parse_table(self, key_path: KeyPath, table: Any, table_name: str) -> dict[str, LocatedValue]:
        """The values of one table; what is wrong is noted and left out."""
        found: dict[str, LocatedValue] = {}
        if not isinstance(table, dict):
            self.add_problem(key_path, f"expected the table {table_name}, got {table!r}")
            return found
        for written_name, value in table.items():
            name = RENAMED_OPTIONS.get(str(written_name), str(written_name))
            value_path = (*key_path, written_name)
            key = DATASET_KEYS.get(name)
            if key is None or table_name not in key.tables:
                self.add_problem(
                    value_path, self.suggest_table(name, table_name) or self.format_unknown_key(name, table_name)
                )
                continue
            location = self.format_location(value_path)
            if name in found:
                self.add_problem(value_path, f"duplicate key: the former name of {name}, set at {found[name].location}")
            elif name != written_name:
                self.notices.append(format_rename_notice(f"{location}: {written_name}", name))
            try:
                found[name] = LocatedValue(key.option.parse_toml_value(value), location)
            except ValueError as error:
                self.add_problem(value_path, str(error))
                found[name] = LocatedValue(None, location, is_invalid=True)
        return found

    def suggest_table(self, name: str, table_name: str) -> str | None:
        """For names that are right, but not here."""
        if later := explain_unsupported_key(name):
            return later
        if name in MUSUBI_SUBSET_KEYS:
            return f"goes with {DATASET_TABLE} that has no subsets; in a subset it is called {MUSUBI_SUBSET_KEYS[name]}"
        key = DATASET_KEYS.get(name)
        if key is None or table_name in key.tables:
            return None
        if not key.tables:
            return f"not a key of dataset files; set it for the run: --{key.flag}"
        return f"belongs in {' or '.join(key.tables)}, not in {table_name}"

    def format_unknown_key(self, name: str, table_name: str) -> str:
        for key in DATASET_KEYS.values():
            if name == key.flag:
                return f"unknown key; in dataset files it is called {key.name}"
        here = [key.name for key in DATASET_KEYS.values() if table_name in key.tables]
        here += ["subsets"] if table_name == DATASET_TABLE else []
        hint = suggest_name(name, here) or suggest_name(name, DATASET_KEYS)
        return f"unknown key{hint or '; allowed in ' + table_name + ': ' + ', '.join(sorted(here))}"

    def is_array_of_tables(self, key_path: KeyPath, value: Any, table_name: str) -> bool:
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return True
        self.add_problem(key_path, f"expected tables, each headed {table_name}")
        return False

    def apply_flag_defaults(self, values: Mapping[str, LocatedValue]) -> dict[str, LocatedValue]:
        """Every key with its value: from the file, from the run's options, or as it is by default."""
        found = {}
        for key in DATASET_KEYS.values():
            flag = f"--{key.flag}" if key.flag is not None else None
            found[key.name] = LocatedValue(
                self.flag_defaults.get(key.name, key.option.default), flag, key.flag in self.invalid_flags
            )
        for name, item in values.items():
            found[name] = LocatedValue(found[name].value, item.location, is_invalid=True) if item.is_invalid else item
        return found

    def build_subset_config(self, values: Mapping[str, LocatedValue]) -> SubsetConfig:
        where = values[""].location or ""
        return SubsetConfig(
            dataset_file=self.path,
            join_caption_lines="join_caption_lines" in values,
            **self.collect_fields(SubsetConfig, values, where),
        )

    def collect_fields(
        self, config_class: type, located_values: Mapping[str, LocatedValue], location: str
    ) -> dict[str, Any]:
        names = [item.name for item in fields(config_class) if item.name in DATASET_KEYS]
        values = {name: located_values[name].value for name in names}
        if "resolution" in values:
            largest = values["resolution_schedule"] and values["resolution_schedule"].largest
            values["resolution"] = largest or values["resolution"] or _PLACEHOLDER_RESOLUTION
        places = {name: place for name in names if (place := located_values[name].location)}
        return {**values, "locations": {**places, "": location}}

    def format_location(self, key_path: KeyPath) -> str:
        return (
            _format_json_location(self.path, key_path)
            if self.key_lines is None
            else f"{self.path}:{self.key_lines[key_path]}"
        )

    def add_problem(self, key_path: KeyPath, message: str) -> None:
        name = f"{key_path[-1]}: " if isinstance(key_path[-1], str) else ""
        self.problems.append(f"{self.format_location(key_path)}: {name}{message}")


MUSUBI_SUBSET_KEYS: Mapping[str, str] = {"image_directory": "image_dir", "image_jsonl_file": "metadata_file"}
"""Its names for keys of a subset."""


_CONTROL_IMAGES = "control pictures, as editing models take them"


_VIDEOS = "videos"


_ONE_FRAME_TRAINING = "one-frame training of FramePack"


_UNSUPPORTED_MUSUBI_KEYS: Mapping[str, str] = {
    "skip_corrupted_cache": "this key of musubi-tuner",
    "control_directory": _CONTROL_IMAGES,
    "no_resize_control": _CONTROL_IMAGES,
    "control_resolution": _CONTROL_IMAGES,
    "flux_kontext_no_resize_control": _CONTROL_IMAGES,
    "qwen_image_edit_no_resize_control": _CONTROL_IMAGES,
    "qwen_image_edit_control_resolution": _CONTROL_IMAGES,
    "multiple_target": "several target pictures, as layered models take them",
    "fp_latent_window_size": _ONE_FRAME_TRAINING,
    "fp_1f_clean_indices": _ONE_FRAME_TRAINING,
    "fp_1f_target_index": _ONE_FRAME_TRAINING,
    "fp_1f_no_post": _ONE_FRAME_TRAINING,
    "video_directory": _VIDEOS,
    "video_jsonl_file": _VIDEOS,
    "target_frames": _VIDEOS,
    "frame_extraction": _VIDEOS,
    "frame_stride": _VIDEOS,
    "frame_sample": _VIDEOS,
    "max_frames": _VIDEOS,
    "source_fps": _VIDEOS,
}


def is_musubi_dataset(table: Mapping[str, object]) -> bool:
    """Whether a dataset with these keys is written in musubi-tuner's way."""
    wanted = {*MUSUBI_SUBSET_KEYS, "video_directory", "video_jsonl_file"}
    return "subsets" not in table and not wanted.isdisjoint(table)


def explain_unsupported_key(name: str) -> str | None:
    """For a key that cannot be honoured yet."""
    return f"not yet: {_UNSUPPORTED_MUSUBI_KEYS[name]}; take it out" if name in _UNSUPPORTED_MUSUBI_KEYS else None


def load_dataset_config(config: DataConfig, invalid_flags: Set[str] = frozenset()) -> ParsedDatasetConfig:
    """The dataset file alone, with the run's options where it is silent; looks at no folder."""
    return parse_dataset_config(Path(str(config.dataset_config)), collect_flag_defaults(config), invalid_flags)


_EXTRA_DATASET_KEYS = (
    "bucket_mode",
    "bucket_max_crop",
    "bucket_min_images",
    "weight",
    "resolution_schedule",
    "from_step",
    "to_step",
)


_EXTRA_SUBSET_KEYS = (
    "parquet",
    "webdataset",
    "recursive",
    "include",
    "exclude",
    "image_column",
    "caption_column",
    "cache_directory",
)


_INTERNAL_FIELDS = ("kind", "subsets", "locations", "dataset_file", "join_caption_lines", "dataset_number")


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
    return {
        name: _convert_to_json(value) for name, value in values.items() if value != DATASET_KEYS[name].option.default
    }


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
