"""Folders, searched as deep as is asked for, and the captions beside their pictures."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from listings import HEAD, captions, listed, listings, prepared, settings, shortened, write

from library.data.caption_files import CaptionFiles
from library.data.prepare import prepare
from library.data.sources.patterns import Pattern, expanded
from library.data.sources.tree import tree_of
from library.errors import ConfigError

TREE = ["b.png", "a.jpg", "s/1.png", "s-2/1.png", "s/t/猫 🐈.webp", ".cache-x/1.png", "s/.hidden.png"]


def problems(listing, folder) -> list[str]:
    return shortened(folder, listing.problems)


def test_a_folder_is_searched_below_only_when_this_is_asked_for(tmp_path):
    write(tmp_path / "a", TREE)
    assert list(captions(listed(tmp_path, "image_dir = 'a'"))) == ["a.jpg", "b.png"]
    deep = listed(tmp_path, "image_dir = 'a'\nrecursive = true")
    assert list(captions(deep)) == ["a.jpg", "b.png", "s/1.png", "s/t/猫 🐈.webp", "s-2/1.png"]
    assert shortened(tmp_path, listed(tmp_path, "image_dir = 'a'").notes)[0] == (
        "a: pictures in folders below it are not taken; recursive = true takes them: s/, s-2/"
    )
    assert [item.image.read_bytes()[:4] for item in deep.found] == [b"\x89PNG"] * 5


def test_recursive_may_stand_on_every_level(tmp_path):
    write(tmp_path / "a", TREE)
    for head in ("general.recursive = true\n[[datasets]]\n", "[[datasets]]\nrecursive = true\n"):
        (listing,) = listings(tmp_path, "image_dir = 'a'", head=head + "resolution = 64\n")
        assert len(listing.found) == 5
    (listing,) = listings(tmp_path, "image_dir = 'a'\nrecursive = false", head=f"general.recursive = true\n{HEAD}")
    assert len(listing.found) == 2


def test_links_in_circles_neither_hang_nor_double_pictures(tmp_path):
    write(tmp_path / "a", ["1.png", "s/2.png", "s/t/3.png"])
    write(tmp_path / "elsewhere", ["4.png", "below/5.png"])
    links = {"a/back": "a", "a/s/t/up": "a/s", "a/above": ".", "a/0": "a/s/t", "a/self": "a/self", "a/gone": "nowhere",
             "a/x": "elsewhere", "a/y": "elsewhere/below", "elsewhere/below/round": "elsewhere"}  # fmt: skip
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    listing = listed(tmp_path, "image_dir = 'a'\nrecursive = true")
    assert list(captions(listing)) == ["1.png", "s/2.png", "s/t/3.png", "x/4.png", "x/below/5.png"]
    tree = tree_of(tmp_path / "a", recursive=True)
    assert tree.loops == ["0", "above", "back", "s/t/up", "x/below/round", "y"] and tree.problems == []
    assert "a: links to folders that are searched anyway are not followed: 0, above, back, ..." in shortened(
        tmp_path, listing.notes)  # fmt: skip


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_told(tmp_path):
    write(tmp_path / "a", ["1.png", "s/2.png"])
    (tmp_path / "a" / "s").chmod(0)
    try:
        (problem,) = problems(listed(tmp_path, "image_dir = 'a'\nrecursive = true"), tmp_path)
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
def test_patterns_choose_by_the_path_below_the_folder(tmp_path, keys: str, expected: list[str]):
    write(tmp_path / "a", TREE)
    listing = listed(tmp_path, f"image_dir = 'a'\nrecursive = true\n{keys}")
    assert (listing.problems, list(captions(listing))) == ([], expected)


def test_patterns_choose_without_recursion_too_and_say_how_many(tmp_path):
    write(tmp_path / "a", TREE)
    listing = listed(tmp_path, "image_dir = 'a'\ninclude = '*.jpg'")
    assert list(captions(listing)) == ["a.jpg"]
    assert "a: include and exclude leave 1 of 2 pictures" in shortened(tmp_path, listing.notes)


def test_a_pattern_that_matches_nothing_is_told_with_its_line_and_what_is_there(tmp_path):
    write(tmp_path / "a", TREE)
    there = f"the 2 pictures in {tmp_path}/a; there are a.jpg, b.png"
    cases = {
        "include = ['*.jpg', '*.bmp']": [f"{tmp_path}/set.toml:5: include: '*.bmp' matches none of {there}"],
        "exclude = 'old'": [f"{tmp_path}/set.toml:5: exclude: 'old' matches none of {there}"],
        "include = '*.bmp'": [f"{tmp_path}/set.toml:5: include: include and exclude leave none of {there}"],
        "exclude = '*'": [f"{tmp_path}/set.toml:5: exclude: include and exclude leave none of {there}"],
    }
    for keys, expected in cases.items():
        assert listed(tmp_path, f"image_dir = 'a'\n{keys}").problems == expected


def test_a_pattern_above_several_folders_has_to_match_in_one_of_them(tmp_path):
    write(tmp_path, ["a/1.png", "a/old.png", "b/1.png", "c/old.png", "c/1.png"])
    head = "[general]\nexclude = ['old.png', 'new.png']\n[[datasets]]\nresolution = 64\n"
    first, second = listings(tmp_path, "image_dir = 'a'", "image_dir = 'b'", head=head)
    assert (list(captions(first)), list(captions(second))) == (["1.png"], ["1.png"])
    assert shortened(tmp_path, [*first.problems, *second.problems]) == [
        "set.toml:2: exclude: 'new.png' matches none of the 2 pictures in a; there are 1.png, old.png"
    ]


@given(st.text("ab/", min_size=1, max_size=8), st.text("ab/*?", min_size=1, max_size=6))
def test_a_pattern_means_what_a_shell_means_by_it(path, text):
    """Against a matcher that tries every way, one character after the other."""
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
        return bool(name) and (name[0] == pattern[0] or (pattern[0] == "?" and name[0] != "/")) and fits(
            pattern[1:], name[1:])  # fmt: skip

    parts = path.split("/")
    starts = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    if "/" not in text:
        starts = [part for start in starts for part in (start, *start.split("/"))] if "**" in text else parts
    assert Pattern.of(text).matches(path) == any(fits(text, start) for start in starts)


def test_a_slash_at_the_end_asks_for_a_folder():
    assert [Pattern.of(text).matches("a/b.png") for text in ("a/", "b.png/", "a/b.png/", "b.png", "/a", "/b.png")] == [
        True, False, False, True, True, False]  # fmt: skip


def test_braces_stand_for_what_a_shell_makes_of_them():
    assert expanded("a{000..002}.tar") == ["a000.tar", "a001.tar", "a002.tar"]
    assert expanded("{9..11}") == ["9", "10", "11"] and expanded("{09..11}") == ["09", "10", "11"]
    assert expanded("{2..0}") == ["2", "1", "0"] and expanded("{-1..1}") == ["-1", "0", "1"]
    assert expanded("{a,b{1,2}}{x,}") == ["ax", "a", "b1x", "b1", "b2x", "b2"]
    assert expanded("{a}{}") == ["{a}{}"]
    for endless in ("{0..9999999}", "{0..99999}{0..99}"):
        with pytest.raises(ValueError, match="more than 1000000 names"):
            expanded(endless)


def test_each_picture_takes_the_first_of_several_endings(tmp_path):
    write(tmp_path / "a", ["1.png", "2.png", "3.png", "4.png", "s/1.png", "s_1_2_3_4/5_1_2_3_4.png", "s_1_2_3_4/6.png"])
    write(tmp_path / "a", {"1.caption": "one", "1.txt": "not me", "2.txt": "two", "3.TXT": "three", "s/1.txt": "s",
                           "s_1_2_3_4/5.txt": "face", "s.txt": "not me"})  # fmt: skip
    subset = "image_dir = 'a'\nrecursive = true\ncaption_extension = ['caption', '.txt']"
    listing = listed(tmp_path, subset)
    assert captions(listing) == {"1.png": "one", "2.png": "two", "3.png": "three", "4.png": "", "s/1.png": "s",
                                 "s_1_2_3_4/5_1_2_3_4.png": "face", "s_1_2_3_4/6.png": ""}  # fmt: skip
    assert shortened(tmp_path, listing.notes) == [
        "a: 2 of 7 pictures have no .caption or .txt file, their caption is empty: 4.png, s_1_2_3_4/6.png",
    ]
    ready = prepared(tmp_path, subset)
    assert ready.manifest.endings == ((0, 0, "4 .txt, 1 .caption", 5, 7),)


@pytest.mark.parametrize("ending", ["", ".TXT", ".wd14.txt"])
def test_endings_are_what_follows_the_name_of_the_picture(tmp_path, ending: str):
    write(tmp_path / "a", ["1.png", "2.v1.png"])
    write(tmp_path / "a", {f"1{ending.lower()}": "one", f"2.v1{ending}": "two"})
    listing = listed(tmp_path, f"image_dir = 'a'\ncaption_extension = '{ending}'")
    assert captions(listing) == {"1.png": "one", "2.v1.png": "two"}


def test_the_file_in_the_case_that_was_asked_for_goes_first():
    names = ["a.TXT", "a.txt", "b.TXT"]
    for order in (names, names[::-1]):
        assert CaptionFiles(order, [".txt"]).of("a.png") == ("a.txt", ".txt")
        assert CaptionFiles(order, [".TXT"]).of("a.png") == ("a.TXT", ".TXT")
        assert CaptionFiles(order, [".caption"]).of("b.png") == ("b.TXT", ".txt")


def test_another_ending_than_caption_is_not_replaced_by_txt(tmp_path):
    write(tmp_path / "a", ["1.png"])
    write(tmp_path / "a", {"1.txt": "one"})
    listing = listed(tmp_path, "image_dir = 'a'\ncaption_extension = '.tags'\nclass_tokens = 'cls'")
    assert captions(listing) == {"1.png": "cls"} and "have a .txt file" in listing.notes[-1]


def test_captions_of_another_ending_are_pointed_out(tmp_path):
    write(tmp_path / "a", ["1.png", "2.png", "3.png"])
    write(tmp_path / "a", {"1.caption": "one", "2.txt": "two"})
    listing = listed(tmp_path, "image_dir = 'a'")
    assert shortened(tmp_path, listing.notes)[-1] == (
        "a: 1 of the pictures without a caption have a .txt file: caption_extension = ['.caption', '.txt'] takes these,"
        " too"
    )


def test_captions_in_json_files_are_read_by_their_key(tmp_path):
    write(tmp_path / "a", ["1.png", "2.png"])
    write(tmp_path / "a", {"1.json": '{"caption": "one", "width": 3}', "2.json": '{"caption": ["two", "zwei"]}'})
    subset = "image_dir = 'a'\ncaption_extension = '.json'\n"
    assert captions(listed(tmp_path, subset)) == {"1.png": "one", "2.png": "two"}
    assert captions(listed(tmp_path, subset + "enable_wildcard = true"))["2.png"] == "two\nzwei"
    assert problems(listed(tmp_path, subset + "caption_column = 'captoin'"), tmp_path) == [
        "set.toml:5: caption_extension: a/1.json: has no column 'captoin', which caption_column names; there are"
        " caption, width; did you mean caption?"
    ]
    write(tmp_path / "a", {"2.json": "{"})
    (problem,) = [item.problem for item in listed(tmp_path, subset).found if item.problem]
    assert problem.startswith(f"{tmp_path}/a/2.json is no JSON: ")


def test_musubi_tuner_takes_a_caption_file_as_one_caption(tmp_path):
    write(tmp_path / "a", ["1.png"])
    write(tmp_path / "a", {"1.txt": "one\n\ntwo\n", "b.jsonl": '{"image_path": "1.png", "caption": "one\\ntwo"}'})
    for keys in ("image_directory = 'a'\ncaption_extension = '.txt'", "image_jsonl_file = 'a/b.jsonl'"):
        (listing,) = listings(tmp_path, head=f"[[datasets]]\nresolution = 64\n{keys}\n")
        assert list(captions(listing).values()) == ["one two"]
        assert not any("several lines" in note for note in listing.notes)


def test_pictures_that_two_subsets_of_a_dataset_share_are_told(tmp_path):
    write(tmp_path, ["a/1.png", "a/s/2.png", "a/s/3.png", "b/1.png"])
    (tmp_path / "again").symlink_to(tmp_path / "a")
    shared = ("set.toml:6: image_dir: {} pictures are in set.toml:4, too: {}; leave them out of one of the two with"
              " exclude")  # fmt: skip
    cases = {
        ("image_dir = 'a'\nrecursive = true", "image_dir = 'a/s'"): "2 a/s/2.png, a/s/3.png",
        ("image_dir = 'a/s'", "image_dir = 'a'\nrecursive = true\ninclude = '[13].png'"): "1 a/s/3.png",
        ("image_dir = 'a'", "image_dir = 'again'"): "1 again/1.png",
        ("image_dir = 'a'\nrecursive = true\nexclude = 's'", "image_dir = 'a/s'"): None,
        ("image_dir = 'a'", "image_dir = 'a/s'"): None,
        ("image_dir = 'a/s'\ninclude = '2*'", "image_dir = 'a/s'\ninclude = '3*'"): None,
    }
    for subsets, expected in cases.items():
        found = [line for listing in listings(tmp_path, *subsets) for line in shortened(tmp_path, listing.problems)]
        line = 5 + subsets[0].count("\n")
        count, _, names = (expected or "").partition(" ")
        assert found == ([shared.format(count, names).replace(":6:", f":{line + 1}:")] if expected else [])


def test_a_folder_without_pictures_names_the_key_for_what_it_holds(tmp_path):
    write(tmp_path, {"a/x.tar": "", "b/x.parquet": "", "c/x.arrow": ""})
    found = [problem for name in "abc" for problem in listed(tmp_path, f"image_dir = '{name}'").problems]
    hints = ("webdataset = 'a'", "parquet = 'b'", "parquet = 'c'")
    assert all(hint in line.replace(f"{tmp_path}/", "") for hint, line in zip(hints, found, strict=True))


def test_problems_of_several_folders_are_told_together(tmp_path):
    write(tmp_path, ["a/1.png", "c/d/1.png"])
    with pytest.raises(ConfigError) as caught:
        prepare(settings(tmp_path, "image_dir = 'a'\nexclude = 'x'", "image_dir = 'c'"), 8)
    assert [line.split(";")[0] for line in shortened(tmp_path, caught.value.problems)] == [
        "set.toml:5: exclude: 'x' matches none of the 1 pictures in a",
        "set.toml:7: image_dir: no pictures",
    ]
