"""What cannot be used, told in one report: the first of each kind, how many there are, and where all of them stand."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..dataset.scan_cache import write_atomic

MAX_LISTED_PROBLEMS = 100
"""So many lines are told in full."""
MAX_LISTED_PER_KIND = 5
"""Of one kind, when there are more."""
REPORT_FILENAME = "report.txt"


@dataclass(frozen=True, slots=True)
class DataProblem:
    """Something that keeps a picture from being used."""

    kind: str  # such as "truncated"; of the same kind are those with the same way out
    message: str


@dataclass(frozen=True, slots=True)
class DataNotice:
    """Something to know about pictures that are used."""

    text: str
    names: tuple[str, ...] = ()  # of all of them, when the text holds only the first


def summarize_problems(problems: Sequence[DataProblem]) -> list[str]:
    """All lines, kind by kind; of very many the first of each kind, and how many more there are of it."""
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for problem in problems:
        by_kind[problem.kind].append(problem.message)
    shown = MAX_LISTED_PER_KIND if len(problems) > MAX_LISTED_PROBLEMS else MAX_LISTED_PROBLEMS
    lines = []
    for kind, members in by_kind.items():
        lines += members[:shown]
        if len(members) > shown:
            lines.append(f"... and {len(members) - shown} more like the last ({kind})")
    return lines


def format_problem_counts(problems: Iterable[DataProblem]) -> str:
    """``12 truncated, 3 empty``."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(problem.kind for problem in problems).most_common())


def is_summary_truncated(problems: Sequence[DataProblem], notices: Sequence[DataNotice]) -> bool:
    """Whether there is more than what is told."""
    most = max(Counter(problem.kind for problem in problems).values(), default=0)
    return (len(problems) > MAX_LISTED_PROBLEMS and most > MAX_LISTED_PER_KIND) or any(notice.names for notice in notices)


def write_full_report(problems: Sequence[DataProblem], notices: Sequence[DataNotice], directories: Sequence[Path]) -> str:
    """Write everything into the first of ``folders`` that takes it; returns the words that say where it stands."""
    lines = [problem.message for problem in problems]
    for notice in notices:
        lines += ["", notice.text, *(f"  {name}" for name in notice.names)] if notice.names else []
    for folder in directories:
        path = folder / REPORT_FILENAME
        try:
            write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
        except OSError:
            continue
        return f"; all of them stand in {path}"
    return ""
