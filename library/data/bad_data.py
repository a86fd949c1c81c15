"""What cannot be used, told in one report: the first of each kind, how many there are, and where all of them stand."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..dataset.scan_cache import write_atomic

MOST = 100
"""So many lines are told in full."""
SHOWN = 5
"""Of one kind, when there are more."""
REPORT = "report.txt"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a picture from being used."""

    kind: str  # such as "truncated"; of the same kind are those with the same way out
    line: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to know about pictures that are used."""

    text: str
    names: tuple[str, ...] = ()  # of all of them, when the text holds only the first


def in_short(problems: Sequence[Problem]) -> list[str]:
    """All lines, kind by kind; of very many the first of each kind, and how many more there are of it."""
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for problem in problems:
        by_kind[problem.kind].append(problem.line)
    shown = SHOWN if len(problems) > MOST else MOST
    lines = []
    for kind, members in by_kind.items():
        lines += members[:shown]
        if len(members) > shown:
            lines.append(f"... and {len(members) - shown} more like the last ({kind})")
    return lines


def counted(problems: Iterable[Problem]) -> str:
    """``12 truncated, 3 empty``."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(problem.kind for problem in problems).most_common())


def is_cut_short(problems: Sequence[Problem], notices: Sequence[Notice]) -> bool:
    """Whether there is more than what is told."""
    most = max(Counter(problem.kind for problem in problems).values(), default=0)
    return (len(problems) > MOST and most > SHOWN) or any(notice.names for notice in notices)


def written_in_full(problems: Sequence[Problem], notices: Sequence[Notice], folders: Sequence[Path]) -> str:
    """Write everything into the first of ``folders`` that takes it; returns the words that say where it stands."""
    lines = [problem.line for problem in problems]
    for notice in notices:
        lines += ["", notice.text, *(f"  {name}" for name in notice.names)] if notice.names else []
    for folder in folders:
        path = folder / REPORT
        try:
            write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
        except OSError:
            continue
        return f"; all of them stand in {path}"
    return ""
