"""Bind flat, kohya-style options (flags and TOML) to frozen groups; knows no option by name."""

import dataclasses
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def opt(default: Any, help: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A field of a group: default, help text and bounds stand beside the name and the type."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One option as the tools see it: for reading it, for ``--help`` and for docs/options.md."""

    name: str
    group: str
    kind: Any  # bool, int, float, str, a tuple of choices, or a class with ``parse`` and ``syntax``
    many: bool
    optional: bool
    default: Any
    help: str
    minimum: float | None
    maximum: float | None

    @property
    def syntax(self) -> str:
        """What may be written for the value."""
        if isinstance(self.kind, tuple):
            return "|".join(self.kind)
        return {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(self.kind) or self.kind.syntax

    def from_text(self, words: list[str]) -> Any:
        """The value of a flag with these words behind it; ``ValueError`` says what is wrong."""
        if self.many:
            return tuple(self._checked(self._word(word)) for word in words)
        return self._checked(self._word(words[0]))

    def from_toml(self, value: Any) -> Any:
        """The value of a TOML key; numbers in quotes and the like are errors, not guesses."""
        if self.many:
            items = value if isinstance(value, list) else [value]
            return tuple(self._checked(self._item(item)) for item in items)
        return self._checked(self._item(value))

    def _word(self, word: str) -> Any:
        if self.kind in (int, float):
            try:
                return self.kind(word)
            except ValueError:
                raise ValueError(f"expected {_a(self.kind)}, got {word!r}") from None
        return self._choice(word) if isinstance(self.kind, tuple) else self._parsed(word)

    def _item(self, value: Any) -> Any:
        if isinstance(self.kind, tuple):
            return self._choice(value)
        if self.kind is float and type(value) is int:
            return float(value)
        if self.kind in (bool, int, float, str):
            if type(value) is self.kind:
                return value
            raise ValueError(f"expected {_a(self.kind)}, got {_shown(value)}{_unquoted(value, self.kind)}")
        return self._parsed(value)

    def _choice(self, value: Any) -> str:
        if value not in self.kind:
            raise ValueError(f"{_shown(value)} is not one of {', '.join(self.kind)}")
        return str(value)

    def _parsed(self, value: Any) -> Any:
        return value if self.kind is str else self.kind.parse(value)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"expected a finite number, got {value}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{value} is too small; at least {self.minimum:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{value} is too large; at most {self.maximum:g}")
        return value


def options_of(root: type) -> Iterator[Option]:
    """Every option of a configuration class, in order of declaration."""
    for group in dataclasses.fields(root):
        group_type = get_type_hints(root)[group.name]
        hints = get_type_hints(group_type)
        for field in dataclasses.fields(group_type):
            kind, many, optional = _kind(hints[field.name])
            yield Option(field.name, group.name, kind, many, optional, field.default, **field.metadata)


def build(root: type, values: dict[str, Any]) -> Any:
    """Make the configuration from checked values; what is not named keeps its default."""
    groups: dict[str, dict[str, Any]] = {group.name: {} for group in dataclasses.fields(root)}
    for option in options_of(root):
        if option.name in values:
            groups[option.group][option.name] = values[option.name]
    hints = get_type_hints(root)
    return root(**{name: hints[name](**members) for name, members in groups.items()})


def flat(config: Any) -> dict[str, Any]:
    """The value of every option by name: the other direction of ``build``."""
    return {option.name: getattr(getattr(config, option.group), option.name) for option in options_of(type(config))}


def _kind(hint: Any) -> tuple[Any, bool, bool]:
    """``int | None`` -> (int, False, True); ``tuple[str, ...]`` -> (str, True, False)."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (item for item in get_args(hint) if item is not type(None))
        kind, many, _ = _kind(inner)
        return kind, many, True
    if get_origin(hint) is Literal:
        return get_args(hint), False, False
    if get_origin(hint) is tuple:
        kind, _, _ = _kind(get_args(hint)[0])
        return kind, True, False
    return hint, False, False


def _a(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    return f"the text {value!r}" if isinstance(value, str) else repr(value)


def _unquoted(value: Any, kind: type) -> str:
    """The way out when a value is right but for its quotation marks."""
    if not isinstance(value, str):
        return ""
    text = value.strip()
    if kind is bool:
        return f"; write {text.lower()} without quotes" if text.lower() in ("true", "false") else ""
    try:
        kind(text)
    except ValueError:
        return ""
    return f"; write {text} without quotes"
