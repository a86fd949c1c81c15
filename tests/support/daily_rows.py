"""A part of the slow tests and of the rows of parametrized ones, another one each day.

Rows prove one invariant of many families, layouts or files, and many tests train in several processes.  All of them in
each run of continuous integration would take more than an hour; it has an eighth each day, so all of them in eight days,
and ``make test-slow`` has all at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def select_daily_rows(rows: Iterable[tuple[str, str, Row]], days: int, day: int) -> list[Row]:
    """Return the rows of ``(test, row, item)`` whose turn it is on this of ``days`` days, in their order.

    Rows with the same text before their first hyphen, such as all checks of a family, which share what they build, have
    their turn on the same day, unless a test has fewer of such groups than days.  Tests with fewer rows than days have
    their turn as a whole, one after the other.
    """
    rows = list(rows)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for test, row, _ in rows:
        names[test].append(row)
    whole = [test for test, each in names.items() if len(each) < days]
    chosen = {test: set(names[test]) for test in whole[day % days :: days]}
    chosen |= {test: _select_names(each, days, day) for test, each in names.items() if len(each) >= days}
    return [item for test, row, item in rows if row in chosen.get(test, ())]


def _select_names(names: Sequence[str], days: int, day: int) -> set[str]:
    groups = list(dict.fromkeys(_get_group(name) for name in names))
    if len(groups) < days:
        return {name for number, name in enumerate(names) if number % days == day % days}
    todays = {group for number, group in enumerate(groups) if number % days == day % days}
    return {name for name in names if _get_group(name) in todays}


def _get_group(name: str) -> str:
    return name.partition("-")[0]
