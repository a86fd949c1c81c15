"""The line of each key, found for any valid TOML."""

import math

import pytest
import toml
from hypothesis import given, settings
from hypothesis import strategies as st

from library.config.toml_positions import find_key_lines, tomllib

CASES = {
    "tables, arrays of tables and dotted keys": (
        """\
a = 1 # comment = 2
[general]
b.c = 'x = y'

[[datasets]]
"quoted key" = [1, [2, 3],
  # a comment ] inside
  4]
[[datasets.subsets]]
image_dir = '#no comment'
[[datasets.subsets]]
image_dir = "b\\"]"
[[datasets]]
x = 1979-05-27 07:32:00
y = 2
""",
        {
            ("a",): 1,
            ("general",): 2,
            ("general", "b"): 3,
            ("general", "b", "c"): 3,
            ("datasets", 0): 5,
            ("datasets", 0, "quoted key"): 6,
            ("datasets", 0, "quoted key", 2): 8,
            ("datasets", 0, "subsets", 0): 9,
            ("datasets", 0, "subsets", 0, "image_dir"): 10,
            ("datasets", 0, "subsets", 1, "image_dir"): 12,
            ("datasets", 1, "x"): 14,
            ("datasets", 1, "y"): 15,
        },
    ),
    "strings over several lines": (
        '''\
a = """
b = 1
""x""" # ] [
c = \'\'\'
d = 2\'\'\'
e = """x"""""
f = 3
''',
        {("a",): 1, ("c",): 4, ("e",): 6, ("f",): 7},
    ),
    "tables on one line": (
        """\
datasets = [
  {resolution = 512, subsets = [{image_dir = "a"},
    {image_dir = "}"}]},
]
z = {}
w = []
""",
        {
            ("datasets",): 1,
            ("datasets", 0, "resolution"): 2,
            ("datasets", 0, "subsets", 1, "image_dir"): 3,
            ("z",): 5,
            ("w",): 6,
        },
    ),
    "line ends of Windows": ("a = 1\r\n[b]\r\nc = 2\r\n", {("a",): 1, ("b", "c"): 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_keys_are_found_on_their_lines(name):
    text, expected = CASES[name]
    tomllib.loads(text)

    found = find_key_lines(text)

    assert {path: found.get(path) for path in expected} == expected


values = st.recursive(
    st.one_of(st.integers(-(2**60), 2**60), st.booleans(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(min_size=1), inner, max_size=3)),
    max_leaves=8,
)


def list_key_paths(data, path=()):
    """Every key path of parsed TOML, except the positions of plain array items."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if isinstance(data, dict):
            yield (*path, key)
        yield from list_key_paths(value, (*path, key))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True), values, max_size=4))
def test_every_key_that_the_parser_sees_has_a_line(data):
    try:
        text = toml.dumps(data)
        parsed = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, IndexError, TypeError):
        return  # the TOML writer of this test does not support every value
    lines = find_key_lines(text)
    simple = [
        path
        for path in list_key_paths(parsed)
        if all(isinstance(k, int) or ("\\" not in k and '"' not in k) for k in path)
    ]

    missing = [path for path in simple if path not in lines]

    assert not [path for path in missing if all(isinstance(k, int) or k.isprintable() for k in path)], (text, missing)
    assert all(math.isfinite(line) and 1 <= line <= text.count("\n") + 1 for line in lines.values())
