"""Captions in tables: metadata files that are named, and those among the pictures, as HF datasets have them."""

import json
import sys

import pytest
from listings import captions, listed, listings, missing, prepared, settings, shortened, write

from library.data.prepare import prepare
from library.data.sources.columns import caption_column
from library.errors import ConfigError

ROWS = [{"file_name": "1.png", "text": "one, uno"}, {"file_name": "s/2.png", "text": 'two "zwei"'}]
PICTURES = ["a/1.png", "a/s/2.png"]


def table(rows: list[dict], ending: str) -> str | bytes:
    if ending == ".jsonl":
        return "\n".join(map(json.dumps, rows))
    names = list(rows[0])
    if ending == ".csv":
        cells = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
        return "\ufeff" + "".join(
            ",".join('"' + cell.replace('"', '""') + '"' for cell in row) + "\r\n" for row in cells
        )
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = arrow.BufferOutputStream()
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    return file.getvalue().to_pybytes()


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_table_beside_the_pictures_has_their_captions(tmp_path, ending: str):
    write(tmp_path, PICTURES)
    write(tmp_path / "a", {f"metadata{ending}": table(ROWS, ending)})
    listing = listed(tmp_path, "image_dir = 'a'\nrecursive = true")
    assert captions(listing) == {"1.png": "one, uno", "s/2.png": 'two "zwei"'}
    assert (listing.absent, listing.problems, listing.notes) == ([], [], [])
    ready = prepared(tmp_path, "image_dir = 'a'\nrecursive = true")
    assert ready.manifest.endings == ((0, 0, f"metadata{ending}", 2, 2),)
    flat = listed(tmp_path, "image_dir = 'a'")
    assert captions(flat) == {"1.png": "one, uno"}
    assert (f"a: 1 pictures that metadata{ending} names lie further down and are not taken; recursive = true takes"
            " them: s/2.png") in shortened(tmp_path, flat.notes)  # fmt: skip


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_table_that_is_named_names_pictures_and_captions(tmp_path, ending: str):
    write(tmp_path, PICTURES)
    write(tmp_path / "a", {f"m{ending}": table(ROWS, ending)})
    named = listed(tmp_path, f"metadata_file = 'a/m{ending}'")
    assert [item.caption for item in named.found] == ["one, uno", 'two "zwei"']
    assert [str(item.image) for item in named.found] == [f"{tmp_path}/a/1.png", f"{tmp_path}/a/s/2.png"]
    write(tmp_path, {f"elsewhere/m{ending}": table(ROWS, ending)})
    named = listed(tmp_path, f"metadata_file = 'elsewhere/m{ending}'\nimage_dir = 'a'")
    assert [str(item.image) for item in named.found] == [f"{tmp_path}/a/1.png", f"{tmp_path}/a/s/2.png"]


def test_a_caption_file_goes_before_the_table_and_a_deeper_table_before_one_above(tmp_path):
    write(tmp_path / "a", ["1.png", "2.png", "s/3.png", "s/4.png"])
    above = [{"file_name": name, "text": f"above {name}"} for name in ("1.png", "2.png", "s/3.png", "s/4.png")]
    write(tmp_path / "a", {"metadata.jsonl": table(above, ".jsonl"), "1.txt": "file",
                           "s/metadata.csv": table([{"file_name": "3.png", "text": "below"}], ".csv")})  # fmt: skip
    listing = listed(tmp_path, "image_dir = 'a'\nrecursive = true\ncaption_extension = '.txt'")
    assert captions(listing) == {
        "1.png": "file",
        "2.png": "above 2.png",
        "s/3.png": "below",
        "s/4.png": "above s/4.png",
    }
    assert listing.caption_ending == "2 metadata.jsonl, 1 .txt, 1 metadata.csv"


def test_a_table_that_is_not_needed_is_not_read_and_this_is_said(tmp_path):
    write(tmp_path / "a", ["1.png"])
    write(tmp_path / "a", {"1.txt": "file", "metadata.jsonl": "no JSON"})
    listing = listed(tmp_path, "image_dir = 'a'")
    assert listing.problems == []
    assert "a: metadata.jsonl is not used: every picture has a caption file" in shortened(tmp_path, listing.notes)


def test_pictures_without_a_row_and_without_text_take_the_class_tokens(tmp_path):
    write(tmp_path / "a", ["1.png", "2.png", "3.png"])
    rows = [{"file_name": "1.png", "text": "one"}, {"file_name": "2.png", "text": " "}]
    write(tmp_path / "a", {"metadata.csv": table(rows, ".csv")})
    listing = listed(tmp_path, "image_dir = 'a'\nclass_tokens = 'cls'")
    assert captions(listing) == {"1.png": "one", "2.png": "cls", "3.png": "cls"}
    assert shortened(tmp_path, listing.notes) == [
        "a: 2 of 3 pictures have no .caption file and no text in metadata.csv, 'cls' is their caption: 2.png, 3.png"
    ]


