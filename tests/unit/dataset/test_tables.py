"""Images in parquet and Arrow files: every row is listed and read back; rows in order share one read of a group."""

import io
import json
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from image_listings import (
    encode_image,
    find_missing,
    get_captions,
    list_subset,
    list_subsets,
    make_config,
    prepare_subsets,
    strip_folder,
    write_files,
)
from PIL import Image
from problem_lines import format_lines

from library.config.schema import TrainConfig
from library.dataloader.loader import ImageLoader, MicroBatchDataset
from library.dataloader.prepare import prepare_data
from library.dataset import tables
from library.dataset.image_ref import ImageRef, TableRow
from library.dataset.tables import RowReader
from library.errors import ConfigError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

IMAGES = [encode_image(number) for number in range(7)]
PAIR = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])


def write_table(path: Path, columns: dict, group: int = 3, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path, row_group_size=group, **options)


def make_pairs(images=IMAGES) -> object:
    return arrow.array([{"bytes": data, "path": "same.png"} for data in images], PAIR)


def make_captions(count: int = 7) -> list[str]:
    return [f"caption {number} 猫" for number in range(count)]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("kind", ["pair", "binary", "large_binary"])
def test_every_row_is_an_image_with_its_caption(tmp_path, compression: str, kind: str):
    column = make_pairs() if kind == "pair" else arrow.array(IMAGES, getattr(arrow, kind)())
    write_table(tmp_path / "p" / "a.parquet", {"image": column, "text": make_captions()}, compression=compression)
    listing = list_subset(tmp_path, "parquet = 'p'")
    assert get_captions(listing) == {str(number): text for number, text in enumerate(make_captions())}
    assert [item.image.read_bytes() for item in listing.images] == IMAGES
    assert (format_lines(listing.problems), format_lines(listing.missing), listing.notes, listing.caption_source) == (
        [],
        [],
        [],
        "text",
    )
    assert str(listing.images[4].image) == f"{tmp_path}/p/a.parquet:4" and listing.images[4].image.key == "a.parquet/4"


def test_files_are_given_by_folder_glob_braces_or_list(tmp_path):
    for number in range(3):
        write_table(tmp_path / "p" / f"train-0{number}.parquet", {"image": [IMAGES[number]], "text": [str(number)]})
    write_table(tmp_path / "p" / "s" / "test-0.parquet", {"image": [IMAGES[3]], "text": ["3"]})
    cases = {
        "'p'": "012",
        "'p'\nrecursive = true": "3012",
        "'p/train-*.parquet'": "012",
        "'p/**/*.parquet'": "3012",
        "'p/train-{00..02}.parquet'": "012",
        "['p/s', 'p/train-01.parquet']": "31",
        "'p/*-00.parquet'": "0",
    }
    for value, expected in cases.items():
        listing = list_subset(tmp_path, f"parquet = {value}")
        assert "".join(item.caption for item in listing.images) == expected and format_lines(listing.problems) == []


def test_missing_files_are_reported_before_anything_is_read(tmp_path):
    write_table(tmp_path / "p" / "train-0.parquet", {"image": [IMAGES[0]], "text": ["x"]})
    cases = {
        "'q'": "'q' not found (also searched next to set.toml)",
        "'p/trian-0.parquet'": "'p/trian-0.parquet' not found (also searched next to set.toml); p contains"
        " train-0.parquet; did you mean train-0.parquet?",
        "'p/train-{0..2}.parquet'": "2 files not found (also searched next to set.toml): p/train-1.parquet,"
        " p/train-2.parquet; p contains train-0.parquet",
        "['p', 'p/*.parquet']": "'p/*.parquet' matches files listed before: p/train-0.parquet",
        "'ftp://a/b.parquet'": "ftp://a/b.parquet: ftp:// is not supported; use s3://, gs://, hf://, https://, or download",
        "'{here}'": "no .parquet files or save_to_disk datasets in ., which contains set.toml, p/; set"
        " recursive = true to search its folders",
    }
    for value, expected in cases.items():
        (problem,) = find_missing(tmp_path, f"parquet = {value.replace('{here}', str(tmp_path))}")
        assert problem.startswith(f"set.toml:4: parquet: {expected}"), problem


