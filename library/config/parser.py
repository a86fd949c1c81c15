"""Parse the command line and the run TOML (``--config_file``) into a ``RunConfig``: defaults < TOML < flags.

Every problem is collected with its file and line, so that the user sees all of them at once.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..problems import Place, Problem, locate_problems
from ..registry import suggest_name
from .kohya_compat import (
    KOHYA_OPTIONS,
    KOHYA_VALUES,
    RENAMED_OPTIONS,
    RENAMED_VALUES,
    OptionAlias,
    RawSetting,
    SecretOption,
    Spelling,
    UnsupportedOption,
    explain_ignored_key,
    find_no_effect,
    format_rename_notice,
    get_toml_value,
    has_kohya_objective,
    is_from_kohya,
    read_secret,
    rename_kohya_value,
    take_unchecked_value,
)
from .options import ExplicitOptions, Option, build_config, iter_options
from .schema import RunConfig
from .toml_positions import is_table, read_run_toml
from .unused_options import (
    find_unused_args,
    find_unused_options,
    find_unused_tool_options,
    remove_args,
    reset_options,
    resolve_lycoris_preset,
    resolve_trained_components,
)
from .validate import validate_config

COMMAND_OPTIONS = {"config_file": True, "output_config": False}
"""Options that are no settings of a run, and whether they take a value."""

_UNSET: Any = object()
"""The value of an option that the run TOML mentions and leaves unset."""

_NO_EFFECT = "no effect on this run: "
_FLAG_PATTERN = re.compile(r"--|-[A-Za-z]")  # -1 and - are values


@dataclass(frozen=True)
class ParsedConfig:
    """A configuration, the location of every value that was set, and the problems."""

    config: RunConfig
    locations: dict[str, Place]
    problems: list[Problem]
    notices: list[str]
    """One line for each deprecated name that was used."""
    config_file: Path | None = None
    output_config: bool = False
    invalid_options: frozenset[str] = frozenset()
    """Options whose value could not be read; ``config`` has their default, which must not lead to further problems."""
    unused: tuple[tuple[Place, str], ...] = ()
    """Place and reason of each setting that has no effect on this run."""
    has_kohya_options: bool = False
    """Whether there are options that only sd-scripts has, or those that it always needs."""
    has_kohya_objective: bool = False
    """Whether the settings were written for sd-scripts, so that its defaults hold for the objective."""
    kohya_defaults: tuple[str, ...] = ()
    """Options that are not set and whose defaults differ from sd-scripts', with both values."""
    kohya_objective: tuple[str, ...] = ()
    """Options of the objective that are not set and have the defaults of sd-scripts, with these values."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables for the keys and tokens that were given."""
    adjustments: Mapping[str, str] = field(default_factory=dict)
    """Options whose value is not the one that was set, and why."""

    @property
    def explicit(self) -> ExplicitOptions:
        """The options that were set by a flag or in the run TOML, without those that have no effect."""
        return frozenset(self.locations)

    def require_valid(self) -> RunConfig:
        """Return the configuration, or raise a ``ConfigError`` with all problems."""
        if self.problems:
            raise ConfigError(self.problems)
        return self.config

    def without_unused(self, reasons: Mapping[str, str | None]) -> "ParsedConfig":
        """Set options that have no effect on this run back to their defaults; ``reasons`` says why of each.

        None is the reason of a value that asks for what happens anyway; the notice does not name it.
        """
        unused = tuple((self.locations[name], reason) for name, reason in reasons.items() if reason is not None)
        locations = {name: location for name, location in self.locations.items() if name not in reasons}
        config = reset_options(self.config, reasons)
        return replace(self, config=config, locations=locations, unused=(*self.unused, *unused))

    def without_args(self, reasons: Mapping[str, str]) -> "ParsedConfig":
        """Remove ``network_args`` without effect; ``reasons`` says why of each."""
        unused = tuple((self.locations["network_args"].narrow(name), reason) for name, reason in reasons.items())
        adapter = remove_args(self.config.adapter, reasons.keys())
        return replace(self, config=replace(self.config, adapter=adapter), unused=(*self.unused, *unused))

    def locate_problems(self, problems: Iterable[Problem]) -> list[Problem]:
        """Fill in the flag or the line that sets each option, and explain a value that is not what was set.

        The parser's own problems know their places: a wrong flag stays the place where a file sets it, too.
        """
        own, located = set(self.problems), list[Problem]()
        for problem in problems:
            if problem not in own:
                (problem,) = locate_problems([problem], self.locations)
                if name := next(filter(self.adjustments.__contains__, problem.options), None):
                    problem = replace(problem, note=problem.note or self.adjustments[name])
            located.append(problem)
        return located

    def log_notices(self) -> None:
        logger = logging.getLogger(__name__)
        for notice in self.notices:
            logger.warning(notice)
        if self.unused:
            logger.warning("%s", format_unused_settings(self.unused, self.config_file))
        if self.kohya_defaults:
            logger.warning("defaults that differ from sd-scripts': %s", ", ".join(self.kohya_defaults))
        if self.kohya_objective:
            logger.warning(
                "defaults of sd-scripts (objective_defaults kohya; own is the other choice): %s",
                ", ".join(self.kohya_objective),
            )


