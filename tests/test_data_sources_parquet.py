"""Pictures in parquet files: every row is found, read back to the byte, and cheap when rows are read in their order."""

import io
import json
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from listings import captions, listed, listings, missing, picture, prepared, settings, shortened, write
from PIL import Image

from library.config.schema import TrainConfig
from library.data.loader import Loader, MicroBatchReader
from library.data.origin import Origin, Row
from library.data.prepare import prepare
from library.data.sources import rows as rows_module
from library.data.sources.rows import RowReader
from library.errors import ConfigError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

PICTURES = [picture(number) for number in range(7)]
PAIR = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])


def save(path: Path, columns: dict, group: int = 3, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path, row_group_size=group, **options)


def pairs(pictures=PICTURES) -> object:
    return arrow.array([{"bytes": data, "path": "same.png"} for data in pictures], PAIR)


def texts(count: int = 7) -> list[str]:
    return [f"caption {number} 猫" for number in range(count)]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("kind", ["pair", "binary", "large_binary"])
def test_every_row_is_a_picture_with_its_caption(tmp_path, compression: str, kind: str):
    column = pairs() if kind == "pair" else arrow.array(PICTURES, getattr(arrow, kind)())
    save(tmp_path / "p" / "a.parquet", {"image": column, "text": texts()}, compression=compression)
    listing = listed(tmp_path, "parquet = 'p'")
    assert captions(listing) == {str(number): text for number, text in enumerate(texts())}
    assert [item.image.read_bytes() for item in listing.found] == PICTURES
    assert (listing.problems, listing.absent, listing.notes, listing.caption_ending) == ([], [], [], "text")
    assert str(listing.found[4].image) == f"{tmp_path}/p/a.parquet:4" and listing.found[4].image.key == "a.parquet/4"


def test_files_are_named_by_folder_pattern_braces_or_list(tmp_path):
    for number in range(3):
        save(tmp_path / "p" / f"train-0{number}.parquet", {"image": [PICTURES[number]], "text": [str(number)]})
    save(tmp_path / "p" / "s" / "test-0.parquet", {"image": [PICTURES[3]], "text": ["3"]})
    cases = {
        "'p'": "012", "'p'\nrecursive = true": "3012", "'p/train-*.parquet'": "012", "'p/**/*.parquet'": "3012",
        "'p/train-{00..02}.parquet'": "012", "['p/s', 'p/train-01.parquet']": "31", "'p/*-00.parquet'": "0",
    }  # fmt: skip
    for value, expected in cases.items():
        listing = listed(tmp_path, f"parquet = {value}")
        assert "".join(item.caption for item in listing.found) == expected and listing.problems == []


def test_what_is_not_there_is_told_before_anything_is_read(tmp_path):
    save(tmp_path / "p" / "train-0.parquet", {"image": [PICTURES[0]], "text": ["x"]})
    cases = {
        "'q'": "'q' is not there (also looked beside set.toml)",
        "'p/trian-0.parquet'": "'p/trian-0.parquet' is not there (also looked beside set.toml); p has"
        " train-0.parquet; did you mean train-0.parquet?",
        "'p/train-{0..2}.parquet'": "2 files are not there (also looked beside set.toml): p/train-1.parquet,"
        " p/train-2.parquet; p has train-0.parquet",
        "['p', 'p/*.parquet']": "'p/*.parquet' names what was named already: p/train-0.parquet",
        "'https://a/b.parquet'": "'https://a/b.parquet' is an address; download the files and name the folder",
        "'{here}'": ". has no .parquet files and nothing that save_to_disk wrote; there are set.toml, p/;"
        " recursive = true searches folders below, too",
    }
    for value, expected in cases.items():
        (problem,) = missing(tmp_path, f"parquet = {value.replace('{here}', str(tmp_path))}")
        assert problem.startswith(f"set.toml:4: parquet: {expected}"), problem


