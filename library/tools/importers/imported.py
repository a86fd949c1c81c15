"""The result of an import, and the rules by which the keys of another program's file are taken over or listed."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...config.options import iter_options
from ...config.schema import RunConfig
from ...dataset.schema import DATASET_KEYS
from ...name_suggestions import suggest_name
from ...problems import Place, Problem

MAX_VALUE_LENGTH = 60
OUR_DEFAULTS: Mapping[str, Any] = {
    **{name: key.option.default for name, key in DATASET_KEYS.items()},
    **{option.name: option.default for option in iter_options(RunConfig)},
}
"""Defaults of the options of a run and of the keys of a dataset file."""
ALWAYS_WRITTEN = frozenset(
    "network_dim network_alpha optimizer_type learning_rate lr_scheduler max_train_steps seed mixed_precision".split()
)
"""Options that are written even where they are at our default, as a reader looks for them."""
_MISSING = object()


@dataclass(frozen=True)
class UntakenKey:
    """A key that has no equal here."""

    key: str
    value: Any
    reason: str
    """The reason why the key was not taken over, and what to do."""
    changes_result: bool
    is_default: bool = False
    """Whether the key is not in the file and the value is the default of the other program."""

    def __str__(self) -> str:
        suffix = " (default)" if self.is_default else ""
        return f"{self.key} = {format_value(self.value)}{suffix}: {self.reason}"


def format_value(value: Any) -> str:
    """Format a value as in JSON, on one line and not longer than a message should be."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 3]}..."


@dataclass
class ImportedConfig:
    """The options of a run and the tables of its dataset file, and what could not be taken over."""

    program: str
    options: dict[str, Any] = field(default_factory=dict)
    general: dict[str, Any] = field(default_factory=dict)
    datasets: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    untaken: list[UntakenKey] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    """Values that cannot be read, with their keys; nothing is written then."""
    family: str = ""

    def set_option(self, name: str, value: Any, is_explicit: bool = True) -> None:
        """Set an option, unless it is our default anyway."""
        if value is not None and (value != OUR_DEFAULTS[name] or (is_explicit and name in ALWAYS_WRITTEN)):
            self.options[name] = value

    def add_network_arg(self, name: str, value: Any) -> None:
        self.options["network_args"] = [*self.options.get("network_args", ()), f"{name}={value}"]

    def list_change(self, key: str, value: Any, reason: str, is_default: bool = False) -> None:
        """List a key whose effect on the result is lost."""
        self.untaken.append(UntakenKey(key, value, reason, changes_result=True, is_default=is_default))

    def list_harmless(self, key: str, value: Any, reason: str) -> None:
        """List a key that has no effect on the result."""
        self.untaken.append(UntakenKey(key, value, reason, changes_result=False))


@dataclass(frozen=True)
class Take:
    """The rule for a key that is taken over as an option or a key of the dataset file."""

    name: str
    default: Any = None
    """The value that the other program uses without the key."""
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Harmless:
    """A key that does not change the result; listed unless it has one of these values."""

    reason: str
    silent: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Unsupported:
    """A key that changes the result and has no equal here; listed unless it has one of these values, which do not."""

    reason: str
    silent: tuple[Any, ...] = (None, False, 0, "")
    default: Any = None


Rule = Take | Harmless | Unsupported


def define_harmless(reason: str, names: str, *silent: Any) -> dict[str, Rule]:
    """A rule for several keys, names separated by spaces."""
    return {name: Harmless(reason, silent) for name in names.split()}


def define_unsupported(reason: str, names: str, *silent: Any) -> dict[str, Rule]:
    """A rule for several keys that are switched off by false, 0, null and an empty text."""
    return {name: Unsupported(reason, (None, False, 0, "", [], {}, *silent)) for name in names.split()}


