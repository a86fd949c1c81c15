"""How the values of ``network_args`` are written: one function for each form, which says what it expected."""

import ast
import re
from collections.abc import Callable
from typing import Any

LR_WEIGHT_PRESETS = ("cosine", "sine", "linear", "reverse_linear", "zeros")
"""Names of curves over the blocks of a UNet."""


LAST_BLOCK = 10**6
"""Stands for the last block of a model, whichever it is."""


def parse_bool(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError("expected True or False")
    return words[text.lower()]


def make_number_parser(
    minimum: float, maximum: float = float("inf"), number_type: type = float
) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = number_type(text)
        except ValueError:
            raise ValueError("expected a whole number" if number_type is int else "expected a number") from None
        if not minimum <= value <= maximum:
            raise ValueError(f"expected {minimum:g} {'or more' if maximum == float('inf') else f'to {maximum:g}'}")
        return value

    return parse


def parse_lokr_factor(text: str) -> int:
    """How LoKr cuts a matrix: a whole number, or -1 for as even as can be."""
    value: int = make_number_parser(-1, number_type=int)(text)
    if not value:
        raise ValueError("expected 1 or more, or -1 for as even as can be")
    return value


parse_rank = make_number_parser(0, number_type=int)


parse_positive = make_number_parser(1e-12)


parse_dropout_rate = make_number_parser(0, 0.999)


def make_list_parser(parse_item: Callable[[str], Any], count: int | None = None) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        items = tuple(parse_item(item.strip()) for item in text.strip("[]() ").split(",") if item.strip())
        if not items or count not in (None, len(items)):
            raise ValueError(f"expected {count or 'some'} values with commas between them")
        return items

    return parse


def parse_block_lr_weights(text: str) -> tuple[float, ...] | str:
    """Numbers, or the name of a curve with a number that is added, such as ``sine+0.5``."""
    name, _, base = text.partition("+")
    if name in LR_WEIGHT_PRESETS:
        make_number_parser(0)(base or "0")
        return text
    found: tuple[float, ...] = make_list_parser(make_number_parser(0))(text)
    return found


def parse_patterns(text: str) -> tuple[str, ...]:
    """One regular expression, or a list of them as in Python."""
    try:
        found = ast.literal_eval(text) if text.startswith(("[", "(")) else [text]
        expressions = tuple(found)
        for expression in expressions:
            re.compile(expression)
    except (ValueError, SyntaxError, TypeError, re.error) as error:
        raise ValueError(f"expected a list of regular expressions such as ['.*ff.*']: {error}") from None
    return expressions


def make_pattern_parser(parse_value: Callable[[str], Any]) -> Callable[[str], tuple[tuple[str, Any], ...]]:
    """``pattern=value,pattern=value``."""

    def parse(text: str) -> tuple[tuple[str, Any], ...]:
        found = []
        for item in text.split(","):
            pattern, equals, value = item.strip().rpartition("=")
            if not equals:
                raise ValueError("expected pattern=value, with commas between several")
            parse_patterns(f"[{pattern!r}]")
            found.append((pattern, parse_value(value)))
        return tuple(found)

    return parse


def parse_block_indices(text: str) -> tuple[tuple[int, int], ...]:
    """``all``, ``none``, or numbers and ranges such as ``0,3-7``, as pairs of first and last."""
    if text in ("all", "none"):
        return ((0, LAST_BLOCK),) if text == "all" else ()
    try:
        ends = [item.strip().partition("-") for item in text.split(",")]
        return tuple((int(first), int(last) if dash else int(first)) for first, dash, last in ends)
    except ValueError:
        raise ValueError("expected all, none, or numbers such as 0,3-7") from None


def make_choice_parser(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return parse
