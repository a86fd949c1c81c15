"""Metadata files that list images and captions, and the metadata tables in folders of images."""

import json
import sys

import pytest
from image_listings import (
    find_missing,
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
from library.dataset.caption_files import resolve_caption_column
from library.errors import ConfigError

ROWS = [{"file_name": "1.png", "text": "one, uno"}, {"file_name": "s/2.png", "text": 'two "zwei"'}]
IMAGES = ["a/1.png", "a/s/2.png"]


def encode_table(rows: list[dict], ending: str) -> str | bytes:
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
def test_a_metadata_table_in_a_folder_holds_the_captions_of_its_images(tmp_path, ending: str):
    write_files(tmp_path, IMAGES)
    write_files(tmp_path / "a", {f"metadata{ending}": encode_table(ROWS, ending)})
    listing = list_subset(tmp_path, "image_dir = 'a'\nrecursive = true")
    assert get_captions(listing) == {"1.png": "one, uno", "s/2.png": 'two "zwei"'}
    assert (format_lines(listing.missing), format_lines(listing.problems), listing.notes) == ([], [], [])
    ready = prepare_subsets(tmp_path, "image_dir = 'a'\nrecursive = true")
    assert ready.manifest.caption_counts == ((0, 0, f"metadata{ending}", 2, 2),)
    flat = list_subset(tmp_path, "image_dir = 'a'")
    assert get_captions(flat) == {"1.png": "one, uno"}
    note = f"a: not used: 1 image in subfolders, listed in metadata{ending}; set recursive = true to use them: s/2.png"
    assert note in strip_folder(tmp_path, flat.notes)


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_metadata_file_lists_images_and_captions(tmp_path, ending: str):
    write_files(tmp_path, IMAGES)
    write_files(tmp_path / "a", {f"m{ending}": encode_table(ROWS, ending)})
    named = list_subset(tmp_path, f"metadata_file = 'a/m{ending}'")
    assert [item.caption for item in named.images] == ["one, uno", 'two "zwei"']
    assert [str(item.image) for item in named.images] == [f"{tmp_path}/a/1.png", f"{tmp_path}/a/s/2.png"]
    write_files(tmp_path, {f"elsewhere/m{ending}": encode_table(ROWS, ending)})
    named = list_subset(tmp_path, f"metadata_file = 'elsewhere/m{ending}'\nimage_dir = 'a'")
    assert [str(item.image) for item in named.images] == [f"{tmp_path}/a/1.png", f"{tmp_path}/a/s/2.png"]


def test_a_caption_file_wins_over_a_table_and_a_nested_table_over_its_parent(tmp_path):
    write_files(tmp_path / "a", ["1.png", "2.png", "s/3.png", "s/4.png"])
    above = [{"file_name": name, "text": f"above {name}"} for name in ("1.png", "2.png", "s/3.png", "s/4.png")]
    nested = encode_table([{"file_name": "3.png", "text": "below"}], ".csv")
    tables = {"metadata.jsonl": encode_table(above, ".jsonl"), "s/metadata.csv": nested}
    write_files(tmp_path / "a", {"1.txt": "file", **tables})
    listing = list_subset(tmp_path, "image_dir = 'a'\nrecursive = true\ncaption_extension = '.txt'")
    assert get_captions(listing) == {
        "1.png": "file",
        "2.png": "above 2.png",
        "s/3.png": "below",
        "s/4.png": "above s/4.png",
    }
    assert listing.caption_source == "2 metadata.jsonl, 1 .txt, 1 metadata.csv"


def test_a_table_that_is_not_needed_is_not_read_and_noted(tmp_path):
    write_files(tmp_path / "a", ["1.png"])
    write_files(tmp_path / "a", {"1.txt": "file", "metadata.jsonl": "no JSON"})
    listing = list_subset(tmp_path, "image_dir = 'a'")
    assert format_lines(listing.problems) == []
    assert "a: metadata.jsonl is not used: every image has a caption file" in strip_folder(tmp_path, listing.notes)


def test_images_without_a_row_or_text_use_the_class_tokens(tmp_path):
    write_files(tmp_path / "a", ["1.png", "2.png", "3.png"])
    rows = [{"file_name": "1.png", "text": "one"}, {"file_name": "2.png", "text": " "}]
    write_files(tmp_path / "a", {"metadata.csv": encode_table(rows, ".csv")})
    listing = list_subset(tmp_path, "image_dir = 'a'\nclass_tokens = 'cls'")
    assert get_captions(listing) == {"1.png": "one", "2.png": "cls", "3.png": "cls"}
    assert strip_folder(tmp_path, listing.notes) == [
        "a: no .caption file and no text in metadata.csv for 2 of 3 images, using the caption 'cls': 2.png, 3.png"
    ]


def test_all_problems_with_rows_are_reported_with_their_lines(tmp_path):
    write_files(tmp_path / "a", ["1.png", "2.png"])
    rows = [
        {"file_name": "1.png", "text": 3},
        {"file_name": "gone.png", "text": "x"},
        {"text": "x"},
        {"file_name": "2.png", "text": "x"},
        {"file_name": "./2.png", "text": "y"},
    ]
    write_files(tmp_path / "a", {"metadata.jsonl": encode_table(rows, ".jsonl")})
    with pytest.raises(ConfigError) as caught:
        prepare_data(make_config(tmp_path, "image_dir = 'a'"), 8)
    assert strip_folder(tmp_path, format_lines(caught.value.problems)) == [
        "a/metadata.jsonl:2: 'gone.png' not found in a",
        "a/metadata.jsonl:3: no file_name",
        "a/metadata.jsonl:5: './2.png' is already listed in a/metadata.jsonl:4; remove one",
        "a/metadata.jsonl:1: text is not a string: 3",
        "4 of 5 images cannot be used; fix or remove them, or skip them with --on_invalid_images skip",
    ]


def test_a_parquet_row_is_reported_by_its_number(tmp_path):
    write_files(tmp_path / "a", ["1.png"])
    rows = [ROWS[0], {"file_name": "gone.png", "text": "x"}]
    write_files(tmp_path / "a", {"metadata.parquet": encode_table(rows, ".parquet")})
    assert strip_folder(tmp_path, format_lines(list_subset(tmp_path, "image_dir = 'a'").missing)) == [
        "a/metadata.parquet: row 1: 'gone.png' not found in a"
    ]


@pytest.mark.parametrize(
    ("files", "keys", "expected"),
    [
        (
            {"metadata.jsonl": encode_table([{"file_name": "1.png", "label": "x"}], ".jsonl")},
            "",
            "image_dir: a/metadata.jsonl: no column text, caption or prompt; columns are file_name, label; set"
            " caption_column = 'NAME'",
        ),
        (
            {"metadata.jsonl": encode_table([{"file_name": "1.png", "text": "x", "prompt": "y"}], ".jsonl")},
            "",
            "image_dir: a/metadata.jsonl: several caption columns: text, prompt; set caption_column = 'text'",
        ),
        (
            {"metadata.csv": "file_name,text\n1.png,a cat, sitting\n"},
            "",
            'image_dir: a/metadata.csv:2: 3 cells for 2 columns; text with a comma needs quotes: "a cat, sitting"',
        ),
        (
            {"metadata.csv": 'file_name,text\n1.png,"a"b\n'},
            "",
            "image_dir: a/metadata.csv:2: not valid CSV: ',' expected after '\"'",
        ),
        (
            {"metadata.csv": "file_name,text,text\n1.png,a,b\n"},
            "",
            "image_dir: a/metadata.csv:1: duplicate column name: file_name, text, text",
        ),
        (
            {"metadata.csv": b"file_name,text\n1.png,caf\xe9\n"},
            "",
            "image_dir: a/metadata.csv: is not UTF-8 (byte 24); save the file as UTF-8",
        ),
        (
            {"metadata.jsonl": '{"file_name": "1.png", "text": "x"}\n[1]'},
            "",
            "image_dir: a/metadata.jsonl:2: expected an object {...}",
        ),
        (
            {"metadata.jsonl": "", "metadata.csv": ""},
            "",
            "image_dir: several metadata tables in a: metadata.csv, metadata.jsonl; keep one of them, or set"
            " metadata_file = 'FILE'",
        ),
        (
            {"metadata.jsonl": encode_table(ROWS, ".jsonl")},
            "caption_column = 'txet'",
            "image_dir: a/metadata.jsonl: no column 'txet' (set by caption_column); columns are file_name, text;"
            " did you mean text?",
        ),
        ({}, "caption_column = 'text'", "caption_column: no effect: no metadata table in a"),
        ({}, "image_column = 'x'", "image_column: no effect: no metadata table in a"),
    ],
)
def test_an_invalid_table_is_reported(tmp_path, files: dict, keys: str, expected: str):
    write_files(tmp_path / "a", ["1.png"])
    write_files(tmp_path / "a", files)
    (problem,) = strip_folder(tmp_path, format_lines(list_subset(tmp_path, f"image_dir = 'a'\n{keys}").problems))
    assert problem.partition(": ")[2] == expected


def test_columns_can_be_set(tmp_path):
    write_files(tmp_path / "a", ["1.png"])
    rows = [{"file": "1.png", "text": "not me", "de": "eins"}]
    write_files(tmp_path / "a", {"metadata.csv": encode_table(rows, ".csv")})
    keys = "image_column = 'file'\ncaption_column = 'de'"
    for source in ("image_dir = 'a'", "metadata_file = 'a/metadata.csv'"):
        listing = list_subset(tmp_path, f"{source}\n{keys}")
        assert [item.caption for item in listing.images] == ["eins"] and format_lines(listing.problems) == []


def test_a_column_set_for_several_folders_must_exist_in_one_of_them(tmp_path):
    write_files(tmp_path, ["a/1.png", "b/1.png"])
    head = "general.caption_column = 'de'\n[[datasets]]\nresolution = 64\n"
    subsets = ("image_dir = 'a'", "image_dir = 'b'")
    assert [len(listing.problems) for listing in list_subsets(tmp_path, *subsets, head=head)] == [1, 0]
    write_files(tmp_path / "b", {"metadata.csv": "file_name,de\n1.png,eins\n"})
    assert [len(listing.problems) for listing in list_subsets(tmp_path, *subsets, head=head)] == [0, 0]


def test_a_table_of_another_format_is_ignored_and_noted(tmp_path):
    write_files(tmp_path / "a", ["1.png"])
    write_files(tmp_path / "a", {"metadata.jsonl": '{"image_path": "1.png", "caption": "x"}'})
    listing = list_subset(tmp_path, "image_dir = 'a'")
    assert get_captions(listing) == {"1.png": ""} and format_lines(listing.problems) == []
    assert strip_folder(tmp_path, listing.notes)[0] == (
        "a/metadata.jsonl: not used: no column file_name; set metadata_file to read other formats"
    )


def test_a_table_without_captions_is_ignored_with_class_tokens(tmp_path):
    write_files(tmp_path / "a", ["1.png"])
    write_files(tmp_path / "a", {"metadata.jsonl": '{"file_name": "1.png", "label": 3}'})
    listing = list_subset(tmp_path, "image_dir = 'a'\nclass_tokens = 'cls'")
    assert get_captions(listing) == {"1.png": "cls"} and format_lines(listing.problems) == []
    assert strip_folder(tmp_path, listing.notes)[0] == (
        "a/metadata.jsonl: not used: no column text, caption or prompt; columns are file_name, label"
    )


def test_a_list_of_captions_is_read_as_lines(tmp_path):
    write_files(tmp_path / "a", ["1.png"])
    write_files(tmp_path / "a", {"metadata.jsonl": '{"file_name": "1.png", "text": ["one\\nuno", null, "zwei"]}'})
    assert get_captions(list_subset(tmp_path, "image_dir = 'a'\nenable_wildcard = true")) == {"1.png": "one\nuno\nzwei"}
    listing = list_subset(tmp_path, "image_dir = 'a'")
    assert get_captions(listing) == {"1.png": "one"} and "1 caption with several lines" in listing.notes[0]


def test_a_metadata_file_of_sd_scripts_joins_caption_and_tags(tmp_path):
    write_files(tmp_path, ["a.png", "b.png"])
    rows = [{"image_path": "a.png", "caption": "ay", "tags": "x, y", "label": 3}, {"image_path": "b", "tags": "z"}]
    write_files(tmp_path, {"m.jsonl": encode_table(rows, ".jsonl")})
    assert [item.caption for item in list_subset(tmp_path, "metadata_file = 'm.jsonl'").images] == ["ay,x, y", "z"]
    by_name = list_subset(tmp_path, "metadata_file = 'm.jsonl'\ncaption_column = 'tags'")
    assert [item.caption for item in by_name.images] == ["x, y", "z"]


@pytest.mark.parametrize(("column", "folder"), [("image_path", "here"), ("file_name", "m")])
def test_paths_of_sd_scripts_start_at_the_working_directory_and_those_of_hf_at_the_file(
    tmp_path, monkeypatch, column: str, folder: str
):
    write_files(tmp_path, ["here/1.png", "m/1.png"])
    write_files(tmp_path, {"m/m.jsonl": encode_table([{column: "1.png", "caption": "x"}], ".jsonl")})
    monkeypatch.chdir(tmp_path / "here")
    (item,) = list_subset(tmp_path, "metadata_file = 'm/m.jsonl'").images
    assert item.image.path.resolve() == tmp_path / folder / "1.png"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [{"image_path": "a.png", "caption": "x", "image_path_0": "c.png"}],
            "m.jsonl: column image_path_0 of musubi-tuner is not supported yet; remove it",
        ),
        (
            [{"image_path": "a.png", "file_name": "a.png", "text": "x"}],
            "m.jsonl: several image columns: image_path, file_name; set image_column = 'image_path'",
        ),
        (
            [{"image": "a.png", "text": "x"}],
            "m.jsonl: no column image_path, file_name or video_path; columns are image, text; set image_column = 'NAME'",
        ),
        (
            [{"image_path": "a.png", "caption": "x", "text": "y"}],
            "m.jsonl: several caption columns: text, caption; set caption_column = 'text'",
        ),
    ],
)
def test_an_ambiguous_metadata_file_is_rejected(tmp_path, rows: list[dict], expected: str):
    write_files(tmp_path, ["a.png"])
    write_files(tmp_path, {"m.jsonl": encode_table(rows, ".jsonl")})
    (problem,) = strip_folder(tmp_path, format_lines(list_subset(tmp_path, "metadata_file = 'm.jsonl'").problems))
    assert problem == f"set.toml:4: metadata_file: {expected}"


def test_the_caption_column_is_resolved_by_its_name():
    assert (
        resolve_caption_column(["image", "prompt"], None) == "prompt"
        and resolve_caption_column(["a", "text"], "a") == "a"
    )
    with pytest.raises(ValueError, match=r"no column text, caption or prompt; columns are none"):
        resolve_caption_column([], None)


def test_missing_pyarrow_is_reported_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write_files(tmp_path, {"m.parquet": "", "a/1.png": "", "a/metadata.parquet": ""})
    for key, file in (("metadata_file", "m.parquet"), ("parquet", "m.parquet"), ("parquet", "a")):
        assert find_missing(tmp_path, f"{key} = '{file}'") == [
            f"set.toml:4: {key}: parquet files need pyarrow: pip install 'pyarrow>=17'"
        ]
    assert (
        "a/metadata.parquet: parquet files need pyarrow: pip install"
        in format_lines(list_subset(tmp_path, "image_dir = 'a'").problems)[0]
    )
