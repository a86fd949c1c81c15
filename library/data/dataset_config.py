"""Read a dataset file in sd-scripts' format, TOML or JSON; what is wrong with it is found at once."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config.file_text import text_of
from ..config.toml_lines import KeyPath, read_toml
from ..config.values import Size
from ..dataset.schema import DATASET, GENERAL, KEYS, SUBSET, DatasetConfig, SubsetConfig
from ..errors import ConfigError
from ..registry import did_you_mean
from .dataset_rules import Found, dataset_problems, kind_of, subset_problems
from .musubi import FLAT, is_flat, refusal
from .source_rules import file_problems, source_problems

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


def read_datasets(path: Path, flags: Mapping[str, Any], wrong: Set[str] = frozenset()) -> Reading:
    """Read the file; ``flags`` (see ``flags_of``) stand in where it is silent. Looks at no folder.

    ``wrong`` are options of the run that could not be read.
    """
    lines: Mapping[KeyPath, int] | None = None  # a JSON file has none
    try:
        if path.suffix.lower() == ".json":
            data = _read_json(path)
        else:
            data, lines = read_toml(path)
    except ConfigError as error:
        return Reading((), error.problems)
    reader = _Reader(path, lines, flags, wrong)
    datasets = tuple(reader.file(data))
    return Reading(datasets, [*reader.problems, *file_problems(datasets)])


class _JsonObject(dict[str, Any]):
    """An object of a JSON file that knows which of its keys are duplicates: the json module keeps the last value."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]):
        pairs = list(pairs)
        super().__init__(pairs)
        self.duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def _read_json(path: Path) -> dict[str, Any]:
    """Read a dataset file in JSON; syntax errors have the line and column that the json module gives."""
    text = text_of(path)
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


class _Reader:
    def __init__(self, path: Path, lines: Mapping[KeyPath, int] | None, flags: Mapping[str, Any], wrong: Set[str]):
        self.path, self.lines, self.flags, self.wrong_flags = path, lines, flags, wrong
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
        flat = is_flat(table)
        own = {name: value for name, value in table.items() if name != "subsets" and not (flat and name in FLAT)}
        values = {**general, **self.keys(at, own, DATASET)}
        if flat:
            subsets = [{**self.flat_subset(at, table, values), "joins_lines": Found(True, None)}]
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
                             number=int(at[-1]), **self.members(DatasetConfig, found, where))  # fmt: skip

    def flat_subset(self, at: KeyPath, table: Mapping[str, Any], above: Mapping[str, Found]) -> dict[str, Found]:
        """musubi-tuner's way to write a dataset: the folder stands in it, there are no subsets."""
        values = dict(above)
        named = [name for name in FLAT if name in table]
        if not named:  # pictures are not what it is about, which is told with the key that says so
            values["image_dir"] = Found(None, self.where(at), is_wrong=True)
        for name in named:
            value = table[name]
            is_wrong = not isinstance(value, str)
            values[FLAT[name]] = Found(None if is_wrong else value, self.where((*at, name)), is_wrong=is_wrong)
            if is_wrong:
                self.wrong((*at, name), f"expected a text, got {value!r}")
        return self.checked_subset(self.with_flags(values), {}, self.where(at))

    def subset(self, at: KeyPath, table: Mapping[str, Any], above: Mapping[str, Found]) -> dict[str, Found]:
        own = self.keys(at, table, SUBSET)
        return self.checked_subset(self.with_flags({**above, **own}), own, self.where(at))

    def checked_subset(self, found: dict[str, Found], own: Mapping[str, Found], where: str) -> dict[str, Found]:
        found[""] = Found(None, where)
        self.problems += [*subset_problems(found, own, where), *source_problems(found, own)]
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
        if later := refusal(name):
            return later
        if name in FLAT:
            return f"goes with {DATASET} that has no subsets; in a subset it is called {FLAT[name]}"
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
        here += ["subsets"] if level == DATASET else []
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
            found[key.name] = Found(self.flags.get(key.name, key.option.default), flag, key.flag in self.wrong_flags)
        for name, item in values.items():
            found[name] = Found(found[name].value, item.place, is_wrong=True) if item.is_wrong else item
        return found

    def built(self, found: Mapping[str, Found]) -> SubsetConfig:
        where = found[""].place or ""
        return SubsetConfig(
            file=self.path, joins_lines="joins_lines" in found, **self.members(SubsetConfig, found, where)
        )

    def members(self, kind: type, found: Mapping[str, Found], where: str) -> dict[str, Any]:
        names = [item.name for item in fields(kind) if item.name in KEYS]
        values = {name: found[name].value for name in names}
        if "resolution" in values:
            largest = values["resolution_schedule"] and values["resolution_schedule"].largest
            values["resolution"] = largest or values["resolution"] or _NO_RESOLUTION
        places = {name: place for name in names if (place := found[name].place)}
        return {**values, "places": {**places, "": where}}

    def where(self, at: KeyPath) -> str:
        return _format_json_location(self.path, at) if self.lines is None else f"{self.path}:{self.lines[at]}"

    def wrong(self, at: KeyPath, message: str) -> None:
        name = f"{at[-1]}: " if isinstance(at[-1], str) else ""
        self.problems.append(f"{self.where(at)}: {name}{message}")