CAPTIONS = make_captions()
INVALID_COLUMNS = [
    (
        {"image": IMAGES, "label": range(7)},
        "",
        "no column text, caption or prompt; columns are label; set caption_column = 'NAME'",
    ),
    (
        {"image": IMAGES, "text": CAPTIONS, "caption": CAPTIONS},
        "",
        "several caption columns: text, caption; set caption_column = 'text'",
    ),
    (
        {"image": IMAGES, "text": CAPTIONS},
        "caption_column = 'txt'",
        "no column 'txt' (set by caption_column); columns are text; did you mean text?",
    ),
    (
        {"a": IMAGES, "b": IMAGES, "text": CAPTIONS},
        "",
        "no column image; columns are a (binary), b (binary), text (string); set image_column = 'NAME'",
    ),
    (
        {"image": range(7), "text": CAPTIONS},
        "",
        "column 'image' has type int64, not images; set image_column to another column",
    ),
    (
        {"image": IMAGES, "text": range(7)},
        "",
        "column 'text' has type int64, not text; set caption_column to another column",
    ),
]


@pytest.mark.parametrize(("columns", "keys", "expected"), INVALID_COLUMNS)
def test_missing_or_ambiguous_columns_are_reported_with_the_existing_ones(
    tmp_path, columns: dict, keys: str, expected: str
):
    write_table(tmp_path / "a.parquet", {name: list(column) for name, column in columns.items()})
    (problem,) = strip_folder(tmp_path, format_lines(list_subset(tmp_path, f"parquet = 'a.parquet'\n{keys}").problems))
    assert problem == f"set.toml:4: parquet: a.parquet: {expected}"


def test_columns_can_be_set_and_the_only_column_of_bytes_is_the_image_column(tmp_path):
    write_table(tmp_path / "a.parquet", {"jpg": IMAGES, "de": make_captions(), "text": ["not me"] * 7})
    listing = list_subset(tmp_path, "parquet = 'a.parquet'\ncaption_column = 'de'")
    assert list(get_captions(listing).values()) == make_captions()
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "other": IMAGES[::-1], "text": make_captions()})
    listing = list_subset(tmp_path, "parquet = 'a.parquet'\nimage_column = 'other'")
    assert [item.image.read_bytes() for item in listing.images] == IMAGES[::-1]


def test_captions_may_be_lists_dictionary_encoded_or_missing(tmp_path):
    listed_texts = [["one", "uno"], [], None, ["four"], ["five"], ["six"], ["seven\nsieben"]]
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "text": listed_texts})
    subset = "parquet = 'a.parquet'\nclass_tokens = 'cls'\n"
    assert list(get_captions(list_subset(tmp_path, subset)).values()) == "one cls cls four five six seven".split()
    wild = get_captions(list_subset(tmp_path, subset + "enable_wildcard = true"))
    assert (wild["0"], wild["6"]) == ("one\nuno", "seven\nsieben")
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "text": arrow.array(["a"] * 6 + [None]).dictionary_encode()})
    listing = list_subset(tmp_path, subset)
    assert list(get_captions(listing).values()) == ["a"] * 6 + ["cls"]
    assert listing.notes == ["a.parquet: no text for 1 of 7 images, using the caption 'cls': a.parquet row 6"]


def test_captions_that_are_not_strings_are_reported_for_their_rows(tmp_path):
    lengths, data = arrow.array([0, 1, 2, 5], arrow.int32()).buffers()[1], arrow.py_buffer(b"abc\xe9d")
    broken = arrow.StringArray.from_buffers(3, lengths, data)
    cases = [(broken, {2: "b'c\\xe9d'"}), ([[["a"]], [], [["c"]]], {0: "['a']", 2: "['c']"})]
    for column, expected in cases:
        write_table(tmp_path / "a.parquet", {"image": IMAGES[:3], "text": column})
        actual = list_subset(tmp_path, "parquet = 'a.parquet'").images
        assert strip_folder(tmp_path, [item.problem for item in actual if item.problem]) == [
            f"a.parquet: row {row}: text is not a string: {shown}" for row, shown in expected.items()
        ]


