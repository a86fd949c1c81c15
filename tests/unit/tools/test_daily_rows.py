"""Which rows of long tests a day has."""

from daily_rows import select_daily_rows

FAMILIES = [f"{family}-{check}" for family in "abcdefg" for check in ("loads", "saves")]


def select(names, day, days=3):
    return select_daily_rows([("test", name, name) for name in names], days, day)


def test_all_days_together_have_every_row_once():
    for names in (FAMILIES, FAMILIES[:4], ["x", "y", "z"], [f"sd1-{number}" for number in range(10)]):
        parts = [select(names, day) for day in range(7, 10)]
        assert sorted(name for part in parts for name in part) == sorted(names)
        assert max(map(len, parts)) - min(map(len, parts)) <= 2


def test_the_checks_of_a_family_share_a_day():
    for day in range(3):
        todays = select(FAMILIES, day)
        assert len(todays) == 2 * len({name[0] for name in todays})


def test_tests_of_few_rows_take_turns_as_a_whole_and_the_order_stays():
    rows = [("few", "b", 1), ("many", "x", 2), ("few", "a", 3), ("many", "y", 4), ("many", "z", 5), ("one", "", 6)]
    assert [select_daily_rows(rows, 3, day) for day in range(3)] == [[1, 2, 3], [4, 6], [5]]