def format_unused_settings(unused: Sequence[tuple[Place, str]], path: Path | None) -> str:
    """Name all settings without effect in one line: ``run.toml: no effect on this run: epoch (line 9), ...``."""
    items, is_in_file = [], False
    for place, reason in unused:
        if place.file and place.line is not None and place.file == str(path):
            is_in_file = True
            items.append(f"{place.key} (line {place.line}: {reason})" if reason else f"{place.key} (line {place.line})")
        else:
            items.append(f"{place} ({reason})" if reason else str(place))
    return f"{path}: {_NO_EFFECT}{', '.join(items)}" if is_in_file else f"{_NO_EFFECT}{', '.join(items)}"


def parse_config(argv: Sequence[str], config_class: type = RunConfig) -> ParsedConfig:
    """Parse flags, and the TOML file of ``--config_file``."""
    options = {option.name: option for option in iter_options(config_class)}
    problems, invalid_options = list[Problem](), set[str]()
    flags = list(_parse_flags(argv, options, problems, invalid_options))
    commands = {setting.name: setting for setting in flags if setting.name in COMMAND_OPTIONS}
    path = _resolve_config_file(commands, problems)
    settings = [setting for setting in flags if setting.name not in COMMAND_OPTIONS]
    if path is not None and "output_config" not in commands:
        try:
            settings = [*read_run_toml(path, COMMAND_OPTIONS, problems), *settings]
        except ConfigError as error:
            problems += error.problems
            invalid_options |= options.keys() - {setting.name for setting in settings}  # the file may set them

    has_kohya_options = is_from_kohya(settings)
    reader = _SettingsReader(options, problems, invalid_options, has_kohya_options)
    for setting in _sort_switch_aliases_first(settings):
        reader.read(setting)
    parsed = ParsedConfig(
        config=build_config(config_class, reader.values),
        locations=reader.locations,
        problems=problems,
        notices=reader.notices,
        config_file=path,
        output_config="output_config" in commands,
        invalid_options=frozenset(invalid_options),
        unused=tuple(reader.unused),
        has_kohya_options=has_kohya_options,
        has_kohya_objective=has_kohya_objective(settings),
        secrets=reader.secrets,
    )
    if config_class is RunConfig:
        return _resolve_run_config(parsed)
    return parsed.without_unused(find_unused_tool_options(parsed.config, parsed.explicit, parsed.invalid_options))