class KeyReader:
    """The keys of one table of another program's file; what is not read is listed as unknown."""

    def __init__(self, table: Any, result: ImportedConfig, prefix: str = ""):
        self.table: dict[str, Any] = table if isinstance(table, dict) else {}
        self.result, self.prefix = result, prefix
        self.read_keys: set[str] = set()
        if table is not None and not isinstance(table, dict):
            name = prefix.rstrip(".")
            text = f"expected a table, got {format_value(table)}"
            result.problems.append(Problem(name, text, place=Place(key=name)))

    def __contains__(self, key: str) -> bool:
        return self.table.get(key) is not None

    def read(self, key: str, default: Any = None, convert: Callable[[Any], Any] | None = None) -> Any:
        """Return a value, or the default where it is missing or null."""
        self.read_keys.add(key)
        value = self.table.get(key)
        if value is None:
            return default
        if convert is None:
            return value
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            name = f"{self.prefix}{key}"
            text = f"{error}, got {format_value(value)}"
            self.result.problems.append(Problem(name, text, place=Place(key=name)))
            return default

    def read_table(self, key: str) -> "KeyReader":
        """Return a reader of a nested table; empty where it is missing."""
        return KeyReader(self.read(key), self.result, f"{self.prefix}{key}.")

    def take(self, option: str, key: str, default: Any = None, convert: Callable[[Any], Any] | None = None) -> Any:
        """Read a value and set an option to it."""
        is_explicit = key in self
        value = self.read(key, default, convert)
        self.result.set_option(option, value, is_explicit)
        return value

    def apply_rules(self, rules: Mapping[str, Rule], target: dict[str, Any] | None = None) -> None:
        """Take keys over or list them; ``target`` is a table of the dataset file, else they are options of the run."""
        for key, rule in rules.items():
            if key in self.read_keys:
                continue
            if not isinstance(rule, Take):
                self._list_by_rule(key, rule)
            elif target is None:
                self.take(rule.name, key, rule.default, rule.convert)
            else:
                value = self.read(key, rule.default, rule.convert)
                if value is not None and value != OUR_DEFAULTS.get(rule.name):
                    target[rule.name] = value

    def list_change(self, key: str, reason: str, value: Any = _MISSING) -> None:
        """List one of these keys as one that changes the result."""
        self.read_keys.add(key)
        shown = self.table.get(key) if value is _MISSING else value
        self.result.list_change(f"{self.prefix}{key}", shown, reason, is_default=key not in self)

    def list_harmless(self, key: str, reason: str) -> None:
        self.read_keys.add(key)
        self.result.list_harmless(f"{self.prefix}{key}", self.table.get(key), reason)

    def list_unknown(self, program: str, known: Iterable[str] = ()) -> None:
        """List what was not read: no key of the other program, or of a version that is not known here."""
        for key in self.table:
            if key not in self.read_keys:
                hint = suggest_name(key, [*known, *self.read_keys])
                reason = f"unknown key of {program}{hint}; check what it does and set it by hand"
                self.result.list_change(f"{self.prefix}{key}", self.table[key], reason)

    def _list_by_rule(self, key: str, rule: Harmless | Unsupported) -> None:
        self.read_keys.add(key)
        default = rule.default if isinstance(rule, Unsupported) else None
        value = self.table[key] if key in self else default
        if value is None or is_among(value, rule.silent):
            return
        if isinstance(rule, Harmless):
            self.list_harmless(key, rule.reason)
        else:
            self.list_change(key, rule.reason, value)


def is_among(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value is one of these; a number in quotes counts as the number, as most programs read it."""
    candidates = [value]
    if isinstance(value, str):
        try:
            candidates.append(float(value))
        except ValueError:
            candidates.append({"true": True, "false": False}.get(value.lower(), value))
    return any(candidate == item and _is_same_kind(candidate, item) for candidate in candidates for item in values)


def _is_same_kind(value: Any, item: Any) -> bool:
    """Whether both are texts or containers, or neither; 1 is not the same as true, though 0 is as off as false."""
    if item in (1, True) and not isinstance(item, str):
        return isinstance(value, bool) == isinstance(item, bool)
    return isinstance(value, (str, list, dict)) == isinstance(item, (str, list, dict))


def to_number(value: Any) -> float:
    """Read a number, also in quotes: YAML reads 1e-4 as text."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("expected a number") from None


def to_integer(value: Any) -> int:
    """Read a whole number, also in quotes or with a decimal point."""
    number = to_number(value)
    if not number.is_integer():
        raise ValueError("expected a whole number")
    return int(number)


def to_positive_integer(value: Any) -> int | None:
    """Read a whole number of which 0, less or an empty text mean that it is not set."""
    number = 0 if value == "" else to_integer(value)
    return number if number > 0 else None


def to_positive_number(value: Any) -> float | None:
    """Read a number of which 0, less or an empty text mean that it is not set."""
    number = 0.0 if value == "" else to_number(value)
    return number if number > 0 else None


def to_switch(value: Any) -> bool:
    """Read a switch, also as the text true or false."""
    if isinstance(value, str) and value.lower() in ("true", "false", ""):
        return value.lower() == "true"
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ValueError("expected true or false")


def to_text(value: Any) -> str | None:
    """Read a text; an empty one means that it is not set."""
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return value.strip() or None