@pytest.mark.parametrize(
    ("columns", "keys", "expected"),
    [
        ({"image": PICTURES, "label": range(7)}, "", "no column is called text, caption, prompt; there are label; say"
         " which holds captions: caption_column = 'NAME'"),
        ({"image": PICTURES, "text": texts(), "caption": texts()}, "", "captions may stand in text or caption; say"
         " which: caption_column = 'text'"),
        ({"image": PICTURES, "text": texts()}, "caption_column = 'txt'", "has no column 'txt', which caption_column"
         " names; there are text; did you mean text?"),
        ({"a": PICTURES, "b": PICTURES, "text": texts()}, "", "no column is called image; there are a (binary), b"
         " (binary), text (string); say which holds pictures: image_column = 'NAME'"),
        ({"image": range(7), "text": texts()}, "", "column 'image' holds int64, no pictures; name another one with"
         " image_column"),
        ({"image": PICTURES, "text": range(7)}, "", "column 'text' holds int64, no text; name another one with"
         " caption_column"),
        ({"image": ["https://x/y.png"] * 7, "text": texts()}, "", "column 'image' holds addresses, such as"
         " 'https://x/y.png'; download the pictures"),
    ],
)  # fmt: skip
def test_columns_that_are_not_clear_are_told_with_those_that_there_are(
    tmp_path, columns: dict, keys: str, expected: str
):
    save(tmp_path / "a.parquet", {name: list(column) for name, column in columns.items()})
    (problem,) = shortened(tmp_path, listed(tmp_path, f"parquet = 'a.parquet'\n{keys}").problems)
    assert problem == f"set.toml:4: parquet: a.parquet: {expected}"


def test_columns_may_be_named_and_the_only_column_of_bytes_needs_no_name(tmp_path):
    save(tmp_path / "a.parquet", {"jpg": PICTURES, "de": texts(), "text": ["not me"] * 7})
    listing = listed(tmp_path, "parquet = 'a.parquet'\ncaption_column = 'de'")
    assert list(captions(listing).values()) == texts()
    save(tmp_path / "a.parquet", {"image": PICTURES, "other": PICTURES[::-1], "text": texts()})
    listing = listed(tmp_path, "parquet = 'a.parquet'\nimage_column = 'other'")
    assert [item.image.read_bytes() for item in listing.found] == PICTURES[::-1]


def test_captions_may_be_lists_dictionaries_or_missing(tmp_path):
    listed_texts = [["one", "uno"], [], None, ["four"], ["five"], ["six"], ["seven\nsieben"]]
    save(tmp_path / "a.parquet", {"image": PICTURES, "text": listed_texts})
    subset = "parquet = 'a.parquet'\nclass_tokens = 'cls'\n"
    assert list(captions(listed(tmp_path, subset)).values()) == ["one", "cls", "cls", "four", "five", "six", "seven"]
    wild = captions(listed(tmp_path, subset + "enable_wildcard = true"))
    assert (wild["0"], wild["6"]) == ("one\nuno", "seven\nsieben")
    save(tmp_path / "a.parquet", {"image": PICTURES, "text": arrow.array(["a"] * 6 + [None]).dictionary_encode()})
    listing = listed(tmp_path, subset)
    assert list(captions(listing).values()) == ["a"] * 6 + ["cls"]
    assert listing.notes == ["a.parquet: 1 of 7 pictures have no text, 'cls' is their caption: a.parquet row 6"]


def test_captions_that_are_no_text_are_told_for_their_rows(tmp_path):
    lengths, data = arrow.array([0, 1, 2, 5], arrow.int32()).buffers()[1], arrow.py_buffer(b"abc\xe9d")
    broken = arrow.StringArray.from_buffers(3, lengths, data)
    cases = [(broken, {2: "b'c\\xe9d'"}), ([[["a"]], [], [["c"]]], {0: "['a']", 2: "['c']"})]
    for column, expected in cases:
        save(tmp_path / "a.parquet", {"image": PICTURES[:3], "text": column})
        found = listed(tmp_path, "parquet = 'a.parquet'").found
        assert shortened(tmp_path, [item.problem for item in found if item.problem]) == [
            f"a.parquet: row {row}: text is no text: {shown}" for row, shown in expected.items()
        ]


def test_pictures_may_be_files_beside_the_table(tmp_path):
    write(tmp_path / "p", {"x/1.png": PICTURES[1], "x/2.png": PICTURES[2]})
    save(tmp_path / "p" / "a.parquet", {"image": ["x/1.png", "x/2.png", None], "text": ["one", "two", "three"]})
    listing = listed(tmp_path, "parquet = 'p'")
    assert [item.image.part is None for item in listing.found] == [True, True, False]
    assert [item.image.read_bytes() for item in listing.found[:2]] == PICTURES[1:3]
    cells = [{"bytes": None, "path": "x/1.png"}, {"bytes": PICTURES[2], "path": None}, {"bytes": None, "path": None}]
    save(tmp_path / "p" / "a.parquet", {"image": arrow.array(cells, PAIR), "text": ["one", "two", "three"]})
    listing = listed(tmp_path, "parquet = 'p'")
    assert [item.image.read_bytes() for item in listing.found[:2]] == PICTURES[1:3]
    with pytest.raises(ConfigError) as caught:
        prepare(settings(tmp_path, "parquet = 'p'"), 8)
    assert shortened(tmp_path, caught.value.problems)[0] == "p/a.parquet:2: cannot be read: the cell is empty"


