"""Read a sweep file: the settings that all runs share, the axes of a grid, and single runs.

config_file = "base.toml"      # the run file that every run begins with
output_dir = "output/sweep"    # every run has a folder of its own in it

[settings]                     # for all runs
evaluate_every_n_steps = 100

[axes]                         # every combination is a run
network_dim = [8, 32]
learning_rate = [1e-4, 3e-4]

[[runs]]                       # a run beside those of the grid
name = "large"
network_dim = 64
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.options import iter_options
from ...config.schema import RunConfig
from ...config.toml_positions import KeyPath, read_toml_with_lines
from ...errors import ConfigError
from ...name_suggestions import suggest_name
from ...problems import Place, Problem

MAX_RUNS = 200
MAX_NAME_LENGTH = 100
DEFAULTS: Mapping[str, Any] = {
    "config_file": "",
    "output_dir": "",
    "num_processes": 1,
    "stop_hopeless": True,
    "share_caches": True,
}
"""The keys of the file besides its tables, with their defaults."""

TABLES = ("settings", "axes", "runs")
OWN_OPTIONS = ("config_file", *(option.name for option in iter_options(RunConfig) if option.is_of_one_run))
"""Options that the sweep sets itself, or that make no sense for all runs."""

RESERVED_NAMES = ("sweep.json", "evaluation.json", "evaluation.txt", "evaluation.png")
"""Files of the sweep, beside the folders of the runs."""


@dataclass(frozen=True)
class SweepRun:
    """One run: its name, and the options that it sets beside the run file, each with its place."""

    name: str
    settings: Mapping[str, Any]
    places: Mapping[str, Place]
    axes: frozenset[str] = frozenset()
    """The options that differ between the runs of the grid."""


@dataclass(frozen=True)
class Sweep:
    """A sweep file."""

    path: Path
    config_file: str
    output_dir: Path
    num_processes: int
    stop_hopeless: bool
    share_caches: bool
    runs: tuple[SweepRun, ...]

    def build_argv(self, run: SweepRun) -> list[str]:
        """Build the options of training of a run, which is resumed where it has a checkpoint."""
        folder = self.get_folder(run)
        argv = ["--config_file", self.config_file] if self.config_file else []
        argv += [word for name, value in run.settings.items() for word in format_flag(name, value)]
        return [*argv, "--output_dir", str(folder), "--output_name", run.name, "--auto_resume"]

    def get_folder(self, run: SweepRun) -> Path:
        return self.output_dir / run.name


@dataclass
class _Reader:
    """Reads a file, and collects its problems."""

    path: Path
    data: Mapping[str, Any]
    lines: Mapping[KeyPath, int]
    problems: list[Problem] = field(default_factory=list)

    def locate(self, *keys: str | int) -> Place:
        """Return the place of a key."""
        shown = ".".join(str(key) for key in keys if isinstance(key, str))
        return Place(str(self.path), self.lines.get(keys), key=shown)

    def report(self, keys: Sequence[str | int], text: str, fix: str = "") -> None:
        self.problems.append(Problem(str(keys[-1]), text, fix, self.locate(*keys)))

    def read_keys(self) -> dict[str, Any]:
        """Read the keys besides the tables."""
        values = dict(DEFAULTS)
        for key, value in self.data.items():
            if key in TABLES:
                continue
            if key not in DEFAULTS:
                self.report([key], f"unknown key{suggest_name(key, [*DEFAULTS, *TABLES])}")
            elif type(value) is not type(DEFAULTS[key]):
                self.report([key], f"expected {_describe_type(DEFAULTS[key])}, got {value!r}")
            else:
                values[key] = value
        if values["num_processes"] < 1:
            self.report(["num_processes"], f"must be at least 1, got {values['num_processes']}")
        if values["config_file"] and not Path(values["config_file"]).expanduser().is_file():
            self.report(["config_file"], f"{values['config_file']}: no such file")
        return values

    def read_table(self, *keys: str | int) -> dict[str, Any]:
        """Read a table of options; those that the sweep sets itself are problems."""
        table: Any = self.data
        for key in keys:
            table = table.get(key, {}) if isinstance(table, dict) else table[key]
        if not isinstance(table, dict):
            self.report(keys, "expected a table of options")
            return {}
        values = {}
        for name, value in table.items():
            if name in OWN_OPTIONS:
                self.report([*keys, name], "is set by the sweep for every run", "remove it")
            elif isinstance(value, dict):
                self.report([*keys, name], "expected a value, got a table")
            else:
                values[name] = value
        return values

    def read_axes(self) -> dict[str, list[Any]]:
        """Read the axes, each of which needs different values."""
        axes = {}
        for name, values in self.read_table("axes").items():
            if not isinstance(values, list) or not values:
                self.report(["axes", name], f"expected a list of values, got {values!r}", f"{name} = [1, 2]")
            elif len({repr(value) for value in values}) < len(values):
                self.report(["axes", name], "has a value twice", "remove one")
            else:
                axes[name] = values
        return axes

    def read_single_runs(self) -> list[tuple[int, str, dict[str, Any]]]:
        """Read the runs that are listed, with their number and name."""
        tables = self.data.get("runs", [])
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            self.report(["runs"], "expected tables [[runs]]")
            return []
        found = []
        for number in range(len(tables)):
            values = self.read_table("runs", number)
            name = values.pop("name", "")
            if not isinstance(name, str) or (name and name != _clean(name)):
                text = f"expected a text of letters, digits, points, - and _, got {name!r}"
                self.report(["runs", number, "name"], text)
                name = ""
            elif name.casefold() in RESERVED_NAMES:
                self.report(["runs", number, "name"], f"{name} is a file of the sweep", "take another name")
            found.append((number, name, values))
        return found


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file, and raise with all problems of its form; options are checked by ``check_runs``."""
    reader = _Reader(path, *read_toml_with_lines(path))
    values, settings, axes = reader.read_keys(), reader.read_table("settings"), reader.read_axes()
    runs = list(_build_runs(reader, settings, axes))
    if not runs and not reader.problems:
        text = "the sweep has no runs"
        reader.problems.append(Problem("", text, "add [axes] with lists of values, or [[runs]]", Place(str(path))))
    if len(runs) > MAX_RUNS:
        text = f"{len(runs)} runs, more than {MAX_RUNS}"
        reader.problems.append(Problem("", text, "take fewer values, or several sweeps", Place(str(path))))
    counts = Counter(run.name.casefold() for run in runs)  # which are folders, of file systems without cases, too
    for name in sorted({run.name for run in runs if counts[run.name.casefold()] > 1}):
        reader.problems.append(Problem("", f"several runs are named {name}", "give them names", Place(str(path))))
    if reader.problems:
        raise ConfigError(reader.problems)
    output_dir = Path(values["output_dir"] or Path("output") / path.stem).expanduser()
    return Sweep(
        path,
        values["config_file"],
        output_dir,
        values["num_processes"],
        stop_hopeless=values["stop_hopeless"],
        share_caches=values["share_caches"],
        runs=tuple(runs),
    )


