"""Defaults < TOML file < flags, into one ``RunConfig``; everything that is wrong is collected, nothing is guessed."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..registry import suggest_name
from .kohya_compat import KOHYA_OPTIONS, OptionAlias
from .options import Option, build_config, iter_options
from .schema import RunConfig
from .toml_positions import read_toml_with_lines
from .validate import validate_config

COMMAND_OPTIONS = {"config_file": True, "output_config": False}
"""What is said to the program, not about the run; True where a value follows."""


_FLAG_PATTERN = re.compile(r"--|-[A-Za-z]")  # -1 and - are values


@dataclass(frozen=True)
class RawSetting:
    """One option as somebody wrote it."""

    name: str
    value: Any  # the words behind a flag, or a TOML value
    location: str  # "--network_dim" or "run.toml:3: network_dim"
    is_flag: bool


@dataclass(frozen=True)
class ParsedConfig:
    """The configuration, and where each value that is no default was set."""

    config: RunConfig
    locations: dict[str, str]
    problems: list[str]
    config_file: Path | None = None
    output_config: bool = False
    invalid_options: frozenset[str] = frozenset()
    """Options whose value could not be read, so that nothing follows from what they are by default."""

    def require_valid(self) -> RunConfig:
        """The configuration, if nothing was wrong."""
        if self.problems:
            raise ConfigError(self.problems)
        return self.config


def parse_config(argv: Sequence[str], config_class: type = RunConfig) -> ParsedConfig:
    """Read flags, and the TOML file that ``--config_file`` names."""
    known = {option.name: option for option in iter_options(config_class)}
    problems: list[str] = []
    wrong: set[str] = set()
    flags = list(_parse_flags(argv, known, problems, wrong))
    commands = {setting.name: setting for setting in flags if setting.name in COMMAND_OPTIONS}
    path = None
    settings: list[RawSetting] = []
    named = commands["config_file"].value[0] if "config_file" in commands else ""
    if "config_file" in commands and (not named or Path(named).name in ("", "..") or Path(named).is_dir()):
        problems.append(f"--config_file: {named or 'nothing'!r} is no file; name a TOML file")
    elif named:
        path = Path(named)
        path = path if path.suffix else path.with_suffix(".toml")
        if "output_config" not in commands:
            settings += _read_config_file(path, known, problems)
    settings += [setting for setting in flags if setting.name not in COMMAND_OPTIONS]

    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for setting in settings:
        option = known.get(setting.name)
        try:
            name, value = (
                _translate_kohya_option(setting, known)
                if option is None
                else (setting.name, _convert_value(setting, option))
            )
        except ValueError as error:
            problems.append(f"{setting.location}: {error}")
            wrong.add(setting.name)
            continue
        if name is not None:
            values[name], places[name] = value, setting.location
    config = build_config(config_class, values)
    if config_class is RunConfig:
        for names, message in validate_config(config, frozenset(places)):
            if not wrong.intersection(names):
                problems.append(f"{places.get(names[0], f'--{names[0]}')}: {message}")
    return ParsedConfig(config, places, problems, path, "output_config" in commands, frozenset(wrong))


def _parse_flags(
    argv: Sequence[str], options: dict[str, Option], problems: list[str], invalid_options: set[str]
) -> Iterator[RawSetting]:
    """Cut the command line into options with the words that belong to each."""
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            problems.append(f"{word}: unexpected; options start with -- and take one value")
            continue
        name, equals, glued = word[2:].partition("=")
        behind = [glued] if equals else []
        while words and not equals and not _FLAG_PATTERN.match(words[0]):
            behind.append(words.pop(0))
        option = options.get(name) or options.get(name.removeprefix("no-"))
        if option is not None and option.value_type is bool:
            if behind:
                problems.append(
                    f"--{name}: takes no value, got {behind[0]!r}; write --{option.name} or --no-{option.name}"
                )
                continue
            behind = ["" if name.startswith("no-") else "true"]
            name = option.name
        elif option is not None and not option.is_list and len(behind) != 1:
            problems.append(
                f"--{name}: {'needs a value' if not behind else f'takes one value, got {len(behind)}'}"
                f" ({option.syntax})"
            )
            invalid_options.add(name)
            continue
        elif option is not None and option.is_list and not behind:
            problems.append(f"--{name}: needs at least one value ({option.syntax})")
            invalid_options.add(name)
            continue
        elif COMMAND_OPTIONS.get(name) and len(behind) != 1:
            problems.append(f"--{name}: needs one value, a path")
            continue
        elif COMMAND_OPTIONS.get(name) is False and behind:
            problems.append(f"--{name}: takes no value, got {behind[0]!r}")
            continue
        yield RawSetting(name, behind, f"--{name}", is_flag=True)


def _read_config_file(path: Path, options: dict[str, Option], problems: list[str]) -> Iterator[RawSetting]:
    """The keys of a TOML file; section names are for the reader only, as in sd-scripts."""
    try:
        data, lines = read_toml_with_lines(path)
    except ConfigError as error:
        problems += error.problems
        return
    first_lines: dict[str, int] = {}
    sections = {option.group for option in options.values()}  # of which some are called like an option
    for key, item in data.items():
        is_section = isinstance(item, dict) and (key not in options or key in sections)
        members = {(key, name): value for name, value in item.items()} if is_section else {(key,): item}
        for key_path, value in members.items():
            name, line = str(key_path[-1]), lines[key_path]
            place = f"{path}:{line}: {name}"
            if name in first_lines:
                problems.append(f"{place}: given twice; it stands in line {first_lines[name]} already")
            elif name in COMMAND_OPTIONS:
                problems.append(f"{place}: belongs on the command line")
            elif isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value)):
                problems.append(f"{place}: a table; options take plain values{_hint_dataset_file(key_path)}")
            else:
                yield RawSetting(name, value, place, is_flag=False)
            first_lines.setdefault(name, line)


def _hint_dataset_file(key_path: tuple[str, ...]) -> str:
    is_dataset = "datasets" in key_path or "subsets" in key_path
    return "; this looks like a dataset file: name it with --dataset_config" if is_dataset else ""


def _convert_value(setting: RawSetting, option: Option) -> Any:
    if not setting.is_flag:
        return option.parse_toml_value(setting.value)
    return bool(setting.value[0]) if option.value_type is bool else option.parse_words(setting.value)


def _translate_kohya_option(setting: RawSetting, options: dict[str, Option]) -> tuple[str | None, Any]:
    """What an option of sd-scripts that is none of ours stands for; ``ValueError`` when it is refused."""
    underscored = setting.name.replace("-", "_")
    if underscored != setting.name and underscored in options:
        raise ValueError(f"unknown option; did you mean {_get_flag_prefix(setting)}{underscored}?")
    verdict = KOHYA_OPTIONS.get(setting.name)
    if verdict is None:
        names = [*options, *KOHYA_OPTIONS, *COMMAND_OPTIONS]
        raise ValueError(f"unknown option{suggest_name(setting.name, names, _get_flag_prefix(setting))}")
    if not isinstance(verdict, OptionAlias):
        if not verdict.accepts(_get_plain_value(setting)):
            raise ValueError(verdict.reason)
        return None, None
    if verdict.value is not None:
        return _apply_switch_alias(setting, verdict)
    if setting.is_flag and len(setting.value) != 1:
        raise ValueError("takes one value")
    return verdict.option, _convert_value(setting, options[verdict.option])


def _apply_switch_alias(setting: RawSetting, alias: OptionAlias) -> tuple[str | None, Any]:
    """A switch that stands for a value of an option; off, it says nothing."""
    value = _get_plain_value(setting)
    if not isinstance(value, bool):
        raise ValueError("expected true or false; it is a switch" if not setting.is_flag else "takes no value")
    return (alias.option, alias.value) if value else (None, None)


def _get_plain_value(setting: RawSetting) -> Any:
    """The value as TOML would have it: a flag alone is true, one word may be a number."""
    if not setting.is_flag:
        return setting.value
    if not setting.value:
        return True
    word = setting.value[0]
    try:
        return float(word)
    except ValueError:
        return word


def _get_flag_prefix(setting: RawSetting) -> str:
    return "--" if setting.is_flag else ""
