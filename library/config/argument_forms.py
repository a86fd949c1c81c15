"""How the values of ``network_args`` are written: one function for each form, which says what it expected."""

import ast
import re
from collections.abc import Callable
from typing import Any

PRESETS = ("cosine", "sine", "linear", "reverse_linear", "zeros")
"""Names of curves over the blocks of a UNet."""
EVERY_BLOCK = 10**6
"""Stands for the last block of a model, whichever it is."""


def flag(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError("expected True or False")
    return words[text.lower()]


def number(least: float, most: float = float("inf"), kind: type = float) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError("expected a whole number" if kind is int else "expected a number") from None
        if not least <= value <= most:
            raise ValueError(f"expected {least:g} {'or more' if most == float('inf') else f'to {most:g}'}")
        return value

    return read


def factor(text: str) -> int:
    """How LoKr cuts a matrix: a whole number, or -1 for as even as can be."""
    value: int = number(-1, kind=int)(text)
    if not value:
        raise ValueError("expected 1 or more, or -1 for as even as can be")
    return value


rank = number(0, kind=int)
positive = number(1e-12)
share = number(0, 0.999)


def list_of(read: Callable[[str], Any], count: int | None = None) -> Callable[[str], tuple[Any, ...]]:
    def read_all(text: str) -> tuple[Any, ...]:
        items = tuple(read(item.strip()) for item in text.strip("[]() ").split(",") if item.strip())
        if not items or count not in (None, len(items)):
            raise ValueError(f"expected {count or 'some'} values with commas between them")
        return items

    return read_all


def weights(text: str) -> tuple[float, ...] | str:
    """Numbers, or the name of a curve with a number that is added, such as ``sine+0.5``."""
    name, _, base = text.partition("+")
    if name in PRESETS:
        number(0)(base or "0")
        return text
    found: tuple[float, ...] = list_of(number(0))(text)
    return found


def patterns(text: str) -> tuple[str, ...]:
    """One regular expression, or a list of them as in Python."""
    try:
        found = ast.literal_eval(text) if text.startswith(("[", "(")) else [text]
        expressions = tuple(found)
        for expression in expressions:
            re.compile(expression)
    except (ValueError, SyntaxError, TypeError, re.error) as error:
        raise ValueError(f"expected a list of regular expressions such as ['.*ff.*']: {error}") from None
    return expressions


def by_pattern(read: Callable[[str], Any]) -> Callable[[str], tuple[tuple[str, Any], ...]]:
    """``pattern=value,pattern=value``."""

    def read_all(text: str) -> tuple[tuple[str, Any], ...]:
        found = []
        for item in text.split(","):
            pattern, equals, value = item.strip().rpartition("=")
            if not equals:
                raise ValueError("expected pattern=value, with commas between several")
            patterns(f"[{pattern!r}]")
            found.append((pattern, read(value)))
        return tuple(found)

    return read_all


def blocks(text: str) -> tuple[tuple[int, int], ...]:
    """``all``, ``none``, or numbers and ranges such as ``0,3-7``, as pairs of first and last."""
    if text in ("all", "none"):
        return ((0, EVERY_BLOCK),) if text == "all" else ()
    try:
        ends = [item.strip().partition("-") for item in text.split(",")]
        return tuple((int(first), int(last) if dash else int(first)) for first, dash, last in ends)
    except ValueError:
        raise ValueError("expected all, none, or numbers such as 0,3-7") from None


def one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return text

    return read