def _build_runs(reader: _Reader, settings: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> Iterator[SweepRun]:
    """Build the runs of the grid, the last axis fastest, and then those that are listed."""
    shared = {name: reader.locate("settings", name) for name in settings}
    places = shared | {name: reader.locate("axes", name) for name in axes}
    named = [list(zip(values, _name_values(values), strict=True)) for values in axes.values()]
    for combination in itertools.product(*named) if axes else ():
        values = {axis: value for axis, (value, _) in zip(axes, combination, strict=True)}
        words = {axis: word for axis, (_, word) in zip(axes, combination, strict=True)}
        yield SweepRun(_join_name(words), {**settings, **values}, places, frozenset(axes))
    single = reader.read_single_runs()
    for name in settings.keys() & axes.keys() if not single else ():
        reader.report(["settings", name], "has no effect: it is an axis, too", "remove it")
    for number, name, values in single:
        own = {key: reader.locate("runs", number, key) for key in values}
        yield SweepRun(name or name_run(values) or "base", {**settings, **values}, shared | own)


def name_run(values: Mapping[str, Any]) -> str:
    """Name a run by what it sets: ``network_dim-8_learning_rate-0.0001``."""
    return _join_name({key: _name_value(value) for key, value in values.items()})


def _join_name(words: Mapping[str, str]) -> str:
    name = "_".join(f"{key}-{word}" for key, word in words.items())
    if len(name) <= MAX_NAME_LENGTH:
        return name
    return "_".join(words.values())[:MAX_NAME_LENGTH].strip("._-")


def _name_values(values: Sequence[Any]) -> list[str]:
    """Name the values of an axis; files of one name in several folders are named with their folders."""
    words = [_name_value(value) for value in values]
    if len({word.casefold() for word in words}) == len(words):
        return words
    return [_clean(value) if isinstance(value, str) else word for value, word in zip(values, words, strict=True)]


def _name_value(value: Any) -> str:
    if isinstance(value, float):
        return str(value).replace("+", "")  # 1e+30 is not 1e-30
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return "-".join(map(_name_value, value))
    if isinstance(value, str) and ("/" in value or "\\" in value or value.endswith((".toml", ".json"))):
        return _clean(Path(value).stem)
    return _clean(str(value).lower() if isinstance(value, bool) else str(value))


def _clean(text: str) -> str:
    """Replace what not every file system takes in a name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "empty"


def format_flag(name: str, value: Any) -> list[str]:
    """Format an option for a command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def _describe_type(default: Any) -> str:
    return {bool: "true or false", int: "a whole number", str: "a text"}[type(default)]