def test_broken_files_and_rows_are_named_and_can_be_skipped(tmp_path):
    save(tmp_path / "p" / "a.parquet", {"image": [*PICTURES[:2], b"no picture", b""], "text": texts(4)})
    save(tmp_path / "p" / "b.parquet", {"image": PICTURES, "text": texts()})
    data = (tmp_path / "p" / "b.parquet").read_bytes()
    (tmp_path / "p" / "b.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError) as caught:
        prepare(settings(tmp_path, "parquet = 'p'"), 8)
    found = shortened(tmp_path, caught.value.problems)
    assert found[0].startswith("p/b.parquet: cannot be read as parquet: Parquet magic bytes not found in footer")
    assert found[1].startswith("p/a.parquet:2: is no picture")
    assert found[2].startswith("p/a.parquet:3: cannot be read: the cell is empty")
    skipped = prepared(tmp_path, "parquet = 'p'", on_bad_data="skip")
    assert [sample.key for sample in skipped.manifest.samples] == ["a.parquet/0", "a.parquet/1"]
    save(tmp_path / "p" / "b.parquet", {"image": [], "text": []})
    save(
        tmp_path / "p" / "a.parquet",
        {"image": arrow.array([], arrow.binary()), "text": arrow.array([], arrow.string())},
    )
    (tmp_path / "p" / "b.parquet").unlink()
    assert shortened(tmp_path, listed(tmp_path, "parquet = 'p'").problems) == [
        "set.toml:4: parquet: 1 files without a row"
    ]


class Counting:
    """How often row groups are read."""

    def __init__(self, monkeypatch, seconds: float = 0):
        self.reads: list[tuple] = []
        whole = parquet.ParquetFile.read_row_group

        def read_row_group(file, group, *arguments, **options):
            self.reads.append(group)
            time.sleep(seconds)
            return whole(file, group, *arguments, **options)

        monkeypatch.setattr(parquet.ParquetFile, "read_row_group", read_row_group)


def test_rows_that_are_read_in_order_share_the_reading_of_their_group(tmp_path, monkeypatch):
    save(tmp_path / "a.parquet", {"image": PICTURES, "text": texts()})
    found = listed(tmp_path, "parquet = 'a.parquet'").found
    counting = Counting(monkeypatch)
    monkeypatch.setattr(rows_module, "HELD_BYTES", 0)
    for item in found:
        item.image.read_bytes()
    assert counting.reads == [0, 1, 2]
    for position in (0, 3, 1, 4, 2, 5):  # threads that read ahead are in two groups at once
        assert found[position].image.read_bytes() == PICTURES[position]
    assert counting.reads == [0, 1, 2, 0, 1]
    monkeypatch.setattr(rows_module, "HELD_BYTES", 2**20)
    for position in (6, 0, 3, 6, 0, 3):
        found[position].image.read_bytes()
    assert counting.reads == [0, 1, 2, 0, 1, 2]


def test_threads_and_processes_read_the_right_rows(tmp_path, monkeypatch):
    save(tmp_path / "a.parquet", {"image": PICTURES, "text": texts()}, group=2)
    found = listed(tmp_path, "parquet = 'a.parquet'").found
    monkeypatch.setattr(rows_module, "HELD_BYTES", 0)
    wrong = []

    def read(first: int) -> None:
        for step in range(60):
            position = (first * 3 + step * 5) % 7
            if found[position].image.read_bytes() != PICTURES[position]:
                wrong.append(position)

    threads = [threading.Thread(target=read, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    counting = Counting(monkeypatch, seconds=0.05)
    fresh = pickle.loads(pickle.dumps([item.image for item in found]))
    threads = [threading.Thread(target=fresh[number % 2].read_bytes) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.reads == [0]  # one reads the group, the others wait for it
    reader = found[0].image.part.rows
    with reader._lock:  # as it may be in the moment of a fork
        child = os.fork()
        if child == 0:
            os._exit(0 if found[5].image.read_bytes() == PICTURES[5] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_origin_travels_and_is_equal_by_file_column_and_row(tmp_path):
    save(tmp_path / "a.parquet", {"image": PICTURES, "text": texts()})
    found = [item.image for item in listed(tmp_path, "parquet = 'a.parquet'").found]
    for image in found:
        image.read_bytes()
    data = pickle.dumps(found)
    assert len(data) < 2000 and pickle.loads(data) == found and len({*found, *pickle.loads(data)}) == 7
    assert Origin(tmp_path, "a.parquet", Row(RowReader("image"), 0)) != Origin(
        tmp_path, "a.parquet", Row(RowReader("x"), 0)
    )


def test_a_file_that_shrinks_during_the_run_is_told(tmp_path):
    save(tmp_path / "a.parquet", {"image": PICTURES, "text": texts()})
    images = [item.image for item in listed(tmp_path, "parquet = 'a.parquet'").found]
    save(tmp_path / "a.parquet", {"image": PICTURES[:2], "text": texts(2)})
    with pytest.raises(OSError, match=r"a\.parquet: row 6: is not there any more"):
        images[6].read_bytes()
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(OSError):
        images[0].read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_hands_out_the_pictures_of_the_rows(tmp_path, workers: int):
    save(tmp_path / "a.parquet", {"image": pairs(), "text": texts()})
    ready = prepared(tmp_path, "parquet = 'a.parquet'")
    plan = ready.batch_plan(1, TrainConfig(seed=1))
    reader = MicroBatchReader(ready.manifest, ready.placements, plan, 0, 1, 7)
    loader = Loader(reader, plan, workers=workers)
    seen = {}
    for work, _ in zip(loader.steps(0), range(7), strict=False):
        for batch in work.batches:
            seen[batch.captions[0]] = batch.pixels[0].permute(1, 2, 0).numpy()
    for number, text in enumerate(texts()):
        assert (seen[text] == np.asarray(Image.open(io.BytesIO(PICTURES[number])))).all()


def test_large_row_groups_are_pointed_out(tmp_path, monkeypatch):
    from library.data.sources import parquet as source

    save(tmp_path / "a.parquet", {"image": PICTURES, "text": texts()}, group=7)
    monkeypatch.setattr(source, "LARGE_GROUP", sum(map(len, PICTURES)))
    (note,) = listed(tmp_path, "parquet = 'a.parquet'").notes
    assert (
        note.startswith("for a picture its whole row group is read, and some are large")
        and "row_group_size=100" in note
    )
    save(tmp_path / "a.parquet", {"image": PICTURES, "text": texts()}, group=3)
    assert listed(tmp_path, "parquet = 'a.parquet'").notes == []


def test_a_file_that_two_subsets_name_is_told(tmp_path):
    save(tmp_path / "p" / "a.parquet", {"image": PICTURES, "text": texts()})
    found = listings(tmp_path, "parquet = 'p'", "parquet = 'p/a.parquet'")
    assert shortened(tmp_path, [line for listing in found for line in listing.problems]) == [
        "set.toml:6: parquet: 7 pictures are in set.toml:4, too: p/a.parquet:0, p/a.parquet:1, p/a.parquet:2, ...; name"
        " files once"
    ]


def save_to_disk(folder: Path, shards: list[tuple[list[bytes], list[str]]]) -> None:
    """As HF datasets does it: streams in batches, a list of them, and beside them a cache of its own."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, (pictures, words) in zip([*names, "cache-1.arrow"], [*shards, shards[0]], strict=True):
        table = arrow.table({"image": pairs(pictures), "text": words})
        with arrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


@pytest.mark.parametrize("source", ["'deep/saved'", "'deep/saved/data-*.arrow'", "'deep'\nrecursive = true"])
def test_what_save_to_disk_wrote_is_read_as_it_is(tmp_path, source):
    save_to_disk(tmp_path / "deep" / "saved", [(PICTURES[:4], texts()[:4]), (PICTURES[4:], texts()[4:])])
    listing = listed(tmp_path, f"parquet = {source}")
    assert (listing.problems, listing.absent, listing.notes) == ([], [], [])
    assert [item.caption for item in listing.found] == texts()
    for position in (6, 0, 3, 5, 1, 4, 2):
        assert listing.found[position].image.read_bytes() == PICTURES[position]
    fresh = pickle.loads(pickle.dumps([item.image for item in listing.found]))
    assert [image.read_bytes() for image in fresh] == PICTURES
    samples = prepared(tmp_path, f"parquet = {source}").manifest.samples
    assert len({sample.content for sample in samples}) == 7


def test_a_broken_arrow_file_is_named_and_a_foreign_state_file_is_none(tmp_path):
    save_to_disk(tmp_path / "saved", [(PICTURES, texts())])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "state.json").write_text("[]")
    (path,) = (tmp_path / "saved").glob("data-*")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (absent,) = listed(tmp_path, "parquet = 'saved'").absent
    assert absent.startswith(f"{path}: cannot be read as what save_to_disk writes: ")
    (problem,) = listed(tmp_path, "parquet = 'other'").problems
    assert "has no .parquet files and nothing that save_to_disk wrote; there are state.json" in problem
