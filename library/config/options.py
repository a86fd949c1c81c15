"""Options as dataclass fields: declaration, parsing of values, and building a configuration from values."""

import dataclasses
import functools
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin

from .option_needs import Needs

ExplicitOptions = frozenset[str]
"""Names of the options that were set by a flag or in the run TOML."""


@dataclass(frozen=True)
class Alias:
    """Another name of an option; with a value, a switch that sets the option to this value, unless it is set."""

    name: str
    value: Any = None
    program: str = "sd-scripts"


@dataclass(frozen=True, kw_only=True)
class OptionFacts:
    """Everything that is known about an option besides its name, type and default."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    needs: Needs | None = None
    """What has to be given for the option to have an effect; an empty tuple says that it always has one. Where a need
    is not met, the option is named in a notice and set back to its default."""
    is_unset_by_zero: bool = False
    """Whether 0, which is below the minimum, turns the option off, as in sd-scripts."""
    changes_result: bool = True
    """Whether another value gives another adapter, rounding aside. The others may differ when a run is resumed, and
    no switch of sd-scripts that stands for one of them contradicts it."""
    is_compared_by_content: bool = False
    """Whether a checkpoint records what the option leads to, such as the files or the images of a step, and not its
    value."""
    is_path: bool = False
    """Whether the value may differ between machines because it names a file or folder."""
    is_per_machine: bool = False
    """Whether the value may differ between the processes of one run."""
    is_public: bool = False
    """Whether a text may be sent to trackers: it holds no path and nothing private. Numbers, switches and choices
    always may."""
    is_basic: bool = False
    """Whether the form of the web page shows the option first."""
    is_in_form: bool = True
    """Whether the form of the web page has the option; the page itself sets the others."""
    changes_text_outputs: bool = True
    """Whether cached outputs of text encoders depend on the value; only for options of the model."""
    is_for_texts: bool = False
    """Whether training on texts alone uses the option; of the groups of images and their caches, it uses no other."""
    is_of_one_run: bool = False
    """Whether the value belongs to one run: where it writes, and from which step it starts. A sweep sets it itself."""
    aliases: tuple[Alias, ...] = ()
    """The names of the option in other programs."""
    value_aliases: tuple[tuple[str, str], ...] = ()
    """Values that sd-scripts spells otherwise, and ours."""
    kohya_default: str = ""
    """What sd-scripts does without the option, where that differs."""
    default_text: str = ""
    """What happens without the option, where the default does not say it."""
    musubi_default: Any = None
    """The default of musubi-tuner, where it differs; it is taken for commands and run files of musubi-tuner."""
    musubi_default_text: str = ""
    """What musubi-tuner does without the option, where that differs and is not taken."""
    former_name: str = ""
    """The name in the last release, accepted with a notice."""
    former_values: tuple[tuple[Any, str], ...] = ()
    """Values of the last release and their present names, accepted with a notice."""
    former_default: str | None = None
    """The default that checkpoints of the last release recorded; today's default does the same."""
    metadata_key: str = ""
    """The key under which a LoRA file records the value."""
    written_at_default: Literal["", "always", "kohya"] = ""
    """When a run file that is written names the option although it has our default: ``always``, or beside
    ``objective_defaults kohya``, where the default is another one."""
    is_dropped_at_zero: bool = False
    """Whether 0 is recorded as None in the metadata, as by sd-scripts."""
    varies: Literal["", "image", "caption"] = ""
    """Whether it draws another image or another caption each time; validation images are never varied."""
    dataset_table: Literal["", "dataset", "shared", "subset", "run"] = ""
    """The tables that have the option as a key, where a dataset file has it as well: ``dataset`` for [general] and
    [[datasets]], ``shared`` for these and [[datasets.subsets]], ``subset`` for subsets only, ``run`` for no table."""
    dataset_key: str = ""
    """The name of the key in a dataset file, where it is another one."""


