"""Parse the command line and the run TOML (``--config_file``) into a ``RunConfig``: defaults < TOML < flags.

A valid flag wins over all that the file says of its option: a value of the file that cannot be read is then named in
the notice of what has no effect. Without such a flag it is a problem. Every problem is collected with its file and
line, so that the user sees all of them at once.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from ..name_suggestions import suggest_name
from ..problems import Place, Problem, locate_problems
from .help import format_default
from .kohya_compat import (
    KOHYA_OPTIONS,
    KOHYA_VALUES,
    RENAMED_OPTIONS,
    RENAMED_VALUES,
    OptionAlias,
    OptionVerdict,
    OtherScriptOption,
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
    select_full_verdicts,
    take_unchecked_value,
)
from .musubi_compat import (
    MUSUBI_OPTIONS,
    find_missing_model,
    find_unset_model,
    find_yielding_options,
    is_from_musubi,
    list_musubi_values,
    resolve_noise_options,
)
from .options import ExplicitOptions, Option, build_config, iter_options
from .schema import RunConfig
from .schema_objective import NoiseConfig
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
from .validate_embedding import resolve_embedding_run
from .validate_full import resolve_text_encoder_rates
from .validate_slider import resolve_slider_run

Program = Literal["", "sd-scripts", "musubi-tuner"]

COMMAND_OPTIONS = {"config_file": True, "output_config": False}
"""Options that are no settings of a run, and whether they take a value."""

_UNSET: Any = object()
"""The value of an option that the run TOML mentions and leaves unset."""

_NO_EFFECT = "no effect on this run: "
_MODEL_OPTIONS = {"dit", "pretrained_model_name_or_path"}
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
    program: Program = ""
    """The program whose command or run file this is, by options that only it has, or that it always needs."""
    taken_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of that program that were taken for options that are not set."""
    kohya_defaults: tuple[str, ...] = ()
    """Options that are not set and whose defaults differ from that program's, with both values."""
    has_kohya_objective: bool = False
    """Whether the settings were written for sd-scripts, so that its defaults hold for the objective."""
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

    def drop_consequences(self, problems: Iterable[Problem]) -> list[Problem]:
        """Keep the problems in which no option takes part whose value could not be read, as that is one already."""
        return [problem for problem in problems if not self.invalid_options.intersection(problem.options)]

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

    def list_notices(self) -> list[str]:
        """List all that is to be said of valid settings: each renamed one, those without effect, other defaults."""
        lines = list(self.notices)
        if self.unused:
            lines.append(format_unused_settings(self.unused, self.config_file))
        if self.taken_defaults:
            taken = ", ".join(f"{name} {format_default(value)}" for name, value in self.taken_defaults.items())
            lines.append(f"defaults of {self.program} that are taken: {taken}")
        if self.kohya_defaults:
            owner = "sd-scripts'" if self.program == "sd-scripts" else f"{self.program}'s"
            lines.append(f"defaults that differ from {owner}: {', '.join(self.kohya_defaults)}")
        if self.kohya_objective:
            name = "defaults of sd-scripts (objective_defaults kohya; own is the other choice)"
            lines.append(f"{name}: {', '.join(self.kohya_objective)}")
        return lines

    def log_notices(self) -> None:
        """Log each notice as a warning; logging has to be configured before, which writes that word."""
        for notice in self.list_notices():
            logging.getLogger(__name__).warning("%s", notice)


def format_unused_settings(unused: Sequence[tuple[Place, str]], path: Path | None) -> str:
    """Name all settings without effect in one line: ``run.toml: no effect on this run: epoch (line 9), ...``.

    Those of the run TOML come first, in the order of its lines.
    """
    lines, others = list[tuple[int, str]](), list[str]()
    for place, reason in unused:
        if place.file and place.line is not None and place.file == str(path):
            text = f"{place.key} (line {place.line}: {reason})" if reason else f"{place.key} (line {place.line})"
            lines.append((place.line, text))
        else:
            others.append(f"{place} ({reason})" if reason else str(place))
    items = [*(text for _, text in sorted(lines, key=lambda item: item[0])), *others]
    return f"{path}: {_NO_EFFECT}{', '.join(items)}" if lines else f"{_NO_EFFECT}{', '.join(items)}"


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

    program = find_program(settings)
    is_musubi_run = program == "musubi-tuner" and config_class is RunConfig
    if is_musubi_run and (missing_model := find_missing_model(settings)):  # beside it no other problem matters
        problems[:], settings, is_musubi_run = [missing_model], [], False
        invalid_options |= options.keys()
    is_full = any(each.name == "train" and get_toml_value(each) == "full" for each in settings)
    reader = _SettingsReader(options, problems, invalid_options, program, is_full)
    for setting in _sort_switch_aliases_first(settings, reader.verdicts):
        reader.read(setting)
    taken = _take_musubi_defaults(reader, settings) if is_musubi_run else {}
    parsed = ParsedConfig(
        config=build_config(config_class, reader.values),
        locations=reader.locations,
        problems=problems,
        notices=reader.notices,
        config_file=path,
        output_config="output_config" in commands,
        invalid_options=frozenset(invalid_options),
        unused=tuple(reader.unused),
        program=program,
        taken_defaults=taken,
        has_kohya_objective=program == "sd-scripts" and has_kohya_objective(settings),
        secrets=reader.secrets,
    )
    if config_class is RunConfig:
        return _resolve_run_config(parsed)
    return parsed.without_unused(find_unused_tool_options(parsed.config, parsed.explicit, parsed.invalid_options))


