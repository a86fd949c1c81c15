"""Rules across options; each names the options it speaks of and says the way out."""

import dataclasses
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

OptionConflict = tuple[tuple[str, ...], str]
"""The options concerned, the one to change first, and what is wrong."""


ExplicitOptions = frozenset[str]
"""Names of the options that somebody wrote down."""


def define_option(default: Any, help: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A field of a group: default, help text and bounds stand beside the name and the type."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One option as the tools see it: for reading it, for ``--help`` and for docs/options.md."""

    name: str
    group: str
    value_type: Any  # bool, int, float, str, a tuple of choices, or a class with ``parse`` and ``syntax``
    is_list: bool
    is_optional: bool
    default: Any
    help: str
    minimum: float | None
    maximum: float | None

    @property
    def syntax(self) -> str:
        """What may be written for the value."""
        if isinstance(self.value_type, tuple):
            return "|".join(self.value_type)
        return {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(
            self.value_type
        ) or self.value_type.syntax

    def parse_words(self, words: list[str]) -> Any:
        """The value of a flag with these words behind it; ``ValueError`` says what is wrong."""
        if self.is_list:
            return tuple(self._validate_bounds(self._parse_word(word)) for word in words)
        return self._validate_bounds(self._parse_word(words[0]))

    def parse_toml_value(self, value: Any) -> Any:
        """The value of a TOML key; numbers in quotes and the like are errors, not guesses."""
        if self.is_list:
            items = value if isinstance(value, list) else [value]
            return tuple(self._validate_bounds(self._parse_item(item)) for item in items)
        return self._validate_bounds(self._parse_item(value))

    def _parse_word(self, word: str) -> Any:
        if self.value_type in (int, float):
            try:
                return self.value_type(word)
            except ValueError:
                raise ValueError(f"expected {_describe_type(self.value_type)}, got {word!r}") from None
        return self._validate_choice(word) if isinstance(self.value_type, tuple) else self._parse_custom(word)

    def _parse_item(self, value: Any) -> Any:
        if isinstance(self.value_type, tuple):
            return self._validate_choice(value)
        if self.value_type is float and type(value) is int:
            return float(value)
        if self.value_type in (bool, int, float, str):
            if type(value) is self.value_type:
                return value
            raise ValueError(
                f"expected {_describe_type(self.value_type)}, got {_format_value(value)}{_hint_unquoted(value, self.value_type)}"
            )
        return self._parse_custom(value)

    def _validate_choice(self, value: Any) -> str:
        if isinstance(value, bool):
            value = str(value).lower()  # compile_dynamic = true
        if value not in self.value_type:
            raise ValueError(f"{_format_value(value)} is not one of {', '.join(self.value_type)}")
        return str(value)

    def _parse_custom(self, value: Any) -> Any:
        return value if self.value_type is str else self.value_type.parse(value)

    def _validate_bounds(self, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"expected a finite number, got {value}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{value} is too small; at least {self.minimum:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{value} is too large; at most {self.maximum:g}")
        return value


def iter_options(config_class: type) -> Iterator[Option]:
    """Every option of a configuration class, in order of declaration."""
    for group in dataclasses.fields(config_class):
        group_type = get_type_hints(config_class)[group.name]
        hints = get_type_hints(group_type)
        for field in dataclasses.fields(group_type):
            kind, many, optional = _resolve_type_hint(hints[field.name])
            yield Option(field.name, group.name, kind, many, optional, field.default, **field.metadata)


def build_config(config_class: type, values: dict[str, Any]) -> Any:
    """Make the configuration from checked values; what is not named keeps its default."""
    groups: dict[str, dict[str, Any]] = {group.name: {} for group in dataclasses.fields(config_class)}
    for option in iter_options(config_class):
        if option.name in values:
            groups[option.group][option.name] = values[option.name]
    hints = get_type_hints(config_class)
    return config_class(**{name: hints[name](**members) for name, members in groups.items()})


def flatten_config(config: Any) -> dict[str, Any]:
    """The value of every option by name: the other direction of ``build``."""
    return {option.name: getattr(getattr(config, option.group), option.name) for option in iter_options(type(config))}


def _resolve_type_hint(hint: Any) -> tuple[Any, bool, bool]:
    """``int | None`` -> (int, False, True); ``tuple[str, ...]`` -> (str, True, False)."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (item for item in get_args(hint) if item is not type(None))
        kind, many, _ = _resolve_type_hint(inner)
        return kind, many, True
    if get_origin(hint) is Literal:
        return get_args(hint), False, False
    if get_origin(hint) is tuple:
        kind, _, _ = _resolve_type_hint(get_args(hint)[0])
        return kind, True, False
    return hint, False, False


def _describe_type(value_type: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[value_type]


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    return f"the text {value!r}" if isinstance(value, str) else repr(value)


def _hint_unquoted(value: Any, value_type: type) -> str:
    """The way out when a value is right but for its quotation marks."""
    if not isinstance(value, str):
        return ""
    text = value.strip()
    if value_type is bool:
        return f"; write {text.lower()} without quotes" if text.lower() in ("true", "false") else ""
    try:
        value_type(text)
    except ValueError:
        return ""
    return f"; write {text} without quotes"
