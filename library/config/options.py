"""Options as dataclass fields: declaration, parsing of values, and building a configuration from values."""

import dataclasses
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ExplicitOptions = frozenset[str]
"""Names of the options that were set by a flag or in the run TOML."""


OFF_AT_ZERO = frozenset(
    "scale_weight_norms sample_every_n_steps sample_every_n_epochs save_last_n_steps save_last_n_epochs"
    " save_last_n_steps_state save_last_n_epochs_state vae_batch_size ddp_timeout".split()
)
"""Options that sd-scripts takes for not set at 0."""


def define_option(default: Any, help: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """Declare a field of a config group: default, help and bounds; name and type are the field's own."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One option, for the parser, ``--help`` and docs/options.md."""

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
        if isinstance(self.value_type, tuple):
            return "|".join(self.value_type)
        names = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}
        return names.get(self.value_type) or self.value_type.syntax

    def parse_words(self, words: list[str]) -> Any:
        """Parse the words after a flag; ``ValueError`` says what is wrong."""
        values = tuple(self._validate_bounds(self._parse_word(word)) for word in words)
        return values if self.is_list else values[0]

    def is_unset_by(self, value: Any) -> bool:
        """Whether a TOML value leaves the option unset: ``resume = false`` or ``vae = ""``, as GUIs write them."""
        if self.name in OFF_AT_ZERO and value == 0:
            return True
        return (self.is_optional or self.is_list) and (value == "" or (value is False and self.value_type is not bool))

    def parse_lenient_toml_value(self, value: Any) -> Any:
        """Parse a value of a run TOML: a number or switch may be in quotes, and a switch may be 0 or 1."""
        if self.is_list and isinstance(value, list):
            return self.parse_toml_value([_convert_equal_value(item, self.value_type) for item in value])
        return self.parse_toml_value(_convert_equal_value(value, self.value_type))

    def parse_toml_value(self, value: Any) -> Any:
        """Parse a TOML value; a number in quotes is an error, as in dataset files of sd-scripts."""
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
        expected = self.value_type
        if isinstance(expected, tuple):
            return self._validate_choice(value)
        if expected is float and type(value) is int:
            return float(value)
        if expected not in (bool, int, float, str):
            return self._parse_custom(value)
        if type(value) is not expected:
            hint = _hint_unquoted(value, expected)
            raise ValueError(f"expected {_describe_type(expected)}, got {_format_value(value)}{hint}")
        return value

    def _validate_choice(self, value: Any) -> str:
        if isinstance(value, bool):
            value = str(value).lower()  # compile_dynamic = true
        if value not in self.value_type:
            hint = f"; write {value.lower()}" if isinstance(value, str) and value.lower() in self.value_type else ""
            raise ValueError(f"{_format_value(value)} is not one of {', '.join(self.value_type)}{hint}")
        return str(value)

    def _parse_custom(self, value: Any) -> Any:
        return value if self.value_type is str else self.value_type.parse(value)

    def _validate_bounds(self, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"expected a finite number, got {value}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"must be at least {self.minimum:g}, got {value}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"must be at most {self.maximum:g}, got {value}")
        return value


def iter_options(config_class: type) -> Iterator[Option]:
    """Iterate over the options of all groups of a configuration class, in order of declaration."""
    for group in dataclasses.fields(config_class):
        group_type = get_type_hints(config_class)[group.name]
        hints = get_type_hints(group_type)
        for field in dataclasses.fields(group_type):
            resolved = _resolve_type_hint(hints[field.name])
            yield Option(field.name, group.name, *resolved, field.default, **field.metadata)


def build_config(config_class: type, values: dict[str, Any]) -> Any:
    """Build a configuration from parsed values by option name; the others keep their defaults."""
    groups: dict[str, dict[str, Any]] = {group.name: {} for group in dataclasses.fields(config_class)}
    for option in iter_options(config_class):
        if option.name in values:
            groups[option.group][option.name] = values[option.name]
    hints = get_type_hints(config_class)
    return config_class(**{name: hints[name](**members) for name, members in groups.items()})


def flatten_config(config: Any) -> dict[str, Any]:
    """Return the value of every option by name: the inverse of ``build_config``."""
    return {option.name: getattr(getattr(config, option.group), option.name) for option in iter_options(type(config))}


def _resolve_type_hint(hint: Any) -> tuple[Any, bool, bool]:
    """Return value type, is_list and is_optional: ``int | None`` -> (int, False, True)."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (item for item in get_args(hint) if item is not type(None))
        value_type, is_list, _ = _resolve_type_hint(inner)
        return value_type, is_list, True
    if get_origin(hint) is Literal:
        return get_args(hint), False, False
    if get_origin(hint) is tuple:
        return _resolve_type_hint(get_args(hint)[0])[0], True, False
    return hint, False, False


def _describe_type(value_type: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[value_type]


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)


def _hint_unquoted(value: Any, value_type: type) -> str:
    """Suggest the value without quotes, if that is all that is wrong."""
    is_text = isinstance(value, str) and value_type in (bool, int, float)
    converted = _convert_equal_value(value, value_type) if is_text else value
    if type(converted) is not value_type:
        return ""
    return f"; write {value.strip().lower() if value_type is bool else value.strip()} without quotes"


def _convert_equal_value(value: Any, value_type: type) -> Any:
    """Convert a value of another type that can mean only one thing: ``"1e-4"``, ``"true"``, ``1`` for true, ``8.0``."""
    if type(value) is value_type or value_type not in (bool, int, float):
        return value
    if value_type is bool:
        text = value.strip().lower() if isinstance(value, str) else value
        return {"true": True, "false": False, 1: True, 0: False}.get(text, value) if type(text) in (str, int) else value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if value_type is float:
        return number
    return int(number) if number.is_integer() else value