def find_program(settings: Collection[RawSetting]) -> Program:
    """Find the program that these settings were written for, by options that only it has or always needs."""
    if is_from_musubi(settings):
        return "musubi-tuner"
    return "sd-scripts" if is_from_kohya(settings) else ""


@dataclass
class _SettingsReader:
    """Converts settings one after another; later ones replace earlier ones."""

    options: dict[str, Option]
    problems: list[Problem]
    invalid_options: set[str]
    program: Program
    """The program that unknown keys and values of the run TOML are taken for."""
    is_full: bool = False
    """Whether the settings ask for ``train full``."""
    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[str, Place] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    unused: list[tuple[Place, str]] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    spellings: dict[tuple[str, bool], Spelling] = field(default_factory=dict)
    """The first setting of each option, in the file and in flags."""
    file_problems: dict[str, list[Problem]] = field(default_factory=dict)
    """What is wrong with the values of the run TOML, by the options that they would set."""

    @cached_property
    def verdicts(self) -> Mapping[str, OptionVerdict]:
        """Say what becomes of each option that is none of ours."""
        verdicts = MUSUBI_OPTIONS if self.program == "musubi-tuner" else KOHYA_OPTIONS
        return select_full_verdicts(verdicts) if self.is_full else verdicts

    def read(self, setting: RawSetting) -> None:
        spelled_name = setting.name
        setting, notice = _rename_deprecated(setting)
        if notice is not None:
            self.notices.append(notice)
        if (reason := find_no_effect(setting, self.verdicts)) is not None:
            self.unused.append((setting.place, reason))
            return
        option, verdict = self.options.get(setting.name), self.verdicts.get(setting.name)
        if isinstance(verdict, OtherScriptOption):  # of scripts that do not train what this run trains
            option = None
        if self.program and not setting.is_flag:
            taken = self._take_as_kohya(setting)
            if taken is None:
                return
            setting = taken
        elif setting.replaced_line is not None:
            text = f"duplicate key, first set in line {setting.replaced_line}"
            self._report(setting.name, Problem(setting.name, text, place=setting.place), is_flag=False)
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
                else _translate_foreign_option(setting, self.options, self.verdicts)
            )
        except ValueError as error:
            target = verdict.option if isinstance(verdict, OptionAlias) else setting.name
            self._report(target, Problem(setting.name, str(error), place=setting.place), is_flag=setting.is_flag)
            self.invalid_options.add(setting.name)
            return
        if name and setting.is_flag:
            self._drop_file_problems(name, setting.place)
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
        if option is None and setting.name not in self.verdicts:
            known = [*self.options, *self.verdicts, *COMMAND_OPTIONS]
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
                self._report(name, Problem(name, text, "remove one of them", spelling.place), is_flag=is_flag)
            elif spelling.value is False and not is_flag:  # sd-scripts has two switches, either of which turns it on
                return
            else:
                self.unused.append((first.place, f"{name} is set"))
        self.values[name], self.locations[name] = spelling.value, spelling.place

    def _report(self, name: str, problem: Problem, *, is_flag: bool) -> None:
        """Report a wrong setting of the option ``name``; a flag that is read later can replace one of the run TOML."""
        self.problems.append(problem)
        if not is_flag:
            self.file_problems.setdefault(name, []).append(problem)

    def _drop_file_problems(self, name: str, flag: Place) -> None:
        """Name what is wrong in the run TOML with an option that a valid flag sets as without effect."""
        for problem in self.file_problems.pop(name, ()):
            self.problems.remove(problem)
            self.invalid_options.discard(problem.option)
            if problem.place is not None:
                self.unused.append((problem.place, f"{problem.text}; {flag} replaces it"))


def _take_musubi_defaults(reader: _SettingsReader, settings: Collection[RawSetting]) -> dict[str, Any]:
    """Set the defaults of musubi-tuner, whose commands always name a model; return what was set."""
    unset_model = find_unset_model(settings, reader.values)
    if unset_model is not None and not reader.invalid_options & _MODEL_OPTIONS:
        reader.problems.append(unset_model)
    taken = list_musubi_values(reader.values)
    reader.values.update(taken)
    if "model_version" in taken:  # the network module says it
        reader.locations["model_version"] = reader.locations["network_module"]
    return taken


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


def _sort_switch_aliases_first(
    settings: Sequence[RawSetting], verdicts: Mapping[str, OptionVerdict]
) -> list[RawSetting]:
    """A switch such as ``use_8bit_adam`` does not replace the option for which it stands, if that is set as well."""

    def is_switch_alias(setting: RawSetting) -> bool:
        verdict = verdicts.get(setting.name)
        return isinstance(verdict, OptionAlias) and verdict.value is not None

    return sorted(settings, key=lambda setting: (setting.is_flag, not is_switch_alias(setting)))