@dataclass
class _SettingsReader:
    """Converts settings one after another; later ones replace earlier ones."""

    options: dict[str, Option]
    problems: list[Problem]
    invalid_options: set[str]
    is_from_kohya: bool
    """Whether unknown keys and values of the run TOML are taken as sd-scripts takes them."""
    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[str, Place] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    unused: list[tuple[Place, str]] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    spellings: dict[tuple[str, bool], Spelling] = field(default_factory=dict)
    """The first setting of each option, in the file and in flags."""

    def read(self, setting: RawSetting) -> None:
        spelled_name = setting.name
        setting, notice = _rename_deprecated(setting)
        if notice is not None:
            self.notices.append(notice)
        if (reason := find_no_effect(setting)) is not None:
            self.unused.append((setting.place, reason))
            return
        option, verdict = self.options.get(setting.name), KOHYA_OPTIONS.get(setting.name)
        if self.is_from_kohya and not setting.is_flag:
            taken = self._take_as_kohya(setting)
            if taken is None:
                return
            setting = taken
        elif setting.replaced_line is not None:
            text = f"duplicate key, first set in line {setting.replaced_line}"
            self.problems.append(Problem(setting.name, text, place=setting.place))
            return
        try:
            if is_table(setting.value) and not setting.is_flag:
                raise ValueError("expected a value, got a table")
            if isinstance(verdict, SecretOption):
                self.secrets |= read_secret(setting, verdict.variable, self.notices)
                return
            name, value = (
                (setting.name, _convert_value(setting, option))
                if option is not None
                else _translate_kohya_option(setting, self.options)
            )
        except ValueError as error:
            self.problems.append(Problem(setting.name, str(error), place=setting.place))
            self.invalid_options.add(setting.name)
            return
        if name and value is not _UNSET:
            self._set_value(name, Spelling(spelled_name, setting.place, value), is_flag=setting.is_flag)
        elif name and option is None:  # sd-scripts' own option, with the value of what happens anyway
            self.locations[name] = setting.place
        elif name and setting.is_flag:  # a zero turns off what the file has set
            self.values.pop(name, None)
            self.locations.pop(name, None)

    def _take_as_kohya(self, setting: RawSetting) -> RawSetting | None:
        """Return a setting of the run TOML as sd-scripts takes it; None where it reads nothing."""
        if setting.replaced_line is not None:
            first = replace(setting.place, line=setting.replaced_line)
            self.unused.append((first, f"line {setting.place.line} sets it again"))
        option = self.options.get(setting.name)
        if option is None and setting.name not in KOHYA_OPTIONS:
            known = [*self.options, *KOHYA_OPTIONS, *COMMAND_OPTIONS]
            if (reason := explain_ignored_key(setting.name, known)) is None:
                return setting
            self.unused.append((setting.place, reason))
            return None
        samplers = self.options["sample_sampler"].value_type if "sample_sampler" in self.options else ()
        value, note = take_unchecked_value(setting, samplers)
        if value is None:
            self.unused.append((setting.place, note))
            return None
        if note:
            self.notices.append(f"{setting.place}: {note}")
        return replace(setting, value=value)

    def _set_value(self, name: str, spelling: Spelling, *, is_flag: bool) -> None:
        first = self.spellings.setdefault((name, is_flag), spelling)
        if first.contradicts(spelling):
            if self.options[name].changes_result:
                text = first.describe_conflict(spelling)
                self.problems.append(Problem(name, text, "remove one of them", spelling.place))
            elif spelling.value is False:  # sd-scripts has two switches, either of which turns it on
                return
            else:
                self.unused.append((first.place, f"{name} is set"))
        self.values[name], self.locations[name] = spelling.value, spelling.place


def _parse_flags(
    argv: Sequence[str], options: dict[str, Option], problems: list[Problem], invalid_options: set[str]
) -> Iterator[RawSetting]:
    """Split the command line into flags, each with the words that belong to it."""
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            problems.append(Problem("", "unexpected argument", "options start with --", Place(flag=word)))
            continue
        name, equals, inline_value = word[2:].partition("=")
        flag = Place(flag=f"--{name}")
        values = [inline_value] if equals else []
        while words and not equals and not _FLAG_PATTERN.match(words[0]):
            values.append(words.pop(0))
        positive_name = name.removeprefix("no-")
        option = _find_option(name, options) or _find_option(positive_name, options)
        if option is not None and option.value_type is bool and not values:
            yield RawSetting(positive_name, ["" if name.startswith("no-") else "true"], flag, is_flag=True)
        elif text := _describe_wrong_count(name, values, option):
            problems.append(Problem(option.name if option is not None else name, text, place=flag))
            invalid_options.add(problems[-1].option)
        else:
            yield RawSetting(name, values, flag, is_flag=True)


def _find_option(name: str, options: dict[str, Option]) -> Option | None:
    return options.get(RENAMED_OPTIONS.get(name, name))


def _describe_wrong_count(name: str, values: Sequence[str], option: Option | None) -> str | None:
    """Return what is wrong with the number of values of a flag."""
    if option is None:
        takes_value = COMMAND_OPTIONS.get(name)
        if takes_value and len(values) != 1:
            return "expects a path"
        return f"takes no value, got {values[0]!r}" if takes_value is False and values else None
    if option.value_type is bool:
        return f"takes no value, got {values[0]!r}; use --{option.name} or --no-{option.name}"
    if not values:
        return f"expects {'at least one' if option.is_list else 'a'} value ({option.syntax})"
    if len(values) > 1 and not option.is_list:
        return f"expects one value, got {len(values)} ({option.syntax})"
    return None


