"""Folders of images with caption files, recursive search, include and exclude patterns."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_listings import (
    HEAD,
    get_captions,
    list_subset,
    list_subsets,
    make_config,
    prepare_subsets,
    strip_folder,
    write_files,
)
from problem_lines import format_lines

from library.dataloader.prepare import prepare_data
from library.dataset.caption_files import CaptionFiles
from library.dataset.file_discovery import PathPattern, expand_braces, walk_directory
from library.errors import ConfigError

TREE = ["b.png", "a.jpg", "s/1.png", "s-2/1.png", "s/t/猫 🐈.webp", ".cache-x/1.png", "s/.hidden.png"]


def problems(listing, folder) -> list[str]:
    return strip_folder(folder, format_lines(listing.problems))


def test_subfolders_are_searched_only_with_recursive(tmp_path):
    write_files(tmp_path / "a", TREE)
    assert list(get_captions(list_subset(tmp_path, "image_dir = 'a'"))) == ["a.jpg", "b.png"]
    deep = list_subset(tmp_path, "image_dir = 'a'\nrecursive = true")
    assert list(get_captions(deep)) == ["a.jpg", "b.png", "s/1.png", "s/t/猫 🐈.webp", "s-2/1.png"]
    assert strip_folder(tmp_path, list_subset(tmp_path, "image_dir = 'a'").notes)[0] == (
        "a: images in subfolders are not used; set recursive = true to use them: s/, s-2/"
    )
    assert [item.image.read_bytes()[:4] for item in deep.images] == [b"\x89PNG"] * 5


def test_recursive_may_be_set_on_every_level(tmp_path):
    write_files(tmp_path / "a", TREE)
    for head in ("general.recursive = true\n[[datasets]]\n", "[[datasets]]\nrecursive = true\n"):
        (listing,) = list_subsets(tmp_path, "image_dir = 'a'", head=head + "resolution = 64\n")
        assert len(listing.images) == 5
    (listing,) = list_subsets(tmp_path, "image_dir = 'a'\nrecursive = false", head=f"general.recursive = true\n{HEAD}")
    assert len(listing.images) == 2


def test_symlink_loops_neither_hang_nor_duplicate_images(tmp_path):
    write_files(tmp_path / "a", ["1.png", "s/2.png", "s/t/3.png"])
    write_files(tmp_path / "elsewhere", ["4.png", "below/5.png"])
    links = {
        "a/back": "a",
        "a/s/t/up": "a/s",
        "a/above": ".",
        "a/0": "a/s/t",
        "a/self": "a/self",
        "a/gone": "nowhere",
        "a/x": "elsewhere",
        "a/y": "elsewhere/below",
        "elsewhere/below/round": "elsewhere",
    }
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    listing = list_subset(tmp_path, "image_dir = 'a'\nrecursive = true")
    assert list(get_captions(listing)) == ["1.png", "s/2.png", "s/t/3.png", "x/4.png", "x/below/5.png"]
    tree = walk_directory(tmp_path / "a", recursive=True)
    assert tree.loops == ["0", "above", "back", "s/t/up", "x/below/round", "y"] and format_lines(tree.problems) == []
    note = "a: links to folders that are searched anyway are not followed: 0, above, back, ..."
    assert note in strip_folder(tmp_path, listing.notes)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_reported(tmp_path):
    write_files(tmp_path / "a", ["1.png", "s/2.png"])
    (tmp_path / "a" / "s").chmod(0)
    try:
        (problem,) = problems(list_subset(tmp_path, "image_dir = 'a'\nrecursive = true"), tmp_path)
    finally:
        (tmp_path / "a" / "s").chmod(0o755)
    assert problem == "a/s: cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("keys", "expected"),
    {
        "include = '*.png'": ["b.png", "s/1.png", "s-2/1.png"],
        "include = ['s', '*.jpg']": ["a.jpg", "s/1.png", "s/t/猫 🐈.webp"],
        "include = 's/*'": ["s/1.png", "s/t/猫 🐈.webp"],
        "include = 's/*.png'": ["s/1.png"],
        "include = '/*.png'": ["b.png"],
        "include = './b.*'": ["b.png"],
        "include = 't/'": ["s/t/猫 🐈.webp"],
        "include = '**/*.{png,jpg}'\nexclude = 's[!/]*/**'": ["a.jpg", "b.png", "s/1.png"],
        "include = 's/**/*.webp'": ["s/t/猫 🐈.webp"],
        "include = 's**'": ["s/1.png", "s/t/猫 🐈.webp", "s-2/1.png"],
        "exclude = ['?.png', '猫*']": ["a.jpg"],
        "exclude = '*-{1..3}'": ["a.jpg", "b.png", "s/1.png", "s/t/猫 🐈.webp"],
        "exclude = 's*/1.png'\ninclude = '[a-s]*'": ["a.jpg", "b.png", "s/t/猫 🐈.webp"],
    }.items(),
)
def test_patterns_match_the_path_relative_to_the_folder(tmp_path, keys: str, expected: list[str]):
    write_files(tmp_path / "a", TREE)
    listing = list_subset(tmp_path, f"image_dir = 'a'\nrecursive = true\n{keys}")
    assert (format_lines(listing.problems), list(get_captions(listing))) == ([], expected)


def test_patterns_work_without_recursive_and_note_how_many_images_they_select(tmp_path):
    write_files(tmp_path / "a", TREE)
    listing = list_subset(tmp_path, "image_dir = 'a'\ninclude = '*.jpg'")
    assert list(get_captions(listing)) == ["a.jpg"]
    assert "a: include and exclude select 1 of 2 images" in strip_folder(tmp_path, listing.notes)


def test_a_pattern_without_matches_is_reported_with_its_line_and_existing_images(tmp_path):
    write_files(tmp_path / "a", TREE)
    there = f"the images in {tmp_path}/a (2 images: a.jpg, b.png)"
    cases = {
        "include = ['*.jpg', '*.bmp']": [f"{tmp_path}/set.toml:5: include: '*.bmp' matches none of {there}"],
        "exclude = 'old'": [f"{tmp_path}/set.toml:5: exclude: 'old' matches none of {there}"],
        "include = '*.bmp'": [f"{tmp_path}/set.toml:5: include: include and exclude select none of {there}"],
        "exclude = '*'": [f"{tmp_path}/set.toml:5: exclude: include and exclude select none of {there}"],
    }
    for keys, expected in cases.items():
        assert format_lines(list_subset(tmp_path, f"image_dir = 'a'\n{keys}").problems) == expected


def test_a_pattern_for_several_folders_must_match_in_one_of_them(tmp_path):
    write_files(tmp_path, ["a/1.png", "a/old.png", "b/1.png", "c/old.png", "c/1.png"])
    head = "[general]\nexclude = ['old.png', 'new.png']\n[[datasets]]\nresolution = 64\n"
    first, second = list_subsets(tmp_path, "image_dir = 'a'", "image_dir = 'b'", head=head)
    assert (list(get_captions(first)), list(get_captions(second))) == (["1.png"], ["1.png"])
    assert strip_folder(tmp_path, [*format_lines(first.problems), *format_lines(second.problems)]) == [
        "set.toml:2: exclude: 'new.png' matches none of the images in a (2 images: 1.png, old.png)"
    ]


@given(st.text("ab/", min_size=1, max_size=8), st.text("ab/*?", min_size=1, max_size=6))
def test_a_pattern_matches_what_a_shell_matches(path, text):
    """Compared with a backtracking matcher of single characters."""
    if "//" in path or path != path.strip("/") or "//" in text or text[0] == "/" or text[-1] == "/":
        return

    def fits(pattern: str, name: str) -> bool:
        if not pattern:
            return not name
        if pattern.startswith("**/"):
            parts = name.split("/")
            return any(fits(pattern[3:], "/".join(parts[count:])) for count in range(len(parts)))
        if pattern.startswith("**"):
            return any(fits(pattern[2:], name[count:]) for count in range(len(name) + 1))
        if pattern[0] == "*":
            return fits(pattern[1:], name) or (name[:1] not in ("", "/") and fits(pattern, name[1:]))
        is_match = bool(name) and (name[0] == pattern[0] or (pattern[0] == "?" and name[0] != "/"))
        return is_match and fits(pattern[1:], name[1:])

    parts = path.split("/")
    starts = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    if "/" not in text:
        starts = [part for start in starts for part in (start, *start.split("/"))] if "**" in text else parts
    assert PathPattern.compile(text).matches(path) == any(fits(text, start) for start in starts)


def test_a_trailing_slash_matches_folders_only():
    expected = {"a/": True, "b.png/": False, "a/b.png/": False, "b.png": True, "/a": True, "/b.png": False}
    assert {text: PathPattern.compile(text).matches("a/b.png") for text in expected} == expected


@pytest.mark.slow
def test_braces_expand_as_in_a_shell():
    assert expand_braces("a{000..002}.tar") == ["a000.tar", "a001.tar", "a002.tar"]
    assert expand_braces("{9..11}") == ["9", "10", "11"] and expand_braces("{09..11}") == ["09", "10", "11"]
    assert expand_braces("{2..0}") == ["2", "1", "0"] and expand_braces("{-1..1}") == ["-1", "0", "1"]
    assert expand_braces("{a,b{1,2}}{x,}") == ["ax", "a", "b1x", "b1", "b2x", "b2"]
    assert expand_braces("{a}{}") == ["{a}{}"]
    for endless in ("{0..9999999}", "{0..99999}{0..99}"):
        with pytest.raises(ValueError, match="more than 1000000 names"):
            expand_braces(endless)


def test_each_image_uses_the_first_of_several_caption_extensions(tmp_path):
    images = ["1.png", "2.png", "3.png", "4.png", "s/1.png", "s_1_2_3_4/5_1_2_3_4.png", "s_1_2_3_4/6.png"]
    texts = {"1.txt": "not me", "2.txt": "two", "3.TXT": "three", "s/1.txt": "s", "s_1_2_3_4/5.txt": "face"}
    write_files(tmp_path / "a", images)
    write_files(tmp_path / "a", {"1.caption": "one", "s.txt": "not me", **texts})
    subset = "image_dir = 'a'\nrecursive = true\ncaption_extension = ['caption', '.txt']"
    listing = list_subset(tmp_path, subset)
    assert get_captions(listing) == {
        "1.png": "one",
        "2.png": "two",
        "3.png": "three",
        "4.png": "",
        "s/1.png": "s",
        "s_1_2_3_4/5_1_2_3_4.png": "face",
        "s_1_2_3_4/6.png": "",
    }
    assert strip_folder(tmp_path, listing.notes) == [
        "a: no .caption or .txt file for 2 of 7 images, using an empty caption: 4.png, s_1_2_3_4/6.png",
        "a: 1 caption file without an image, not used: s.txt",
    ]
    ready = prepare_subsets(tmp_path, subset)
    assert ready.manifest.caption_counts == ((0, 0, "4 .txt, 1 .caption", 5, 7),)


@pytest.mark.parametrize("ending", ["", ".TXT", ".wd14.txt"])
def test_a_caption_extension_follows_the_stem_of_the_image(tmp_path, ending: str):
    write_files(tmp_path / "a", ["1.png", "2.v1.png"])
    write_files(tmp_path / "a", {f"1{ending.lower()}": "one", f"2.v1{ending}": "two"})
    listing = list_subset(tmp_path, f"image_dir = 'a'\ncaption_extension = '{ending}'")
    assert get_captions(listing) == {"1.png": "one", "2.v1.png": "two"}


def test_a_caption_file_with_the_extension_in_the_same_case_is_preferred():
    names = ["a.TXT", "a.txt", "b.TXT"]
    for order in (names, names[::-1]):
        assert CaptionFiles(order, [".txt"]).find("a.png") == ("a.txt", ".txt")
        assert CaptionFiles(order, [".TXT"]).find("a.png") == ("a.TXT", ".TXT")
        assert CaptionFiles(order, [".caption"], can_fall_back_to_txt=True).find("b.png") == ("b.TXT", ".txt")


def test_only_the_default_caption_extension_falls_back_to_txt(tmp_path):
    write_files(tmp_path / "a", ["1.png"])
    write_files(tmp_path / "a", {"1.txt": "one"})
    listing = list_subset(tmp_path, "image_dir = 'a'\ncaption_extension = '.tags'\nclass_tokens = 'cls'")
    assert get_captions(listing) == {"1.png": "cls"}
    assert "there are .txt files for 1 of the images without a caption" in listing.notes[-1]


def test_caption_files_with_another_extension_are_suggested(tmp_path):
    write_files(tmp_path / "a", ["1.png", "2.png", "3.png"])
    write_files(tmp_path / "a", {"1.caption": "one", "2.txt": "two"})
    listing = list_subset(tmp_path, "image_dir = 'a'")
    assert strip_folder(tmp_path, listing.notes)[-1] == (
        "a: there are .txt files for 1 of the images without a caption; use them with caption_extension = ['.caption',"
        " '.txt']"
    )


def test_captions_in_json_files_are_read_from_their_key(tmp_path):
    write_files(tmp_path / "a", ["1.png", "2.png"])
    write_files(tmp_path / "a", {"1.json": '{"caption": "one", "width": 3}', "2.json": '{"caption": ["two", "zwei"]}'})
    subset = "image_dir = 'a'\ncaption_extension = '.json'\n"
    assert get_captions(list_subset(tmp_path, subset)) == {"1.png": "one", "2.png": "two"}
    assert get_captions(list_subset(tmp_path, subset + "enable_wildcard = true"))["2.png"] == "two\nzwei"
    assert problems(list_subset(tmp_path, subset + "caption_column = 'captoin'"), tmp_path) == [
        "set.toml:5: caption_extension: a/1.json: no column 'captoin' (set by caption_column); columns are"
        " caption, width; did you mean caption?"
    ]
    write_files(tmp_path / "a", {"2.json": "{"})
    (problem,) = [item.problem for item in list_subset(tmp_path, subset).images if item.problem]
    assert str(problem).startswith(f"{tmp_path}/a/2.json: not valid JSON: ")


def test_a_musubi_tuner_caption_file_is_one_caption(tmp_path):
    write_files(tmp_path / "a", ["1.png"])
    write_files(tmp_path / "a", {"1.txt": "one\n\ntwo\n", "b.jsonl": '{"image_path": "1.png", "caption": "one\\ntwo"}'})
    for keys in ("image_directory = 'a'\ncaption_extension = '.txt'", "image_jsonl_file = 'a/b.jsonl'"):
        (listing,) = list_subsets(tmp_path, head=f"[[datasets]]\nresolution = 64\n{keys}\n")
        assert list(get_captions(listing).values()) == ["one\n\ntwo" if "jsonl" not in keys else "one\ntwo"]
        assert not any("with several lines" in note for note in listing.notes)


def test_images_shared_by_two_subsets_of_a_dataset_are_reported(tmp_path):
    write_files(tmp_path, ["a/1.png", "a/s/2.png", "a/s/3.png", "b/1.png"])
    (tmp_path / "again").symlink_to(tmp_path / "a")
    cases = {
        ("image_dir = 'a'\nrecursive = true", "image_dir = 'a/s'"): "2 images also in set.toml:4: a/s/2.png, a/s/3.png",
        (
            "image_dir = 'a/s'",
            "image_dir = 'a'\nrecursive = true\ninclude = '[13].png'",
        ): "1 image also in set.toml:4: a/s/3.png",
        ("image_dir = 'a'", "image_dir = 'again'"): "1 image also in set.toml:4: again/1.png",
        ("image_dir = 'a'\nrecursive = true\nexclude = 's'", "image_dir = 'a/s'"): None,
        ("image_dir = 'a'", "image_dir = 'a/s'"): None,
        ("image_dir = 'a/s'\ninclude = '2*'", "image_dir = 'a/s'\ninclude = '3*'"): None,
    }
    for subsets, expected in cases.items():
        actual = [line for listing in list_subsets(tmp_path, *subsets) for line in format_lines(listing.problems)]
        place = f"set.toml:{6 + subsets[0].count(chr(10))}: image_dir"
        line = f"{place}: {expected}; exclude them in one of the two"
        assert strip_folder(tmp_path, actual) == ([line] if expected else [])


def test_a_folder_without_images_suggests_the_key_for_its_files(tmp_path):
    write_files(tmp_path, {"a/x.tar": "", "b/x.parquet": "", "c/x.arrow": ""})
    actual = [
        problem for name in "abc" for problem in format_lines(list_subset(tmp_path, f"image_dir = '{name}'").problems)
    ]
    hints = ("webdataset = 'a'", "parquet = 'b'", "parquet = 'c'")
    assert all(hint in line.replace(f"{tmp_path}/", "") for hint, line in zip(hints, actual, strict=True))


def test_problems_of_several_folders_are_reported_together(tmp_path):
    write_files(tmp_path, ["a/1.png", "c/d/1.png"])
    with pytest.raises(ConfigError) as caught:
        prepare_data(make_config(tmp_path, "image_dir = 'a'\nexclude = 'x'", "image_dir = 'c'"), 8)
    assert [line.split(";")[0] for line in strip_folder(tmp_path, format_lines(caught.value.problems))] == [
        "set.toml:5: exclude: 'x' matches none of the images in a (1 image: 1.png)",
        "set.toml:7: image_dir: no images",
    ]
