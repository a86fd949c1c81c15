"""Problems and unused settings as the lines that a user reads, for comparison with what is expected."""

from collections.abc import Iterable

from library.problems import Place, Problem


def format_lines(problems: Iterable[object]) -> list[str]:
    """Format each problem as its line."""
    return [str(problem) for problem in problems]


def format_unused(unused: Iterable[tuple[Place, str]]) -> tuple[tuple[str, str], ...]:
    """Format the place of each setting without effect."""
    return tuple((str(place), reason) for place, reason in unused)


def format_texts(problems: Iterable[Problem]) -> list[str]:
    """Format cause and fix of each problem, without the option and where it was set."""
    return [f"{problem.text}; {problem.fix}" if problem.fix else problem.text for problem in problems]