def test_all_that_is_wrong_with_rows_is_told_with_their_lines(tmp_path):
    write(tmp_path / "a", ["1.png", "2.png"])
    rows = [{"file_name": "1.png", "text": 3}, {"file_name": "gone.png", "text": "x"}, {"text": "x"},
            {"file_name": "2.png", "text": "x"}, {"file_name": "./2.png", "text": "y"}]  # fmt: skip
    write(tmp_path / "a", {"metadata.jsonl": table(rows, ".jsonl")})
    with pytest.raises(ConfigError) as caught:
        prepare(settings(tmp_path, "image_dir = 'a'"), 8)
    assert shortened(tmp_path, caught.value.problems) == [
        "a/metadata.jsonl:2: 'gone.png' is not there; looked in a",
        "a/metadata.jsonl:3: has no file_name",
        "a/metadata.jsonl:5: './2.png' stands in line 4, too; keep one of the two",
        "a/metadata.jsonl:1: text is no text: 3",
        "4 of 5 pictures cannot be used; mend or remove them, or leave them out with --on_bad_data skip",
    ]


def test_a_row_of_parquet_is_told_by_its_number(tmp_path):
    write(tmp_path / "a", ["1.png"])
    rows = [ROWS[0], {"file_name": "gone.png", "text": "x"}]
    write(tmp_path / "a", {"metadata.parquet": table(rows, ".parquet")})
    assert shortened(tmp_path, listed(tmp_path, "image_dir = 'a'").absent) == [
        "a/metadata.parquet: row 1: 'gone.png' is not there; looked in a"
    ]


