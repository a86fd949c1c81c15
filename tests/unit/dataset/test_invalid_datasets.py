"""Every unusable file, entry and setting is listed in one report with its fix, before anything is loaded."""

import io
import json
import os
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from odd_images import encode_chunk, encode_png
from PIL import Image, features
from problem_lines import format_lines

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset.image_inspection import is_truncated
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError

NOISE = np.random.default_rng(0).integers(0, 256, (70, 80, 3), np.uint8)


def encoded(kind: str, image: Image.Image | None = None, **options) -> bytes:
    stream = io.BytesIO()
    (image or Image.fromarray(NOISE)).save(stream, kind, **options)
    return stream.getvalue()


def half(kind: str) -> bytes:
    data = encoded(kind)
    return data[: len(data) // 2]


def box(brand: bytes) -> bytes:
    return struct.pack(">I", 24) + b"ftyp" + brand + bytes(4) + b"mif1" + brand + bytes(100)


def with_hole() -> bytes:
    data = bytearray(encoded("PNG"))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    return bytes(data)


LONG = zlib.compress(b"x" * 5_000_000)
ROWS = (b"\0" + bytes(80 * 3)) * 70
Maker = Callable[[Path], object]


def put(data: bytes) -> Maker:
    return lambda path: path.write_bytes(data)


def captioned(caption: bytes) -> Maker:
    return lambda path: (path.with_suffix(".png").write_bytes(encoded("PNG")), path.write_bytes(caption))


def sparse(path: Path) -> None:
    """A file over the size limit that takes no space on disk."""
    with path.open("wb") as file:
        file.truncate(2**30 + 1)


def listener(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def unreadable(path: Path) -> None:
    path.write_bytes(encoded("PNG"))
    path.chmod(0)


@dataclass(frozen=True)
class InvalidFile:
    """A file that cannot be used, with the expected problem and fix."""

    name: str
    make: Maker
    problem: str
    fix: str


COPY = "copy it again"
FILES = [
    InvalidFile("empty.png", put(b""), "is empty", COPY),
    InvalidFile("half_1.png", put(half("PNG")), "is truncated", COPY),
    InvalidFile("half_2.jpg", put(half("JPEG")), "is truncated", COPY),
    InvalidFile("half_3.webp", put(half("WEBP")), "is truncated", COPY),
    InvalidFile("half_4.bmp", put(half("BMP")), "is truncated", COPY),
    InvalidFile("tail_5.jpg", put(encoded("JPEG")[:-30]), "is truncated", COPY),
    InvalidFile("gif_6.png", put(half("GIF")), "is truncated", COPY),
    InvalidFile("tiff_7.png", put(half("TIFF")), "is truncated", COPY),
    InvalidFile("jpeg2000_8.png", put(half("JPEG2000")), "is truncated", COPY),
    InvalidFile("head.jpg", put(encoded("JPEG")[:20]), "is a damaged JPEG", COPY),
    InvalidFile("checksum.png", put(encoded("PNG")[:40] + b"\1" + encoded("PNG")[41:]), "is a damaged PNG", COPY),
    InvalidFile("hole.png", put(with_hole()), "cannot be decoded: broken data stream", COPY),
    InvalidFile("no_width.png", put(encode_png(0, 10, rows=b"")), "is a damaged PNG", COPY),
    InvalidFile("text.png", put(b"not an image"), "is not an image that Pillow can read", "convert it to PNG or JPEG"),
    InvalidFile(
        "junk.jpg", put(NOISE.tobytes()[:999]), "is not an image that Pillow can read", "convert it to PNG or JPEG"
    ),
    InvalidFile("zeros.jpg", put(bytes(500)), "is only zero bytes", COPY),
    InvalidFile("page.jpg", put(b"\n<!DOCTYPE html>\n<html>404"), "is a web page", "download the image itself"),
    InvalidFile(
        "drawing.png", put(b"<?xml version='1.0'?>\n<!-- x -->\n<svg/>"), "is an SVG drawing", "export it as PNG"
    ),
    InvalidFile("paper.png", put(b"%PDF-1.7"), "is a PDF document", "export its pages as PNG"),
    InvalidFile("layers.png", put(b"8BPS\0\1" + bytes(20)), "is a Photoshop document", "export it as PNG"),
    InvalidFile("script.png", put(encoded("EPS")), "is a PostScript file", "export it as PNG"),
    InvalidFile("archive.png", put(b"PK\3\4" + bytes(20)), "is a zip archive", "unpack it"),
    InvalidFile("packed.png", put(b"\x1f\x8b\x08" + bytes(20)), "is compressed with gzip", "unpack it"),
    InvalidFile("film.jpg", put(box(b"isom")), "is a video", "extract frames"),
    InvalidFile("film.webp", put(b"\x1aE\xdf\xa3" + bytes(20)), "is a video", "extract frames"),
    InvalidFile("phone.jpg", put(box(b"heic")), "is HEIC, which this version of Pillow", "convert it to PNG or JPEG"),
    InvalidFile("camera.jpg", put(box(b"crx ")), "is a camera raw file", "develop it"),
    InvalidFile(
        "coming.jxl", put(b"\xff\x0a" + bytes(50)), "is JPEG XL, which this version of Pillow cannot read", "djxl"
    ),
    InvalidFile(
        "pointer.png", put(b"version https://git-lfs.github.com/spec/v1\noid"), "git-lfs pointer", "git lfs pull"
    ),
    InvalidFile("bomb.png", put(encode_png(60_000, 60_000)), "is too large: 3,600,000,000 pixels", "make it smaller"),
    InvalidFile("firework.png", put(encode_png(15_000, 12_000)), "is too large: 180,000,000 pixels", "make it smaller"),
    InvalidFile(
        "novel.png",
        put(encode_png(80, 70, encode_chunk(b"zTXt", b"k\0\0" + LONG), rows=ROWS)),
        "more metadata",
        "without metadata",
    ),
    InvalidFile(
        "story.png",
        put(encode_png(80, 70, encode_chunk(b"iTXt", b"k\0\1\0\0\0" + LONG), rows=ROWS)),
        "more metadata",
        "without metadata",
    ),
    InvalidFile(
        "profile.png",
        put(encode_png(80, 70, encode_chunk(b"iCCP", b"k\0\0" + LONG), rows=ROWS)),
        "color profile",
        "without metadata",
    ),
    InvalidFile("huge.png", sparse, "is too large: 1.0 GiB", "make it smaller"),
    InvalidFile(
        "gone.png", lambda path: path.symlink_to("nowhere.png"), "is a broken link to nowhere.png", "restore that file"
    ),
    InvalidFile("circle.png", lambda path: path.symlink_to("circle.png"), "a link to itself", "remove it"),
    InvalidFile(
        "ring.png",
        lambda path: (path.symlink_to("ring_2"), path.with_name("ring_2").symlink_to("ring.png")),
        "a link to itself",
        "remove it",
    ),
    InvalidFile("pipe.png", os.mkfifo, "is a named pipe, not a file", "remove it"),
    InvalidFile("listener.png", listener, "is a socket, not a file", "remove it"),
    InvalidFile("locked.png", unreadable, "cannot be read: Permission denied", "change its permissions"),
    InvalidFile("thin.png", put(encoded("PNG", Image.new("RGB", (5000, 3)))), "leave no bucket", "allow upscaling"),
    InvalidFile("latin.txt", captioned(b"caf\xe9"), "is not UTF-8 (byte 3)", "save the file as UTF-8"),
    InvalidFile("wide.txt", captioned("a cat".encode("utf-16")), "is UTF-16 or UTF-32", "save the file as UTF-8"),
    InvalidFile("blank.txt", captioned(b" \n\t\n"), "is empty", "write a caption, or delete the file"),
    InvalidFile("binary.txt", captioned(b"a\0b"), "contains zero bytes", "save the file as UTF-8"),
    InvalidFile(
        "drain.txt",
        lambda path: (path.with_suffix(".png").write_bytes(encoded("PNG")), os.mkfifo(path)),
        "is empty",
        "write a caption, or delete the file",
    ),
    InvalidFile(
        "lost.txt",
        lambda path: (path.with_suffix(".png").write_bytes(encoded("PNG")), path.symlink_to("nowhere")),
        "cannot be read: No such file",
        "fix or delete the file",
    ),
]
ENTRIES = [
    ({"image_path": "absent.png", "caption": "x"}, "'absent.png' not found in"),
    ({"image_path": "m.png"}, "'m.png': no caption and no tags"),
    ({"image_path": "m.png", "caption": 3}, "'m.png': caption is not a string: 3"),
    ({"image_path": "m.png", "tags": {"x": 1}}, "'m.png': tags is not a string: {'x': 1}"),
]
"""Lines of a metadata file."""
GOOD = {"猫 🐈.png": "PNG", "zebra.jpg": "JPEG", "okapi.webp": "WEBP"}


@pytest.fixture(scope="module")
def invalid_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("invalid")
    (folder / "a").mkdir()
    for bad in FILES:
        bad.make(folder / "a" / bad.name)
    for number, (name, kind) in enumerate(GOOD.items()):
        image = Image.fromarray(np.roll(NOISE, number + 1, axis=0))
        (folder / "a" / name).write_bytes(encoded(kind, image))
    (folder / "m").mkdir()
    (folder / "m" / "m.png").write_bytes(encoded("PNG"))
    rows = [{"image_path": "m.png", "caption": "fine"}, *(entry for entry, _ in ENTRIES)]
    (folder / "m" / "m.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "set.toml").write_text(
        "[general]\nenable_bucket = true\nbucket_no_upscale = true\nbucket_reso_steps = 16\nresolution = 64\n"
        f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{folder}/a'\ncaption_extension = '.txt'\n"
        f"[[datasets]]\n[[datasets.subsets]]\nmetadata_file = '{folder}/m/m.jsonl'\n",
        encoding="utf-8",
    )
    return folder


def prepared(folder: Path, **options) -> PreparedData:
    return prepare_data(DataConfig(dataset_config=str(folder / "set.toml"), **options), 8)


@pytest.fixture(scope="module")
def report(invalid_files) -> str:
    with pytest.raises(ConfigError) as caught:
        prepared(invalid_files)
    return "\n".join(format_lines(caught.value.problems))


def is_invalid_here(bad: InvalidFile) -> bool:
    """Whether the file is unreadable for this user: root reads everything."""
    return bad.name != "locked.png" or os.geteuid() != 0


@pytest.mark.parametrize("bad", FILES, ids=lambda bad: bad.name)
def test_every_invalid_file_is_reported_with_a_fix(invalid_files, report, bad):
    if not is_invalid_here(bad):
        pytest.skip("root can read every file")
    (line,) = [line for line in report.splitlines() if line.startswith(f"{invalid_files}/a/{bad.name}: ")]
    assert bad.problem in line and bad.fix in line


@pytest.mark.parametrize(("number", "problem"), enumerate((problem for _, problem in ENTRIES), start=2))
def test_every_invalid_entry_is_reported_with_its_line(invalid_files, report, number, problem):
    assert f"{invalid_files}/m/m.jsonl:{number}: {problem}" in report


def test_the_report_lists_nothing_else_and_ends_with_a_summary(invalid_files, report):
    bad = len([bad for bad in FILES if is_invalid_here(bad)]) + len(ENTRIES)
    assert bad >= 45
    lines = report.splitlines()
    assert len(lines) == bad + 1
    assert lines[-1] == (
        f"{bad} of {len(FILES) + len(GOOD) + len(ENTRIES) + 1} images cannot be used; fix or remove"
        " them, or skip them with --on_invalid_images skip"
    )
    assert not any(name in report for name in GOOD)


def test_with_skip_the_valid_images_remain(invalid_files, report):
    left = prepared(invalid_files, on_invalid_images="skip")
    locked = [f"a/{bad.name}" for bad in FILES if not is_invalid_here(bad)]
    assert sorted(sample.key for sample in left.manifest.samples) == sorted(
        [*(f"a/{name}" for name in GOOD), "m/m.png", *locked]
    )
    lines = left.manifest.notes[-1].splitlines()
    assert [line.strip() for line in lines[1:]] == report.splitlines()[:-1]
    assert lines[0].startswith(f"{len(lines) - 1} images skipped (1")
    assert "19 not an image, 9 caption, 8 truncated, " in lines[0]


@pytest.mark.parametrize("kind", ["WEBP", "JPEG2000"])
def test_a_file_shorter_than_its_header_says_is_truncated(kind):
    """Their decoders do not check in every version of Pillow."""
    assert is_truncated(encoded(kind)[:-1]) and not is_truncated(encoded(kind)) and not is_truncated(half("PNG"))


def test_a_second_scan_reports_the_same(invalid_files, report):
    with pytest.raises(ConfigError) as caught:
        prepared(invalid_files)
    assert "\n".join(format_lines(caught.value.problems)) == report


def test_hundreds_of_invalid_files_are_counted_and_listed_in_a_file(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(101):
        (tmp_path / "a" / f"{number:03}.png").write_bytes(half("PNG") if number % 3 else b"")
    (tmp_path / "set.toml").write_text(
        f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{tmp_path}/a'"
    )
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path)
    *lines, end = format_lines(caught.value.problems)
    assert (
        lines[5] == "... and 29 more like the last (empty)"
        and lines[11].startswith("... and 62 more")
        and len(lines) == 12
    )
    path = tmp_path / "a" / ".cache-lorikeet" / "scan" / "report.txt"
    assert end.endswith(f" (67 truncated, 34 empty); full list in {path}")
    assert [line.partition(": ")[0] for line in path.read_text().splitlines()] == [
        f"{tmp_path}/a/{number:03}.png" for number in range(101)
    ]
    with pytest.raises(ConfigError, match="no images left to train on"):
        prepared(tmp_path, on_invalid_images="skip")


SETTINGS = """
[general]
random_crop = "yes"                                # expected true or false
enable_buckets = true                              # unknown key; did you mean enable_bucket?
shuffle_caption = 1                                # expected true or false, got 1
image_dir = "nowhere"                              # belongs in [[datasets.subsets]], not in [general]
prior_loss_weight = 0.5                            # set it for the run: --prior_loss_weight
skip_corrupted_cache = true                        # not supported yet: this key of musubi-tuner
keep_tokens = -1                                   # must be at least 0, got -1
[[datasets]]                                       # subsets of different types in one dataset
resolution = [512, 512, 512]                       # expected
batch_size = "2"                                   # write 2 without quotes
train_batch_size = 2                               # in dataset files it is called batch_size
min_bucket_reso = 0                                # must be at least 1, got 0
bucket_mode = "square"                             # is not one of kohya, symmetric
enable_bucket = "true"                             # write true without quotes
network_multiplier = 0                             # 0 trains nothing
validation_split = 1.5                             # must be at most 1, got 1.5
  [[datasets.subsets]]
  image_dir = "images/nothing"                        # 'images/nothing' not found
  caption_dropout_rate = 2                         # must be at most 1, got 2.0
  caption_separator = ""                           # must not be empty; the default is ','
  num_repeat = 10                                  # unknown key; did you mean num_repeats?
  resize_interpolation = "cubic spline"            # is not one of
  [[datasets.subsets]]                             # image_dir: missing; set the folder of images
  num_repeats = 0                                  # must be at least 1, got 0
  [[datasets.subsets]]
  metadata_file = "images/none.json"                  # 'images/none.json' not found
  class_tokens = "x"                               # not supported with metadata_file
[[datasets]]                                       # no [[datasets.subsets]]; add one
resolution = 512
[[datasets]]                                       # all subsets are regularization images (is_reg); add
resolution = 512
enable_bucket = true
min_bucket_reso = 1024                             # is above
bucket_max_crop = 1.5                              # must be at most 1
  [[datasets.subsets]]
  image_dir = "images"
  is_reg = true
  [[datasets.subsets]]
  image_dir = "./images"                              # is already set in
  is_reg = true
[[datasets]]                                       # resolution: missing
[[datasets.subsets]]
image_dir = "images"
[model]                                            # unknown table; expected [general] or [[datasets]]
"""
"""Each comment is part of the message about its line."""


def test_every_invalid_setting_is_reported_with_its_line_in_one_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "set.toml").write_text(SETTINGS, encoding="utf-8")
    actual = format_lines(validate_dataset_config(DataConfig(dataset_config="set.toml")))
    expected = {
        f"set.toml:{number}: ": line.rpartition("  # ")[2].strip()
        for number, line in enumerate(SETTINGS.splitlines(), start=1)
        if "  # " in line
    }
    assert len(expected) >= 30
    for place, problem in expected.items():
        lines = [line for line in actual if line.startswith(place)]
        assert any(problem in line for line in lines), (place, problem, lines)
    assert [line for line in actual if not any(line.startswith(place) for place in expected)] == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("[[datasets]]\nresolution = 64\n", ["set.toml:1: no [[datasets.subsets]]; add one with image_dir = 'FOLDER'"]),
        (
            "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '.'\nis_reg = true\n",
            ["set.toml:1: all subsets are regularization images (is_reg); add a subset of images to train on"],
        ),
    ],
)
def test_a_dataset_without_images_to_train_on_is_one_problem(text, problems, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set.toml").write_text(text)
    config = DataConfig(dataset_config="set.toml")
    assert format_lines(validate_dataset_config(config, train=TrainConfig(max_train_steps=9))) == problems


def odd(folder: Path) -> None:
    """Write usable images that lead to notes."""
    image = Image.fromarray(NOISE)
    files = {
        "twin_1.png": encoded("PNG"),
        "twin_2.png": encoded("PNG"),
        "same.png": encoded("PNG", image.rotate(180)),
        "same.jpg": encoded("JPEG", image.rotate(180)),
        "glass.png": encoded("PNG", Image.merge("RGBA", (*image.split(), image.getchannel(0)))),
        "opaque.png": encoded("PNG", image.convert("RGBA")),
        "print.jpg": encoded("JPEG", image.convert("CMYK")),
        "deep.png": encoded("PNG", Image.fromarray(NOISE[..., 0].astype(np.uint16) * 257)),
        "deep_colors.png": encode_png(80, 70, bits=16, rows=(b"\0" + bytes(range(240)) * 2) * 70),
        "few.png": encoded("PNG", image.convert("P")),
        "moving.png": encoded("PNG", save_all=True, append_images=[image.rotate(90)]),
        "stereo.jpg": encoded("MPO", save_all=True, append_images=[image.rotate(90)]),
        "tiny.png": encoded("PNG", image.resize((20, 18))),
        "narrow.png": encoded("PNG", image.resize((900, 70))),
        "turned.jpg": encoded("JPEG", image, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"),
        "spoilt.jpg": encoded("JPEG", image, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\1\x12"),
        "left.heic": box(b"heic"),
        "left.tif": encoded("TIFF"),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
        if name.endswith(("png", "jpg")):
            (folder / name).with_suffix(".txt").write_text(name, encoding="utf-8")
    (folder / "circle").symlink_to(folder)


@pytest.fixture
def oddities(tmp_path) -> Path:
    (tmp_path / "a").mkdir()
    odd(tmp_path / "a")
    (tmp_path / "set.toml").write_text(
        "[[datasets]]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 32\nmax_bucket_reso = 128\n"
        "bucket_reso_steps = 8\n"
        f"[[datasets.subsets]]\nimage_dir = '{tmp_path}/a'\ncaption_extension = '.txt'\n",
        encoding="utf-8",
    )
    return tmp_path


def test_unusual_but_usable_images_are_noted(oddities):
    manifest = prepared(oddities).manifest
    assert len(manifest.samples) == 16
    assert {sample.key: sample.size for sample in manifest.samples}["a/turned.jpg"] == (70, 80)
    assert [note.replace(f"{oddities}/", "") for note in manifest.notes] == [
        "a: images in subfolders are not used; set recursive = true to use them: circle/",
        "a: 2 files in unsupported formats ignored; convert to PNG or JPEG: left.heic, left.tif",
        "1 caption file shared by images whose names differ only in the extension: same.jpg and same.png",
        "dataset 1: 1 image identical to another image: a/twin_2.png = a/twin_1.png",
        "1 image with transparent parts, which are trained as white: a/glass.png",
        "1 image in CMYK, converted to RGB without their color profile; convert them yourself for exact colors:"
        " a/print.jpg",
        "2 images with 16 bits per channel, of which 8 are used: a/deep.png, a/deep_colors.png",
        "1 image with a color palette, converted to RGB: a/few.png",
        "1 image with several frames, of which only the first is used: a/moving.png",
        "1 small image upscaled 2 times or more, and blurred by that: a/tiny.png (20x18, 3.55 times)",
        "dataset 1: cropping takes a third or more of 1 image; crop them yourself: a/narrow.png (900x70, 69%)",
    ]
    second = prepared(oddities).manifest
    assert second.notes == manifest.notes and second.samples == manifest.samples


def test_names_that_are_not_shown_are_written_to_a_file(oddities):
    for number in range(4):
        (oddities / "a" / f"more_{number}.png").write_bytes(encoded("PNG"))
    notes = prepared(oddities).manifest.notes
    path = oddities / "a" / ".cache-lorikeet" / "scan" / "report.txt"
    assert notes[-1] == f"not all names are listed above; full list in {path}"
    assert any("5 images identical to" in note and note.endswith(", ...") for note in notes)
    assert "  a/twin_2.png = a/more_0.png" in path.read_text().splitlines()


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_avif_is_read_where_pillow_reads_it(oddities):
    (oddities / "a" / "new.avif").write_bytes(encoded("AVIF"))
    (oddities / "a" / "cut.avif").write_bytes(half("AVIF"))
    prepared_ = prepared(oddities, on_invalid_images="skip")
    assert "a/new.avif" in {sample.key for sample in prepared_.manifest.samples}
    assert "cut.avif: is a damaged AVIF" in prepared_.manifest.notes[-1]


def test_pillow_warnings_as_errors_do_not_stop_the_scan(oddities, monkeypatch, recwarn):
    """About damaged EXIF data and an image with more pixels than ``MAX_IMAGE_PIXELS``."""
    import warnings

    warnings.simplefilter("error")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    assert len(prepared(oddities).manifest.samples) == 16


def test_an_invalid_file_of_two_datasets_is_reported_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bad.png").write_bytes(half("PNG"))
    (tmp_path / "a" / "good.png").write_bytes(encoded("PNG"))
    table = "[[datasets]]\nresolution = {}\n[[datasets.subsets]]\nimage_dir = '" + f"{tmp_path}/a'\n"
    (tmp_path / "set.toml").write_text(table.format(64) + table.format(128), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path)
    assert len(caught.value.problems) == 2 and format_lines(caught.value.problems)[1].startswith(
        "2 of 4 images cannot be used;"
    )
    assert [sample.dataset_index for sample in prepared(tmp_path, on_invalid_images="skip").manifest.samples] == [0, 1]
