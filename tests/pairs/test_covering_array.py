"""The covering array: every allowed pair is in a row, refused ones are in none, and few rows suffice."""

import itertools

import pytest
from covering_array import CoveringArray


def list_pairs(rows):
    return {frozenset(pair) for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def test_every_pair_is_in_few_rows_and_they_are_the_same_each_time():
    sizes = [9, 7, 4, 3, 3, 2, 2, 2]
    array = CoveringArray(sizes, lambda row: "")
    rows = list(array.iter_rows())
    assert list_pairs(rows) == array.pairs and not array.refused
    assert len(rows) <= 1.2 * 9 * 7
    assert rows == list(CoveringArray(sizes, lambda row: "").iter_rows())


@pytest.mark.parametrize("needs", ["two settings", "a setting with any but the default", "a single setting"])
def test_what_is_refused_is_learned_and_left_out(needs):
    def find_problem(row):
        refused = {
            "two settings": row[0] == 3 and row[1] == 2,
            "a setting with any but the default": row[0] == 3 and row[1] == 0,
            "a single setting": row[0] == 3,
        }
        return "refused" if refused[needs] else ""

    array = CoveringArray([5, 4, 3, 2], find_problem)
    rows = list(array.iter_rows())
    assert rows and not any(map(find_problem, rows))
    refused = {
        "two settings": [{(0, 3), (1, 2)}],
        "a setting with any but the default": [{(0, 3), (1, 0)}],
        "a single setting": [{(0, 3)}],
    }
    assert array.refused.keys() == {*map(frozenset, refused[needs])}
    assert array.pairs - list_pairs(rows) == array.refused_pairs and not array.unreached


def test_pairs_that_only_a_third_setting_allows_are_found():
    array = CoveringArray([4, 4, 4], lambda row: "refused" if row[0] == 2 and row[1] == 2 and row[2] != 3 else "")
    rows = list(array.iter_rows())
    assert (2, 2, 3) in rows and list_pairs(rows) == array.pairs


def test_a_pair_that_is_refused_with_every_third_setting_is_told_as_unreached():
    array = CoveringArray([3, 3, 2], lambda row: "refused" if row[0] == 2 and row[1] == 2 and row[2] in (0, 1) else "")
    rows = list(array.iter_rows())
    assert array.pairs - list_pairs(rows) == array.refused_pairs | array.unreached == {frozenset({(0, 2), (1, 2)})}


def test_a_pair_that_was_given_up_and_is_in_a_later_row_is_not_told_as_unreached():
    refused = ({(1, 0), (2, 3)}, {(3, 1), (0, 0)})
    array = CoveringArray(
        [2, 2, 4, 2], lambda row: "refused" if any(each <= set(enumerate(row)) for each in refused) else ""
    )
    pairs = list_pairs(array.iter_rows())
    assert {(2, 3), (3, 1)} in pairs
    assert array.pairs - pairs == array.refused_pairs | array.unreached