@pytest.mark.parametrize(
    ("files", "keys", "expected"),
    [
        ({"metadata.jsonl": table([{"file_name": "1.png", "label": "x"}], ".jsonl")}, "",
         "image_dir: a/metadata.jsonl: no column is called text, caption, prompt; there are file_name, label; say which"
         " holds captions: caption_column = 'NAME'"),
        ({"metadata.jsonl": table([{"file_name": "1.png", "text": "x", "prompt": "y"}], ".jsonl")}, "",
         "image_dir: a/metadata.jsonl: captions may stand in text or prompt; say which: caption_column = 'text'"),
        ({"metadata.csv": "file_name,text\n1.png,a cat, sitting\n"}, "",
         "image_dir: a/metadata.csv:2: 3 cells under 2 columns; a text with a comma stands in quotes: \"a cat,"
         " sitting\""),
        ({"metadata.csv": 'file_name,text\n1.png,"a"b\n'}, "",
         "image_dir: a/metadata.csv:2: is no CSV: ',' expected after '\"'"),
        ({"metadata.csv": "file_name,text,text\n1.png,a,b\n"}, "",
         "image_dir: a/metadata.csv:1: two columns have the same name: file_name, text, text"),
        ({"metadata.csv": b"file_name,text\n1.png,caf\xe9\n"}, "",
         "image_dir: a/metadata.csv not UTF-8 at byte 24; save the file as UTF-8"),
        ({"metadata.jsonl": '{"file_name": "1.png", "text": "x"}\n[1]'}, "",
         "image_dir: a/metadata.jsonl:2: expected an object {...}"),
        ({"metadata.jsonl": "", "metadata.csv": ""}, "",
         "image_dir: metadata.csv, metadata.jsonl are in a; keep one of them, or name it: metadata_file = 'FILE'"),
        ({"metadata.jsonl": table(ROWS, ".jsonl")}, "caption_column = 'txet'",
         "image_dir: a/metadata.jsonl: has no column 'txet', which caption_column names; there are file_name, text; did"
         " you mean text?"),
        ({}, "caption_column = 'text'", "caption_column: there is no table in a to which it could belong"),
        ({}, "image_column = 'x'", "image_column: there is no table in a to which it could belong"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_understood_is_told(tmp_path, files: dict, keys: str, expected: str):
    write(tmp_path / "a", ["1.png"])
    write(tmp_path / "a", files)
    (problem,) = shortened(tmp_path, listed(tmp_path, f"image_dir = 'a'\n{keys}").problems)
    assert problem.partition(": ")[2] == expected


def test_columns_may_be_named(tmp_path):
    write(tmp_path / "a", ["1.png"])
    rows = [{"file": "1.png", "text": "not me", "de": "eins"}]
    write(tmp_path / "a", {"metadata.csv": table(rows, ".csv")})
    keys = "image_column = 'file'\ncaption_column = 'de'"
    for source in ("image_dir = 'a'", "metadata_file = 'a/metadata.csv'"):
        listing = listed(tmp_path, f"{source}\n{keys}")
        assert [item.caption for item in listing.found] == ["eins"] and listing.problems == []


def test_a_column_named_above_is_used_by_one_of_the_folders_at_least(tmp_path):
    write(tmp_path, ["a/1.png", "b/1.png"])
    head = "general.caption_column = 'de'\n[[datasets]]\nresolution = 64\n"
    subsets = ("image_dir = 'a'", "image_dir = 'b'")
    assert [len(listing.problems) for listing in listings(tmp_path, *subsets, head=head)] == [1, 0]
    write(tmp_path / "b", {"metadata.csv": "file_name,de\n1.png,eins\n"})
    assert [len(listing.problems) for listing in listings(tmp_path, *subsets, head=head)] == [0, 0]


def test_a_table_of_other_things_is_left_alone_and_this_is_said(tmp_path):
    write(tmp_path / "a", ["1.png"])
    write(tmp_path / "a", {"metadata.jsonl": '{"image_path": "1.png", "caption": "x"}'})
    listing = listed(tmp_path, "image_dir = 'a'")
    assert captions(listing) == {"1.png": ""} and listing.problems == []
    assert shortened(tmp_path, listing.notes)[0] == (
        "a/metadata.jsonl: not used: it has no column file_name; metadata_file names files of other kinds"
    )


def test_a_table_without_captions_is_no_mistake_where_the_class_tokens_are_the_caption(tmp_path):
    write(tmp_path / "a", ["1.png"])
    write(tmp_path / "a", {"metadata.jsonl": '{"file_name": "1.png", "label": 3}'})
    listing = listed(tmp_path, "image_dir = 'a'\nclass_tokens = 'cls'")
    assert captions(listing) == {"1.png": "cls"} and listing.problems == []
    assert shortened(tmp_path, listing.notes)[0] == (
        "a/metadata.jsonl: not used: no column is called text, caption, prompt; there are file_name, label"
    )


def test_a_list_of_captions_is_a_choice_of_lines(tmp_path):
    write(tmp_path / "a", ["1.png"])
    write(tmp_path / "a", {"metadata.jsonl": '{"file_name": "1.png", "text": ["one\\nuno", null, "zwei"]}'})
    assert captions(listed(tmp_path, "image_dir = 'a'\nenable_wildcard = true")) == {"1.png": "one\nuno\nzwei"}
    listing = listed(tmp_path, "image_dir = 'a'")
    assert captions(listing) == {"1.png": "one"} and "1 captions have several lines" in listing.notes[0]


def test_a_named_file_of_sd_scripts_keeps_its_meaning_beside_those_of_hf_datasets(tmp_path):
    write(tmp_path, ["a.png", "b.png"])
    rows = [{"image_path": "a.png", "caption": "ay", "tags": "x, y", "label": 3}, {"image_path": "b", "tags": "z"}]
    write(tmp_path, {"m.jsonl": table(rows, ".jsonl")})
    assert [item.caption for item in listed(tmp_path, "metadata_file = 'm.jsonl'").found] == ["ay,x, y", "z"]
    by_name = listed(tmp_path, "metadata_file = 'm.jsonl'\ncaption_column = 'tags'")
    assert [item.caption for item in by_name.found] == ["x, y", "z"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"image_path": "a.png", "caption": "x", "control_path": "c.png"}],
         "m.jsonl: column control_path: not yet: what musubi-tuner makes of it; take it out"),
        ([{"image_path": "a.png", "file_name": "a.png", "text": "x"}],
         "m.jsonl: pictures may stand in image_path or file_name; say which: image_column = 'image_path'"),
        ([{"image": "a.png", "text": "x"}], "m.jsonl has no image_path or file_name; there are image, text; say which"
         " column names the pictures: image_column = 'NAME'"),
        ([{"image_path": "a.png", "caption": "x", "text": "y"}],
         "m.jsonl: captions may stand in text or caption; say which: caption_column = 'text'"),
    ],
)  # fmt: skip
def test_a_named_file_that_is_not_clear_is_refused(tmp_path, rows: list[dict], expected: str):
    write(tmp_path, ["a.png"])
    write(tmp_path, {"m.jsonl": table(rows, ".jsonl")})
    (problem,) = shortened(tmp_path, listed(tmp_path, "metadata_file = 'm.jsonl'").problems)
    assert problem == f"set.toml:4: metadata_file: {expected}"


def test_the_columns_of_captions_are_told_apart():
    assert caption_column(["image", "prompt"], None) == "prompt" and caption_column(["a", "text"], "a") == "a"
    with pytest.raises(ValueError, match=r"no column is called .*; there are none"):
        caption_column([], None)


def test_without_pyarrow_the_way_out_is_told_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write(tmp_path, {"m.parquet": "", "a/1.png": "", "a/metadata.parquet": ""})
    for key, file in (("metadata_file", "m.parquet"), ("parquet", "m.parquet"), ("parquet", "a")):
        assert missing(tmp_path, f"{key} = '{file}'") == [
            f"set.toml:4: {key}: parquet files need pyarrow: pip install 'pyarrow>=17'"
        ]
    assert (
        "a/metadata.parquet: parquet files need pyarrow: pip install" in listed(tmp_path, "image_dir = 'a'").problems[0]
    )
