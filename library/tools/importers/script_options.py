"""Options that another program hands to sd-scripts: read as this program reads them on a command line.

So an option of sd-scripts is taken, has no effect or is refused here for the same reason as in a command of sd-scripts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import parse_config
from ...config.kohya_compat import KOHYA_OPTIONS, RENAMED_OPTIONS, OptionAlias
from ...config.options import flatten_config
from ...config.validate import MISSING_DATASET
from .imported import ImportedConfig


@dataclass(frozen=True)
class ScriptFlag:
    """A flag of sd-scripts' command line, and the key of the other program that stands for it."""

    key: str
    value: Any
    """The value of the key."""
    words: tuple[str, ...]
    is_default: bool = False
    """Whether the key is not in the file, and the value is the default of the other program."""

    @property
    def name(self) -> str:
        """The name of the option, without dashes."""
        return self.words[0].removeprefix("--").partition("=")[0]

    @property
    def options(self) -> tuple[str, ...]:
        """The names under which problems may speak of it: its own, and that of our option."""
        positive = self.name.removeprefix("no-")
        verdict = KOHYA_OPTIONS.get(self.name)
        ours = verdict.option if isinstance(verdict, OptionAlias) else RENAMED_OPTIONS.get(positive, positive)
        return self.name, positive, ours


def build_flag(key: str, name: str, value: Any, is_default: bool = False) -> ScriptFlag:
    """Build the flag of an option with one value; a switch has none."""
    return ScriptFlag(key, value, (f"--{name}",) if value is True else (f"--{name}={value}",), is_default)


def split_command_line(key: str, words: Sequence[str]) -> list[ScriptFlag]:
    """Split the words of a command line, which one key holds, into flags with the words that belong to them."""
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(word)
    return [ScriptFlag(key, " ".join(each), tuple(each)) for each in flags]


def take_script_flags(result: ImportedConfig, flags: Sequence[ScriptFlag]) -> None:
    """Set the options of flags, which override those that are set; what is refused or has no effect is listed."""
    if not flags:
        return
    before = build_command_line(result.options)
    parsed = parse_config([*before, *(word for flag in flags for word in flag.words)])
    is_complete = set(parsed.problems) <= {MISSING_DATASET}
    known = set(parsed.problems) if is_complete else {MISSING_DATASET, *parse_config(before).problems}
    values, unused = flatten_config(parsed.config), {place.flag: reason for place, reason in parsed.unused}
    for flag in flags:
        problems = [each for each in parsed.problems if each not in known and each.option in flag.options]
        option = flag.options[-1]
        if problems:
            reasons = (f"{each.text}; {each.fix}" if each.fix else each.text for each in problems)
            result.list_change(flag.key, flag.value, "; ".join(dict.fromkeys(reasons)), is_default=flag.is_default)
        elif f"--{flag.name}" in unused:
            if not flag.is_default:
                result.list_harmless(flag.key, flag.value, unused[f"--{flag.name}"] or "no effect on the result")
        elif option in parsed.locations and option in values:
            value = values[option]
            plain = isinstance(value, (bool, int, float, str, tuple))
            result.options[option] = list(value) if isinstance(value, tuple) else value if plain else str(value)


def build_command_line(options: Mapping[str, Any]) -> list[str]:
    """Format options as the words of a command line."""
    flags = list[str]()
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags
