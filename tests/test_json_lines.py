"""The line of each key, found for any valid JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.config.json_lines import read_json
from library.errors import ConfigError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def lines_of(value, path=(), line=1) -> tuple[dict, int]:
    """Where ``json.dumps(indent=1)`` puts each key, and the line on which the value ends."""
    found = {}
    items = list(value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else []))
    for name, item in items:
        line += 1
        found[(*path, name)] = line
        inner, line = lines_of(item, (*path, name), line)
        found |= inner
    return found, line + bool(items)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_every_key_and_every_item_is_found_on_its_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    assert read_json(path) == (data, lines_of(data)[0])


def test_layout_does_not_matter(tmp_path):
    (tmp_path / "a.json").write_text('\n{ "a\\u0062" :[ 1 , {"c":"]}"},\r\n"d" ]\n, "e"\n: {} }\n', encoding="utf-8")
    data, lines = read_json(tmp_path / "a.json")
    assert data == {"ab": [1, {"c": "]}"}, "d"], "e": {}}
    assert lines == {("ab",): 2, ("ab", 0): 2, ("ab", 1): 2, ("ab", 1, "c"): 2, ("ab", 2): 3, ("e",): 4}


def test_a_key_that_stands_twice_is_refused_wherever_it_is(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [{"b": 1,\n"b": 2}],\n"a": 1}', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_json(tmp_path / "a.json")
    assert caught.value.problems == [f"{tmp_path}/a.json:2: b: given twice; it stands in line 1 already",
                                     f"{tmp_path}/a.json:3: a: given twice; it stands in line 1 already"]  # fmt: skip


def test_a_file_that_is_no_text_or_not_there_is_told(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": "\xe9"}')
    for name, problem in {"a.json": "not UTF-8 at byte 7", "b.json": "no such file"}.items():
        with pytest.raises(ConfigError, match=problem):
            read_json(tmp_path / name)
