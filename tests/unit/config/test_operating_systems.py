"""Names, paths and command lines of Windows: what is refused, and the way out that is suggested."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.config import parse_config
from library.config.operating_systems import (
    find_name_problem,
    format_path,
    join_words,
    split_words,
    validate_output_name,
)
from library.config.toml_positions import read_toml_with_lines, tomllib
from library.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("a:b", "':'"),
        ("what?", "'?'"),
        ("a|b", "'|'"),
        ("a\\b", "not allowed"),
        ("CON", "device"),
        ("nul", "device"),
        ("com1.v2", "device"),
        ("LPT9", "device"),
        ("mika.", "dot or a space"),
        ("mika ", "dot or a space"),
    ],
)
def test_names_that_windows_does_not_allow_are_refused_there_only(name, word):
    assert word in find_name_problem(name, is_windows=True)
    assert find_name_problem(name, is_windows=False) == ""


@pytest.mark.parametrize("name", ["mika", "미카", "my lora v1.2", "console", "com", "null", "a" * 190])
def test_usual_names_are_allowed_everywhere(name):
    assert find_name_problem(name, is_windows=True) == find_name_problem(name, is_windows=False) == ""


@pytest.mark.parametrize("is_windows", [True, False])
def test_control_characters_and_names_that_are_too_long_are_refused_everywhere(is_windows):
    assert "control" in find_name_problem("a\nb", is_windows=is_windows)
    assert "control" in find_name_problem("a\0b", is_windows=is_windows)
    assert "too long" in find_name_problem("a" * 260, is_windows=is_windows)


def test_the_length_is_counted_as_the_system_does():
    name = "미" * 100  # 300 bytes, 100 UTF-16 units

    assert "too long" in find_name_problem(name, is_windows=False)
    assert find_name_problem(name, is_windows=True) == ""


@pytest.mark.skipif(os.name == "nt", reason="names of this length are refused by Linux and macOS")
def test_the_longest_name_that_is_accepted_can_be_written(tmp_path):
    """What a run adds fits: the name of a checkpoint that is being written has the most."""
    longest = next("a" * count for count in range(255, 0, -1) if not find_name_problem("a" * count, is_windows=False))

    for name in (f".{longest}-step00000001-state.4194304.new", f"{longest}_000001_00_20260101000000_1234567890.png"):
        (tmp_path / name).touch()
    assert len(longest) > 150


def test_the_problem_names_the_option_before_anything_is_loaded(tmp_path):
    words = ["--output_name", "a" * 250, "--train_data_dir", str(tmp_path), "--output_dir", str(tmp_path)]
    parsed = parse_config(words)

    assert any(each.option == "output_name" and "too long" in str(each) for each in parsed.problems)


def test_long_paths_are_refused_where_the_system_has_no_long_paths(monkeypatch, tmp_path):
    monkeypatch.setattr("library.config.operating_systems.has_long_paths", lambda: False)
    folder = str(tmp_path / ("x" * 90) / ("y" * 90))

    (problem,) = validate_output_name("mika", folder, is_windows=True)
    assert problem.option == "output_dir" and "259" in str(problem) and "LongPathsEnabled" in str(problem)
    assert not list(validate_output_name("mika", "out", is_windows=True)) or len(os.getcwd()) > 150
    assert not list(validate_output_name("mika", folder, is_windows=False))


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (r'image_dir = "C:\new\train"', r"'C:\new\train'"),
        (r'image_dir = "data\train"', r"'data\train'"),
        (r'pretrained_model_name_or_path = "D:\files\model.safetensors"', r"'D:\files\model.safetensors'"),
        (r'network_weights = ["D:\books\rain.safetensors"]', r"'D:\books\rain.safetensors'"),
        (r'image_dir = "C:\Users\me"', r"'C:\Users\me'"),
    ],
)
def test_backslashes_that_toml_reads_as_escapes_are_explained_with_the_line(line, fix, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"# a comment\n{line}\n", "utf-8")

    with pytest.raises(ConfigError) as error:
        read_toml_with_lines(path)
    (problem,) = error.value.problems
    assert fix in str(problem) and "single quotes" in str(problem)
    assert f"{path}:2" in str(problem)


@pytest.mark.parametrize(
    "line",
    [
        r"image_dir = 'C:\new\train'",
        r'image_dir = "C:\\new\\train"',
        'image_dir = "C:/new/train"',
        r'caption_separator = "\n"',
        r'sample_prompts = "A: a cat\nB: a dog"',
        'note = """\nC: one\nD: two\n"""',
        r'training_comment = "C:\\xyz \"quoted\"\nnext line"',
    ],
)
def test_paths_in_single_quotes_and_other_text_are_read_as_they_are(line, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(line, "utf-8")

    data, _ = read_toml_with_lines(path)
    assert data == tomllib.loads(line)


@given(st.text(st.characters(exclude_categories=["C"], exclude_characters="'")))
def test_a_path_as_a_toml_value_is_read_back(text):
    assert tomllib.loads(f"a = {format_path(text)}")["a"] == text


@given(
    st.lists(
        st.sampled_from(
            [r"C:\new folder\a.safetensors", r"\\server\share", "a b", "x", "it's", "~", "50%", "", 'say "hi"', "'\""]
        )
    )
)
@pytest.mark.parametrize("is_windows", [True, False])
def test_words_are_quoted_and_read_back_on_each_system(is_windows, words):
    assert split_words(join_words(words, is_windows=is_windows), is_windows=is_windows) == words


def test_backslashes_in_a_field_of_the_page_stay_on_windows():
    assert split_words(r'C:\a\b.safetensors "D:\c d"', is_windows=True) == [r"C:\a\b.safetensors", r"D:\c d"]
