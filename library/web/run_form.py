"""The form of a new run, generated from the schema of the options, and what its values mean."""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.help import (
    collect_changed_settings,
    format_config_as_toml,
    format_default,
    format_needs,
    iter_option_groups,
)
from ..config.operating_systems import join_words, split_words
from ..config.options import Option, flatten_config, iter_options
from ..config.parser import ParsedConfig, parse_config
from ..errors import UserError
from ..problems import Problem, dedupe_problems
from ..training.preflight import find_installation_problems, find_settings_problems, load_settings
from .folders import OpenedFolders
from .validate_requests import find_dataset_path_problems, find_path_problems


@dataclass(frozen=True)
class FormField:
    """One option as a field."""

    option: Option

    @property
    def kind(self) -> str:
        if self.option.value_type is bool:
            return "switch"
        return "choice" if isinstance(self.option.value_type, tuple) and not self.option.is_list else "text"

    @property
    def default(self) -> str:
        return format_default(self.option.default)

    @property
    def needs(self) -> str:
        return format_needs(self.option).replace("`", "")

    @property
    def input_mode(self) -> str:
        return {int: "numeric", float: "decimal"}.get(self.option.value_type, "text")


def list_field_groups() -> list[tuple[str, str, list[FormField]]]:
    """List the groups of fields with their titles, the basics first."""
    basics = [FormField(option) for option in iter_options(RunConfig) if option.is_basic]
    groups = [("basics", "Basics", basics)]
    for name, title, members in iter_option_groups():
        fields = [FormField(option) for option in members if option.is_in_form and not option.is_basic]
        if fields:
            groups.append((name, title.rstrip("."), fields))
    return groups


@dataclass(frozen=True)
class CheckedForm:
    """The settings of a form, and everything that is wrong with them."""

    parsed: ParsedConfig
    problems: Sequence[Problem]
    notices: Sequence[str]

    @property
    def toml(self) -> str:
        return format_config_as_toml(self.parsed.config)

    @property
    def output_dir(self) -> Path:
        return Path(self.parsed.config.save.output_dir).expanduser()

    @property
    def precision(self) -> str:
        return self.parsed.config.distributed.mixed_precision or "no"

    @property
    def output_name(self) -> str:
        return self.parsed.config.save.output_name

    def export_problems(self) -> list[dict[str, str]]:
        """Name the field of each problem, if the page has one for its option."""
        names = {option.name for option in iter_options(RunConfig)}
        rows = []
        for problem in self.problems:
            is_of_field = problem.option in names and (problem.place is None or not problem.place.file)
            rows.append({"field": problem.option if is_of_field else "", "text": str(problem)})
        return rows


@dataclass
class FormChecker:
    """Checks forms one after another, by the lists that check every run."""

    folders: OpenedFolders
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, values: Mapping[str, Any], *, is_resumed: bool = False) -> CheckedForm:
        """Check the values of a form; nothing outside of the opened folders is looked at."""
        argv = [*build_arguments(values), *(["--auto_resume"] if is_resumed else [])]
        with self._lock:
            parsed = parse_config(argv)
            problems = list(find_path_problems(self.folders, flatten_config(parsed.config)))
            if problems := problems or list(find_dataset_path_problems(self.folders, parsed.config.data)):
                return CheckedForm(parsed, [*parsed.problems, *problems], ())
            loaded = load_settings(argv)
            problems = [*find_settings_problems(loaded), *find_installation_problems(loaded)]
        return CheckedForm(loaded, dedupe_problems(problems), loaded.list_notices())


def build_arguments(values: Mapping[str, Any], config_class: type = RunConfig) -> list[str]:
    """Turn the values of a form into flags; empty ones keep their default."""
    return [word for option in iter_options(config_class) for word in _build_flag(option, values.get(option.name))]


def _build_flag(option: Option, value: Any) -> Iterator[str]:
    if not option.is_in_form or value is None or value == "" or value == []:
        return
    if option.value_type is bool:
        is_on = value is True or value == "true"
        if is_on != option.default:
            yield f"--{option.name}" if is_on else f"--no-{option.name}"
    elif option.is_list:
        words = _split_words(value)
        if flags := [word for word in words if re.match(r"--|-[A-Za-z]", word)]:
            raise UserError(Problem(option.name, f"{flags[0]!r} begins with a dash, which would be another option"))
        yield from (f"--{option.name}", *words)
    else:
        yield f"--{option.name}={value}"


def _split_words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    try:
        return split_words(str(value))
    except ValueError:  # a quote that is not closed
        return str(value).split()


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read a run TOML as the values of a form."""
    parsed = parse_config(["--config_file", str(path)])
    return collect_changed_settings(flatten_config(parsed.config))


def export_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn settings into what fields show."""
    options = {option.name: option for option in iter_options(RunConfig)}
    shown: dict[str, Any] = {}
    for name, value in settings.items():
        if name in options and options[name].is_in_form:
            words = [str(word) for word in value] if isinstance(value, (list, tuple)) else None
            shown[name] = value if isinstance(value, bool) else str(value) if words is None else join_words(words)
    return shown
