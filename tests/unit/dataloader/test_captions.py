"""Caption processing: the order of sd-scripts, with all randomness from the given generator."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.config.schema_data import DataConfig
from library.dataloader.caption_processing import process_caption
from library.dataset.caption_files import read_caption_file
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.schema import SubsetConfig, collect_flag_defaults


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> SubsetConfig:
    path = tmp_path_factory.mktemp("set") / "set.toml"
    path.write_text("[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'a'\n", encoding="utf-8")
    return parse_dataset_config(path, collect_flag_defaults(DataConfig())).require_valid()[0].subsets[0]


def show(caption: str, subset: SubsetConfig, number: int = 0, epoch: int = 0, step: int = 0, **changes) -> str:
    return process_caption(
        caption, replace(subset, **changes), random.Random(number), epoch=epoch, step=step, total_steps=100
    )


def many(caption: str, subset: SubsetConfig, **changes) -> Counter:
    return Counter(show(caption, subset, number, **changes) for number in range(300))


def test_a_caption_is_unchanged_by_default(plain):
    assert show("a,b , {c|d}; e", plain) == "a,b , {c|d}; e"
    assert show("first\nsecond", plain) == "first"


def test_prefix_and_suffix_are_added_before_all_other_processing(plain):
    assert show("a", plain, caption_prefix="of", caption_suffix="x") == "of a x"
    shuffled = many("a, b", plain, caption_prefix="p,", caption_suffix=", s", shuffle_caption=True, keep_tokens=1)
    assert all(text.startswith("p, ") for text in shuffled) and len(shuffled) == 6


def test_captions_are_dropped_at_the_dropout_rate_and_in_every_nth_epoch(plain):
    assert 60 < many("a, b", plain, caption_dropout_rate=0.3)[""] < 120
    dropped = [show("a", plain, epoch=epoch, caption_dropout_every_n_epochs=3) for epoch in range(7)]
    assert dropped == ["a", "a", "", "a", "a", "", "a"]


def test_wildcards_and_lines_are_chosen_and_doubled_braces_are_braces(plain):
    assert set(many("{a|b} c {d|e}", plain, enable_wildcard=True)) == {"a c d", "a c e", "b c d", "b c e"}
    assert set(many("one\ntwo {x|y}", plain, enable_wildcard=True)) == {"one", "two x", "two y"}
    assert set(many("{{a|b}} {c|d}", plain, enable_wildcard=True)) == {"{a|b} c", "{a|b} d"}


def test_the_first_tags_stay_and_the_others_are_shuffled(plain):
    shuffled = many("a, b, c,d", plain, shuffle_caption=True, keep_tokens=2)
    assert set(shuffled) == {"a, b, c, d", "a, b, d, c"}


def test_keep_tokens_separator_overrides_keep_tokens(plain):
    text = "a, b ||| c, d,, ||| e"
    shuffled = many(text, plain, shuffle_caption=True, keep_tokens=1, keep_tokens_separator="|||")
    assert set(shuffled) == {"a, b, c, d, e", "a, b, d, c, e"}
    without = many("a, b, c", plain, shuffle_caption=True, keep_tokens=1, keep_tokens_separator="|||")
    assert set(without) == {"a, b, c", "a, c, b"}


def test_tags_are_split_at_the_separator_and_joined_with_a_comma(plain):
    assert show("a; b,x;c", plain, caption_tag_dropout_rate=1e-9, caption_separator=";") == "a, b,x, c"


def test_tags_are_dropped_at_the_rate_except_kept_tokens(plain):
    seen: Counter = Counter()
    for text, count in many("a, b, c", plain, caption_tag_dropout_rate=0.4, keep_tokens=1).items():
        seen.update({tag: count for tag in text.split(", ")})
    assert seen["a"] == 300 and all(150 < seen[tag] < 210 for tag in "bc")


def test_token_warmup_shows_more_and_more_tags(plain):
    def count(step: int, **changes) -> int:
        return len(show("t,a,b,c,d,e,f", plain, step=step, keep_tokens=1, **changes).split(", "))

    assert [count(step, token_warmup_min=2, token_warmup_step=8) for step in (0, 2, 4, 6, 8, 50)] == [3, 4, 5, 6, 7, 7]
    assert [count(step, token_warmup_min=1, token_warmup_step=0.1) for step in (0, 4, 9, 10)] == [2, 4, 6, 7]


def test_the_secondary_separator_becomes_the_separator_at_the_end(plain):
    shuffled = many("a;;;b, c", plain, shuffle_caption=True, secondary_separator=";;;")
    assert set(shuffled) == {"a,b, c", "c, a,b"}


@given(number=st.integers(0, 2**62), epoch=st.integers(0, 99), step=st.integers(0, 99))
def test_the_same_generator_gives_the_same_caption(plain, number: int, epoch: int, step: int):
    everything = replace(
        plain,
        shuffle_caption=True,
        caption_tag_dropout_rate=0.3,
        caption_dropout_rate=0.1,
        enable_wildcard=True,
        token_warmup_step=0.5,
    )
    texts = {
        process_caption(
            "a, {b|c}, d, e\nf, g", everything, random.Random(number), epoch=epoch, step=step, total_steps=100
        )
        for _ in range(3)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a, b\n", ["a, b"]),
        (b"\xef\xbb\xbfa\r\n\r\n b \rc", ["a", "b", "c"]),
        ("\n猫\x0b, 犬".encode(), ["猫\x0b, 犬"]),
    ],
)
def test_caption_files_are_utf8_with_or_without_a_byte_order_mark(tmp_path: Path, data: bytes, lines: list[str]):
    (tmp_path / "a.txt").write_bytes(data)
    assert read_caption_file(tmp_path / "a.txt") == lines


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"caf\xe9", r"is not UTF-8 \(byte 3\); save the file as UTF-8"),
        ("a".encode("utf-16"), "is UTF-16 or UTF-32; save the file as UTF-8"),
        ("a".encode("utf-16-be"), "contains zero bytes, as UTF-16 does"),
        ("a".encode("utf-16-le"), "contains zero bytes"),
    ],
)
def test_a_caption_file_that_cannot_be_read_says_why(tmp_path: Path, data: bytes, problem: str):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(ValueError, match=problem):
        read_caption_file(tmp_path / "a.txt")