def test_images_may_be_files_next_to_the_table(tmp_path):
    write_files(tmp_path / "p", {"x/1.png": IMAGES[1], "x/2.png": IMAGES[2]})
    write_table(tmp_path / "p" / "a.parquet", {"image": ["x/1.png", "x/2.png", None], "text": ["one", "two", "three"]})
    listing = list_subset(tmp_path, "parquet = 'p'")
    assert [item.image.part is None for item in listing.images] == [True, True, False]
    assert [item.image.read_bytes() for item in listing.images[:2]] == IMAGES[1:3]
    cells = [{"bytes": None, "path": "x/1.png"}, {"bytes": IMAGES[2], "path": None}, {"bytes": None, "path": None}]
    write_table(tmp_path / "p" / "a.parquet", {"image": arrow.array(cells, PAIR), "text": ["one", "two", "three"]})
    listing = list_subset(tmp_path, "parquet = 'p'")
    assert [item.image.read_bytes() for item in listing.images[:2]] == IMAGES[1:3]
    with pytest.raises(ConfigError) as caught:
        prepare_data(make_config(tmp_path, "parquet = 'p'"), 8)
    assert (
        strip_folder(tmp_path, format_lines(caught.value.problems))[0]
        == "p/a.parquet:2: cannot be read: the cell is empty"
    )


def test_broken_files_and_rows_are_reported_and_can_be_skipped(tmp_path):
    write_table(tmp_path / "p" / "a.parquet", {"image": [*IMAGES[:2], b"not an image", b""], "text": make_captions(4)})
    write_table(tmp_path / "p" / "b.parquet", {"image": IMAGES, "text": make_captions()})
    data = (tmp_path / "p" / "b.parquet").read_bytes()
    (tmp_path / "p" / "b.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError) as caught:
        prepare_data(make_config(tmp_path, "parquet = 'p'"), 8)
    actual = strip_folder(tmp_path, format_lines(caught.value.problems))
    assert actual[0].startswith("p/b.parquet: cannot be read as parquet: Parquet magic bytes not found in footer")
    assert actual[1].startswith("p/a.parquet:2: is not an image that Pillow can read")
    assert actual[2].startswith("p/a.parquet:3: cannot be read: the cell is empty")
    skipped = prepare_subsets(tmp_path, "parquet = 'p'", on_invalid_images="skip")
    assert [sample.key for sample in skipped.manifest.samples] == ["a.parquet/0", "a.parquet/1"]
    write_table(tmp_path / "p" / "b.parquet", {"image": [], "text": []})
    write_table(
        tmp_path / "p" / "a.parquet",
        {"image": arrow.array([], arrow.binary()), "text": arrow.array([], arrow.string())},
    )
    (tmp_path / "p" / "b.parquet").unlink()
    assert strip_folder(tmp_path, format_lines(list_subset(tmp_path, "parquet = 'p'").problems)) == [
        "set.toml:4: parquet: no rows in 1 file"
    ]


class Counting:
    """Count the reads of row groups."""

    def __init__(self, monkeypatch, seconds: float = 0):
        self.reads: list[tuple] = []
        whole = parquet.ParquetFile.read_row_group

        def read_row_group(file, group, *arguments, **options):
            self.reads.append(group)
            time.sleep(seconds)
            return whole(file, group, *arguments, **options)

        monkeypatch.setattr(parquet.ParquetFile, "read_row_group", read_row_group)


def test_rows_in_order_share_one_read_of_their_row_group(tmp_path, monkeypatch):
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "text": make_captions()})
    actual = list_subset(tmp_path, "parquet = 'a.parquet'").images
    counting = Counting(monkeypatch)
    monkeypatch.setattr(tables, "ROW_GROUP_CACHE_BYTES", 0)
    for item in actual:
        item.image.read_bytes()
    assert counting.reads == [0, 1, 2]
    for position in (0, 3, 1, 4, 2, 5):  # prefetch threads read two groups at once
        assert actual[position].image.read_bytes() == IMAGES[position]
    assert counting.reads == [0, 1, 2, 0, 1]
    monkeypatch.setattr(tables, "ROW_GROUP_CACHE_BYTES", 2**20)
    for position in (6, 0, 3, 6, 0, 3):
        actual[position].image.read_bytes()
    assert counting.reads == [0, 1, 2, 0, 1, 2]