ALWAYS: Needs = ()
"""The needs of an option that always has an effect."""


def define_option(default: Any, help: str, **facts: Any) -> Any:
    """Declare a field of a config group: default, help and ``OptionFacts``; name and type are the field's own."""
    return dataclasses.field(default=default, metadata={"facts": OptionFacts(help=help, **facts)})


@dataclass(frozen=True, kw_only=True)
class Option(OptionFacts):
    """One option with all its facts."""

    name: str
    group: str
    value_type: Any  # bool, int, float, str, a tuple of choices, or a class with ``parse`` and ``syntax``
    is_list: bool
    is_optional: bool
    default: Any

    @property
    def syntax(self) -> str:
        if isinstance(self.value_type, tuple):
            return "|".join(self.value_type)
        names = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}
        return names.get(self.value_type) or self.value_type.syntax

    def is_off(self, value: Any) -> bool:
        """Whether a value asks for what happens without the option: the default, or 0, false or nothing if that is."""
        return bool(value == self.default or not (value or self.default))

    def parse_words(self, words: list[str]) -> Any:
        """Parse the words after a flag; ``ValueError`` says what is wrong."""
        values = tuple(self._validate_bounds(self._parse_word(word)) for word in words)
        return values if self.is_list else values[0]

    def is_unset_by(self, value: Any) -> bool:
        """Whether a TOML value leaves the option unset: ``resume = false`` or ``vae = ""``, as GUIs write them."""
        if self.is_unset_by_zero and value == 0:
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
            raise ValueError(f"must be at least {_format_bound(self.minimum)}, got {value}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"must be at most {_format_bound(self.maximum)}, got {value}")
        return value


def iter_options(config_class: type) -> Iterator[Option]:
    """Iterate over the options of all groups of a configuration class, in order of declaration."""
    for group in dataclasses.fields(config_class):
        yield from iter_group_options(cast(type, group.type), group.name)


def iter_group_options(group_type: type, name: str = "") -> Iterator[Option]:
    """Iterate over the options of one group, which a configuration class calls ``name``."""
    yield from _list_group_options(group_type, name)


@functools.cache
def _list_group_options(group_type: type, name: str) -> tuple[Option, ...]:
    """List the options of a group; what is asked of them goes through all of them again and again."""
    options = list[Option]()
    for field in dataclasses.fields(group_type):
        value_type, is_list, is_optional = _resolve_type_hint(field.type)
        option = Option(
            name=field.name,
            group=name,
            value_type=value_type,
            is_list=is_list,
            is_optional=is_optional,
            default=field.default,
            **vars(field.metadata["facts"]),
        )
        options.append(option)
    return tuple(options)


def build_config(config_class: type, values: dict[str, Any]) -> Any:
    """Build a configuration from parsed values by option name; the others keep their defaults."""
    groups = {group.name: cast(type, group.type) for group in dataclasses.fields(config_class)}
    return config_class(
        **{
            name: group(**{each.name: values[each.name] for each in dataclasses.fields(group) if each.name in values})
            for name, group in groups.items()
        }
    )


def flatten_config(config: Any) -> dict[str, Any]:
    """Return the value of every option by name: the inverse of ``build_config``."""
    groups = [getattr(config, group.name) for group in dataclasses.fields(config)]
    return {each.name: getattr(group, each.name) for group in groups for each in dataclasses.fields(group)}


def _resolve_type_hint(hint: Any) -> tuple[Any, bool, bool]:
    """Return value type, is_list and is_optional: (int, False, True) for ``int | None``."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (item for item in get_args(hint) if item is not type(None))
        value_type, is_list, _ = _resolve_type_hint(inner)
        return value_type, is_list, True
    if get_origin(hint) is Literal:
        return get_args(hint), False, False
    if get_origin(hint) is tuple:
        return _resolve_type_hint(get_args(hint)[0])[0], True, False
    return hint, False, False


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


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
