"""What is wrong with what a user gave, as a value: option, place, cause and fix; one formatter makes it a line.

Validators yield problems without a place. ``ParsedConfig.locate_problems`` fills in the flag or the line of the run
TOML by the name of the option. No program reads a formatted line back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where a user wrote or put something: a flag, a key in a line of a file, or a file as a whole."""

    file: str = ""
    line: int | None = None
    part: str = ""
    """The part of a file that has no line numbers: a table of a JSON file, a row, a prompt."""
    key: str = ""
    """The option or key as it is written there."""
    flag: str = ""
    """The argument of a command line, with its dashes, or another program that sets it; then there is no file."""

    def __str__(self) -> str:
        file = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(filter(None, (self.flag, file, self.part, self.key)))

    def with_key(self, key: str) -> "Place":
        """Return the place of a key in this table or line; a flag names what it sets itself."""
        return self if self.flag else replace(self, key=key)

    def without_key(self) -> "Place":
        """Return the file and the line, for a message that names the key itself."""
        return self if self.flag else replace(self, key="")

    def narrow(self, word: str) -> "Place":
        """Return the place of one of several words that are given here: ``--network_args conv_dim``."""
        return replace(self, flag=f"{self.flag} {word}") if self.flag else replace(self, key=f"{self.key} {word}")


@dataclass(frozen=True)
class Problem:
    """One problem; ``str`` is the line that a user reads."""

    option: str
    """The option or dataset key, the one to change first; empty where the problem is that of a file or an argument."""
    text: str
    """The cause."""
    fix: str = ""
    """The way out, if the cause does not show it."""
    place: Place | None = None
    """Where the option was set; None where a validator knows only its name."""
    value: str = ""
    """The value of the option, where the line is to name it beside the option."""
    others: tuple[str, ...] = ()
    """The other options that take part in it."""
    scope: str = ""
    """The ranks or layouts that have the problem, where not all of them do."""
    note: str = ""
    """Why a value in the text is not the one that was set, or what else explains the problem."""

    def __str__(self) -> str:
        option = f"--{self.option}" if self.option else ""
        where = str(self.place) if self.place is not None else option
        where = f"{where} {self.value}" if self.value else where
        text = f"{self.text}; {self.fix}" if self.fix else self.text
        line = ": ".join(filter(None, (self.scope, where, text)))
        return f"{line} ({self.note})" if self.note else line

    @property
    def options(self) -> tuple[str, ...]:
        """All options that take part in it."""
        return (self.option, *self.others) if self.option else self.others

    def export_json(self) -> dict[str, Any]:
        """Export as plain data that ``load_problem`` reads."""
        return asdict(self)


def report_file(path: object, text: str, fix: str = "") -> Problem:
    """Build a problem of a file or folder as a whole, such as an image."""
    return Problem("", text, fix, Place(str(path)))


def report_argument(word: str, text: str, fix: str = "") -> Problem:
    """Build a problem of a word of a command line that is no option of a run."""
    return Problem("", text, fix, Place(flag=word))


def load_problem(values: Mapping[str, Any]) -> Problem:
    """Rebuild a problem from what ``Problem.export_json`` has exported, as JSON returns it."""
    place = None if values["place"] is None else Place(**values["place"])
    return Problem(**{**values, "place": place, "others": tuple(values["others"])})


def locate_problems(problems: Iterable[Problem], places: Mapping[str, Place]) -> list[Problem]:
    """Fill in where each option was set, for problems that do not know it.

    A dataset key that an option of the run sets has the flag as its place, also where the run TOML sets the option.
    """
    names = {f"--{name}": name for name in places}
    located = []
    for each in problems:
        name = each.option if each.place is None else names.get(each.place.flag, "")
        if name in places:
            place = places[name]
            if each.place is not None and each.place.key:  # a part of the value, such as an option of a prompt
                place = replace(place, part=place.key, key=each.place.key)
            each = replace(each, option=name, place=place)
        located.append(each)
    return located


def dedupe_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Keep the first of equal problems, in their order."""
    return list(dict.fromkeys(problems))