def _resolve_run_config(parsed: ParsedConfig) -> ParsedConfig:
    """Resolve learning rates of 0, drop options without effect, and check the options against each other."""
    parsed = _resolve_embedding_run(parsed)
    adapter = resolve_lycoris_preset(parsed.config.adapter)
    parsed = replace(parsed, config=resolve_text_encoder_rates(replace(parsed.config, adapter=adapter)))
    if parsed.program == "musubi-tuner":
        parsed = _resolve_musubi_run(parsed)
    parsed = parsed.without_args(find_unused_args(adapter, parsed.config.optim))
    parsed = parsed.without_unused(find_unused_options(parsed.config, parsed.explicit, unknown=parsed.invalid_options))
    adapter, optim = resolve_trained_components(
        parsed.config.adapter, parsed.config.optim, has_block_rates=parsed.config.full.block_lr is not None
    )
    parsed = replace(parsed, config=resolve_slider_run(replace(parsed.config, adapter=adapter, optim=optim)))
    problems = parsed.drop_consequences(validate_config(parsed.config, parsed.explicit))
    return replace(parsed, problems=[*parsed.problems, *locate_problems(problems, parsed.locations)])


def _resolve_embedding_run(parsed: ParsedConfig) -> ParsedConfig:
    """Take a command of sd-scripts' textual inversion for what it is, and say so."""
    config = resolve_embedding_run(parsed.config, parsed.explicit)
    if config.adapter.train == parsed.config.adapter.train:
        return replace(parsed, config=config)
    place = parsed.locations["token_string"]
    notice = f"{place}: train embedding, as in sd-scripts; with train lora, a LoRA is trained as well"
    return replace(parsed, config=config, notices=[*parsed.notices, notice])


def _resolve_musubi_run(parsed: ParsedConfig) -> ParsedConfig:
    """Give options the meaning that they have in musubi-tuner, where that is another one."""
    if "timestep_sampling" in parsed.invalid_options:
        return parsed
    noise = NoiseConfig() if "objective_defaults" in parsed.locations else parsed.config.noise
    parsed = parsed.without_unused(find_yielding_options(parsed.config.train, noise, parsed.explicit))
    values, notes = resolve_noise_options(noise)
    places = {name: parsed.locations[name] for name in notes if name in parsed.locations}
    notices = [f"{place}: {notes[name]}" for name, place in places.items()]
    return replace(
        parsed,
        config=replace(parsed.config, noise=replace(parsed.config.noise, **values)),
        notices=[*parsed.notices, *notices],
        adjustments={**parsed.adjustments, **{name: notes[name] for name in values.keys() & notes.keys()}},
    )


def _convert_value(setting: RawSetting, option: Option) -> Any:
    if option.name in KOHYA_VALUES:
        setting = rename_kohya_value(setting, KOHYA_VALUES[option.name])
    if not setting.is_flag:
        return _UNSET if option.is_unset_by(setting.value) else option.parse_lenient_toml_value(setting.value)
    if option.is_unset_by_zero and setting.value == ["0"]:
        return _UNSET
    return bool(setting.value[0]) if option.value_type is bool else option.parse_words(setting.value)


def _translate_foreign_option(
    setting: RawSetting, options: dict[str, Option], verdicts: Mapping[str, OptionVerdict]
) -> tuple[str | None, Any]:
    """Return the option and value that an sd-scripts option stands for; no name if it has no effect here.

    Raises ``ValueError`` for an option that is unknown or not supported.
    """
    prefix, underscored = "--" if setting.is_flag else "", setting.name.replace("-", "_")
    if underscored != setting.name and underscored in options:
        raise ValueError(f"unknown option; did you mean {prefix}{underscored}?")
    verdict = verdicts.get(setting.name)
    if isinstance(verdict, UnsupportedOption):
        if not verdict.accepts(get_toml_value(setting)):
            raise ValueError(verdict.reason)
        return setting.name, _UNSET
    if not isinstance(verdict, OptionAlias):
        names = [*options, *verdicts, *COMMAND_OPTIONS]
        raise ValueError(f"unknown option{suggest_name(setting.name, names, prefix)}")
    if verdict.is_number:
        number = get_toml_value(setting)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or (setting.is_flag and not setting.value):
            raise ValueError("expects a number")
        return (verdict.option, verdict.value) if number else (None, None)
    if verdict.value is not None:
        is_on = get_toml_value(setting)
        is_on = bool(is_on) if is_on in (0, 1, "") else {"true": True, "false": False}.get(str(is_on).lower())
        if is_on is None or (setting.is_flag and setting.value):
            raise ValueError("takes no value" if setting.is_flag else "expected true or false")
        return (verdict.option, verdict.value) if is_on else (None, None)
    if setting.is_flag and len(setting.value) != 1:
        raise ValueError("expects one value")
    return verdict.option, _convert_value(setting, options[verdict.option])