def test_threads_and_processes_read_the_right_rows(tmp_path, monkeypatch):
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "text": make_captions()}, group=2)
    actual = list_subset(tmp_path, "parquet = 'a.parquet'").images
    monkeypatch.setattr(tables, "ROW_GROUP_CACHE_BYTES", 0)
    wrong = []

    def read(first: int) -> None:
        for step in range(60):
            position = (first * 3 + step * 5) % 7
            if actual[position].image.read_bytes() != IMAGES[position]:
                wrong.append(position)

    threads = [threading.Thread(target=read, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    counting = Counting(monkeypatch, seconds=0.05)
    fresh = pickle.loads(pickle.dumps([item.image for item in actual]))
    threads = [threading.Thread(target=fresh[number % 2].read_bytes) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.reads == [0]  # one reads the group, the others wait for it
    reader = actual[0].image.part.reader
    with reader._lock:  # a lock may be held during a fork
        child = os.fork()
        if child == 0:
            os._exit(0 if actual[5].image.read_bytes() == IMAGES[5] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_image_ref_pickles_small_and_is_equal_by_file_column_and_row(tmp_path):
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "text": make_captions()})
    actual = [item.image for item in list_subset(tmp_path, "parquet = 'a.parquet'").images]
    for image in actual:
        image.read_bytes()
    data = pickle.dumps(actual)
    assert len(data) < 2000 and pickle.loads(data) == actual and len({*actual, *pickle.loads(data)}) == 7
    rows = [ImageRef(tmp_path, "a.parquet", TableRow(RowReader(column), 0)) for column in ("image", "x")]
    assert rows[0] != rows[1]


def test_a_file_that_shrinks_during_the_run_is_reported(tmp_path):
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "text": make_captions()})
    images = [item.image for item in list_subset(tmp_path, "parquet = 'a.parquet'").images]
    write_table(tmp_path / "a.parquet", {"image": IMAGES[:2], "text": make_captions(2)})
    with pytest.raises(OSError, match=r"a\.parquet: row 6: no longer exists"):
        images[6].read_bytes()
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(OSError):
        images[0].read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_returns_the_images_of_the_rows(tmp_path, workers: int):
    write_table(tmp_path / "a.parquet", {"image": make_pairs(), "text": make_captions()})
    ready = prepare_subsets(tmp_path, "parquet = 'a.parquet'")
    plan = ready.build_batch_plan(1, TrainConfig(seed=1))
    reader = MicroBatchDataset(ready.manifest, ready.assignments, plan, 0, 1, 7)
    loader = ImageLoader(reader, plan, num_workers=workers)
    seen = {}
    for work, _ in zip(loader.iter_steps(0), range(7), strict=False):
        for batch in work.micro_batches:
            seen[batch.captions[0]] = batch.pixels[0].permute(1, 2, 0).numpy()
    for number, text in enumerate(make_captions()):
        assert (seen[text] == np.asarray(Image.open(io.BytesIO(IMAGES[number])))).all()


def test_large_row_groups_are_noted(tmp_path, monkeypatch):
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "text": make_captions()}, group=7)
    monkeypatch.setattr(tables, "LARGE_ROW_GROUP_BYTES", sum(map(len, IMAGES)))
    (note,) = list_subset(tmp_path, "parquet = 'a.parquet'").notes
    assert note.startswith("large row groups, and a whole one is read for each image") and "row_group_size=100" in note
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "text": make_captions()}, group=3)
    assert list_subset(tmp_path, "parquet = 'a.parquet'").notes == []


def test_a_file_listed_by_two_subsets_is_reported(tmp_path):
    write_table(tmp_path / "p" / "a.parquet", {"image": IMAGES, "text": make_captions()})
    actual = list_subsets(tmp_path, "parquet = 'p'", "parquet = 'p/a.parquet'")
    assert strip_folder(tmp_path, [line for listing in actual for line in format_lines(listing.problems)]) == [
        "set.toml:6: parquet: 7 images also in set.toml:4: p/a.parquet:0, p/a.parquet:1, p/a.parquet:2, ...; list each"
        " file once"
    ]


