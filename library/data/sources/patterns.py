"""Patterns for paths: ``*`` and ``?`` within a name, ``**`` over folders, ``[a-c]``, ``{png,jpg}``, ``{00..12}``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_EXPANDED = 1_000_000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_PIECE = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


def expanded(pattern: str) -> list[str]:
    """What a shell makes of ``{a,b}`` and ``{000..012}``; other braces stay. ``ValueError`` when it has no end."""
    for start in (at for at, character in enumerate(pattern) if character == "{"):
        commas, end = _inside(pattern, start)
        choices = _choices(pattern, [start, *commas, end]) if end else None
        if choices is not None:
            found: list[str] = []
            for choice in choices:
                found += expanded(pattern[:start] + choice + pattern[end + 1 :])
                if len(found) > MOST_EXPANDED:
                    raise ValueError(f"{pattern!r} stands for more than {MOST_EXPANDED} names")
            return found
    return [pattern]


def _inside(pattern: str, start: int) -> tuple[list[int], int]:
    """The commas between a brace and the one that closes it, and that one; 0 when none does."""
    depth = 0
    commas: list[int] = []
    for at in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[at], 0)
        if depth == 0:
            return commas, at
        if depth == 1 and pattern[at] == ",":
            commas.append(at)
    return commas, 0


def _choices(pattern: str, edges: Sequence[int]) -> list[str] | None:
    """What stands between the edges, or the numbers of a range; nothing if it is neither."""
    parts = [pattern[one + 1 : other] for one, other in pairwise(edges)]
    span = _RANGE.fullmatch(parts[0])
    if len(parts) > 1 or span is None:
        return parts if len(parts) > 1 else None
    first, last = int(span[1]), int(span[2])
    if abs(last - first) >= MOST_EXPANDED:
        raise ValueError(f"{{{parts[0]}}} stands for more than {MOST_EXPANDED} names")
    is_padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-").startswith("0") for text in span.groups())
    width = max(len(span[1]), len(span[2])) if is_padded else 0
    step = 1 if last >= first else -1
    return [f"{number:0{width}d}" for number in range(first, last + step, step)]


@dataclass(frozen=True)
class Pattern:
    """One pattern of ``include`` or ``exclude``."""

    text: str
    regex: re.Pattern[str]

    @classmethod
    def of(cls, text: str) -> "Pattern":
        """Without ``/`` any part of a path may match, otherwise its start; a folder means all that is in it."""
        ways = []
        for one in expanded(text):
            body = one.rstrip("/")
            start = "" if "/" in body else "(?:.*/)?"
            body = body.removeprefix("./").removeprefix("/")
            ways.append(start + _as_regex(body) + ("/.*" if one.endswith("/") else "(?:/.*)?"))
        try:
            return cls(text, re.compile("|".join(ways), re.DOTALL))
        except re.error as error:
            raise ValueError(f"{text!r} is no pattern: {error.msg}") from None

    def matches(self, path: str) -> bool:
        return self.regex.fullmatch(path) is not None


def _as_regex(pattern: str) -> str:
    """A pattern without braces as a regular expression for the whole of a path."""
    return "".join(_piece_as_regex(piece[0]) for piece in _PIECE.finditer(pattern))


def _piece_as_regex(piece: str) -> str:
    if len(piece) > 2 and piece[0] == "[" and piece != "[!]":
        inside = piece[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
        inside = inside.replace("]", r"\]").replace("&&", r"&\&").replace("~~", r"~\~").replace("||", r"|\|")
        return f"(?!/)[^{inside[1:]}]" if inside[0] == "!" else f"(?!/)[{inside}]"
    return {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(piece, re.escape(piece))


@dataclass(frozen=True)
class Selection:
    """What patterns make of a list of paths."""

    chosen: list[str]
    idle: list[tuple[str, str]]  # key and text of the patterns that match nothing
    busy: list[tuple[str, str]]


def selected(paths: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> Selection:
    """The paths that match one of ``include``, if there is any, and none of ``exclude``."""
    if not include and not exclude:
        return Selection(list(paths), [], [])
    taken = set() if include else set(paths)
    idle: list[tuple[str, str]] = []
    busy: list[tuple[str, str]] = []
    for key, texts in (("include", include), ("exclude", exclude)):
        for text in texts:
            pattern = Pattern.of(text)
            matching = [path for path in paths if pattern.matches(path)]
            (busy if matching else idle).append((key, text))
            taken = taken.union(matching) if key == "include" else taken.difference(matching)
    return Selection([path for path in paths if path in taken], idle, busy)