def _resolve_config_file(commands: dict[str, RawSetting], problems: list[Problem]) -> Path | None:
    if "config_file" not in commands:
        return None
    text = commands["config_file"].value[0]
    path = Path(text)
    if path.name in ("", "..") or path.is_dir():
        problems.append(Problem("config_file", f"{text!r} is not a file", "give the run TOML"))
        return None
    return path if path.suffix else path.with_suffix(".toml")


def _rename_deprecated(setting: RawSetting) -> tuple[RawSetting, str | None]:
    """Give an option and its value their current names, and return a notice if one of them was renamed."""
    name, values = RENAMED_OPTIONS.get(setting.name, setting.name), setting.value
    old_value = values[0] if setting.is_flag and values else values
    new_value = RENAMED_VALUES.get(name, {}).get(old_value) if isinstance(old_value, str) else None
    if new_value is not None:
        notice = format_rename_notice(f"{setting.place} {old_value}", f"{name} {new_value}")
        value = [new_value, *values[1:]] if setting.is_flag else new_value
        return replace(setting, name=name, value=value), notice
    if name != setting.name:
        return replace(setting, name=name), format_rename_notice(setting.place, name)
    return setting, None


def _sort_switch_aliases_first(settings: Sequence[RawSetting]) -> list[RawSetting]:
    """A switch such as ``use_8bit_adam`` does not replace the option for which it stands, if that is set as well."""

    def is_switch_alias(setting: RawSetting) -> bool:
        verdict = KOHYA_OPTIONS.get(setting.name)
        return isinstance(verdict, OptionAlias) and verdict.value is not None

    return sorted(settings, key=lambda setting: (setting.is_flag, not is_switch_alias(setting)))


def _resolve_run_config(parsed: ParsedConfig) -> ParsedConfig:
    """Resolve learning rates of 0, drop options without effect, and check the options against each other."""
    adapter = resolve_lycoris_preset(parsed.config.adapter)
    parsed = replace(parsed, config=replace(parsed.config, adapter=adapter))
    parsed = parsed.without_args(find_unused_args(adapter, parsed.config.optim))
    parsed = parsed.without_unused(find_unused_options(parsed.config, parsed.explicit, unknown=parsed.invalid_options))
    adapter, optim = resolve_trained_components(parsed.config.adapter, parsed.config.optim)
    parsed = replace(parsed, config=replace(parsed.config, adapter=adapter, optim=optim))
    problems = [
        problem
        for problem in validate_config(parsed.config, parsed.explicit)
        if not parsed.invalid_options.intersection(problem.options)
    ]
    return replace(parsed, problems=[*parsed.problems, *locate_problems(problems, parsed.locations)])


def _convert_value(setting: RawSetting, option: Option) -> Any:
    if option.name in KOHYA_VALUES:
        setting = rename_kohya_value(setting, KOHYA_VALUES[option.name])
    if not setting.is_flag:
        return _UNSET if option.is_unset_by(setting.value) else option.parse_lenient_toml_value(setting.value)
    if option.is_unset_by_zero and setting.value == ["0"]:
        return _UNSET
    return bool(setting.value[0]) if option.value_type is bool else option.parse_words(setting.value)


def _translate_kohya_option(setting: RawSetting, options: dict[str, Option]) -> tuple[str | None, Any]:
    """Return the option and value that an sd-scripts option stands for; no name if it has no effect here.

    Raises ``ValueError`` for an option that is unknown or not supported.
    """
    prefix, underscored = "--" if setting.is_flag else "", setting.name.replace("-", "_")
    if underscored != setting.name and underscored in options:
        raise ValueError(f"unknown option; did you mean {prefix}{underscored}?")
    verdict = KOHYA_OPTIONS.get(setting.name)
    if isinstance(verdict, UnsupportedOption):
        if not verdict.accepts(get_toml_value(setting)):
            raise ValueError(verdict.reason)
        return setting.name, _UNSET
    if not isinstance(verdict, OptionAlias):
        names = [*options, *KOHYA_OPTIONS, *COMMAND_OPTIONS]
        raise ValueError(f"unknown option{suggest_name(setting.name, names, prefix)}")
    if verdict.value is not None:
        is_on = get_toml_value(setting)
        is_on = bool(is_on) if is_on in (0, 1, "") else {"true": True, "false": False}.get(str(is_on).lower())
        if is_on is None or (setting.is_flag and setting.value):
            raise ValueError("takes no value" if setting.is_flag else "expected true or false")
        return (verdict.option, verdict.value) if is_on else (None, None)
    if setting.is_flag and len(setting.value) != 1:
        raise ValueError("expects one value")
    return verdict.option, _convert_value(setting, options[verdict.option])