def save_to_disk(folder: Path, shards: list[tuple[list[bytes], list[str]]]) -> None:
    """Save as HF datasets does: Arrow streams, a state file that lists them, and a cache file."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, (images, words) in zip([*names, "cache-1.arrow"], [*shards, shards[0]], strict=True):
        table = arrow.table({"image": make_pairs(images), "text": words})
        with arrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


@pytest.mark.parametrize("source", ["'deep/saved'", "'deep/saved/data-*.arrow'", "'deep'\nrecursive = true"])
def test_a_dataset_saved_with_save_to_disk_is_read(tmp_path, source):
    save_to_disk(tmp_path / "deep" / "saved", [(IMAGES[:4], make_captions()[:4]), (IMAGES[4:], make_captions()[4:])])
    listing = list_subset(tmp_path, f"parquet = {source}")
    assert (format_lines(listing.problems), format_lines(listing.missing), listing.notes) == ([], [], [])
    assert [item.caption for item in listing.images] == make_captions()
    for position in (6, 0, 3, 5, 1, 4, 2):
        assert listing.images[position].image.read_bytes() == IMAGES[position]
    fresh = pickle.loads(pickle.dumps([item.image for item in listing.images]))
    assert [image.read_bytes() for image in fresh] == IMAGES
    samples = prepare_subsets(tmp_path, f"parquet = {source}").manifest.samples
    assert len({sample.content_hash for sample in samples}) == 7


def test_a_broken_arrow_file_is_reported_and_a_foreign_state_file_is_ignored(tmp_path):
    save_to_disk(tmp_path / "saved", [(IMAGES, make_captions())])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "state.json").write_text("[]")
    (path,) = (tmp_path / "saved").glob("data-*")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (missing,) = format_lines(list_subset(tmp_path, "parquet = 'saved'").missing)
    assert missing.startswith(f"{path}: cannot be read as an Arrow stream of save_to_disk: ")
    (problem,) = format_lines(list_subset(tmp_path, "parquet = 'other'").problems)
    assert f"no .parquet files or save_to_disk datasets in {tmp_path}/other, which contains state.json" in problem


def list_controls(listing):
    return [[each.read_bytes() for each in item.controls] for item in listing.images]


def test_control_images_are_in_columns_of_their_own(tmp_path):
    """Those of HF's datasets are named by ``control_column``; bytes, pairs and paths may be mixed."""
    write_files(tmp_path / "p", {"c.png": IMAGES[6]})
    base = {"image": make_pairs(IMAGES[:2]), "text": ["a", "b"], "size": [1, 2]}
    write_table(tmp_path / "p" / "a.parquet", {**base, "control_image_1": ["c.png"] * 2, "control_path": IMAGES[2:4]})
    listing = list_subset(tmp_path, "parquet = 'p'")
    assert [item.image.read_bytes() for item in listing.images] == IMAGES[:2] and listing.notes == []
    assert list_controls(listing) == [[IMAGES[2], IMAGES[6]], [IMAGES[3], IMAGES[6]]]

    write_table(tmp_path / "q" / "a.parquet", {**base, "conditioning_image": make_pairs(IMAGES[4:6])})
    without = list_subset(tmp_path, "parquet = 'q'")
    assert list_controls(without) == [[], []] and "conditioning_image; for control images set" in without.notes[0]
    assert list_controls(list_subset(tmp_path, "parquet = 'q'\ncontrol_column = 'conditioning_image'")) == [
        [IMAGES[4]],
        [IMAGES[5]],
    ]
    for name, message in {
        "nowhere": "no column 'nowhere' (set by control_column)",
        "size": "int64, not images",
    }.items():
        (problem,) = format_lines(list_subset(tmp_path, f"parquet = 'q'\ncontrol_column = ['{name}']").problems)
        assert message in problem
    write_table(tmp_path / "r" / "a.parquet", {**base, "control_path": ["", ""], "control_image": ["", ""]})
    (problem,) = format_lines(list_subset(tmp_path, "parquet = 'r'").problems)
    assert "columns control_path and control_image are the same control image" in problem


def test_a_row_without_its_control_image_is_reported_with_the_images(tmp_path):
    columns = {"image": make_pairs(IMAGES[:2]), "text": ["a", "b"], "control_image": [IMAGES[2], None]}
    write_table(tmp_path / "p" / "a.parquet", columns)
    with pytest.raises(ConfigError, match=r"a.parquet:1: its control image .*a.parquet:1.* the cell is empty"):
        prepare_subsets(tmp_path, "parquet = 'p'")
