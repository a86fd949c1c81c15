"""The preview grid of a run: which previews it has, in which order and position."""

import itertools
import os
from pathlib import Path

import pytest
from PIL import Image

from library.dataset.clip_encoding import encode_webp
from library.report import preview_grid


def save_preview(
    folder: Path, when: str, index: int, color: str, size=(64, 64), *, at: float, name="mine", seed=7
) -> Path:
    path = folder / f"{name}_{when}_{index:02d}_20260102030405_{seed}.png"
    Image.new("RGB", size, color).save(path)
    os.utime(path, (at, at))
    return path


def test_rows_are_prompts_and_columns_are_steps_in_order(tmp_path):
    for index in (1, 0):
        save_preview(tmp_path, "e000002", index, "blue", at=300 + index)
        save_preview(tmp_path, "000000", index, "red", at=100 + index)
        save_preview(tmp_path, "e000001", index, "green", at=200 + index)

    rows = preview_grid.find_preview_files(tmp_path, "mine", 0)

    assert {index: list(row) for index, row in rows.items()} == {
        0: ["000000", "e000001", "e000002"],
        1: ["000000", "e000001", "e000002"],
    }


def test_previews_of_other_runs_are_ignored(tmp_path):
    own_preview = save_preview(tmp_path, "000010", 0, "red", at=200)
    save_preview(tmp_path, "000000", 0, "red", at=100)
    save_preview(tmp_path, "000010", 1, "red", at=200, name="mine_too")
    save_preview(tmp_path, "000010", 2, "red", at=200, name="not_mine")
    (tmp_path / "mine_000010_03.png").write_bytes(b"")

    assert preview_grid.find_preview_files(tmp_path, "mine", 150) == {0: {"000010": own_preview}}


def test_the_grid_shows_every_image_in_its_cell(tmp_path):
    colors = {("000000", 0): "red", ("000050", 0): "lime", ("000000", 1): "blue", ("000050", 1): "yellow"}
    for (when, index), color in colors.items():
        save_preview(tmp_path, when, index, color, (128, 64) if index else (64, 96), at=int(when) + 100)

    texts = ["one text for two prompts", "one text for two prompts"]
    path = preview_grid.write_preview_grid(tmp_path, "mine", texts, 0, tmp_path / "out" / "sheet.png")

    assert path == tmp_path / "out" / "sheet.png"
    with Image.open(path) as sheet:
        pixels = {sheet.getpixel((x, y)) for x in range(0, sheet.width, 5) for y in range(0, sheet.height, 5)}
        boxes = {color: find_box(sheet, color) for color in colors.values()}
    assert {(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), preview_grid.BACKGROUND} <= pixels
    assert boxes["red"][2] <= boxes["lime"][0] and boxes["blue"][2] <= boxes["yellow"][0], "steps from left to right"
    assert boxes["red"][3] <= boxes["blue"][1], "prompts from top to bottom"
    for color, shape in (("red", 64 / 96), ("yellow", 2.0)):
        left, top, right, bottom = boxes[color]
        assert (right - left) / (bottom - top) == pytest.approx(shape, rel=0.02), "not distorted"


def test_of_a_clip_the_grid_shows_the_first_frame_the_middle_one_and_the_last_one(tmp_path):
    frames = [Image.new("RGB", (64, 32), color) for color in ("red", "black", "lime", "black", "blue")]
    for when, at in (("000000", 100), ("000010", 110)):
        path = tmp_path / f"mine_{when}_00_20260102030405_7.webp"
        path.write_bytes(encode_webp(frames, 16, 100))
        path.with_suffix(".mp4").write_bytes(b"the same as a video")
        os.utime(path, (at, at))
    (row,) = preview_grid.find_preview_files(tmp_path, "mine", 0).values()
    assert [path.suffix for path in row.values()] == [".webp", ".webp"]
    sheet = Image.open(preview_grid.write_preview_grid(tmp_path, "mine", ["walks"], 0, tmp_path / "sheet.png"))
    colors = [
        name
        for name in map(name_color, (sheet.getpixel((x, sheet.height // 2 + 15)) for x in range(200, sheet.width)))
        if name
    ]
    assert [name for name, _ in itertools.groupby(colors)] == ["red", "lime", "blue"] * 2


def test_a_file_that_cannot_be_read_is_named_and_its_cell_stays_empty(tmp_path, caplog):
    whole = save_preview(tmp_path, "000000", 0, "red", at=100)
    broken = save_preview(tmp_path, "000010", 0, "lime", at=110)
    clips = [tmp_path / f"mine_{when}_01_20260102030405_7.webp" for when in ("000000", "000010")]
    frames = [Image.new("RGB", (64, 32), color) for color in ("blue", "black", "blue")]
    for clip in clips:
        clip.write_bytes(encode_webp(frames, 16, 100))
    broken.write_bytes(whole.read_bytes()[:60])
    clips[1].write_bytes(clips[1].read_bytes()[:-20])
    for path, at in ((broken, 110), (clips[0], 101), (clips[1], 111)):
        os.utime(path, (at, at))

    sheet = Image.open(preview_grid.write_preview_grid(tmp_path, "mine", ["a", "b"], 0, tmp_path / "sheet.png"))

    pixels = {name_color(sheet.getpixel((x, y))) for x in range(200, sheet.width, 5) for y in range(0, sheet.height, 5)}
    assert {"red", "blue"} <= pixels and "lime" not in pixels
    texts = [record.getMessage().split(": ")[0] for record in caplog.records]
    assert texts == [str(broken), str(clips[1])]


def name_color(pixel) -> str:
    """Name a color as it is after lossy compression."""
    names = {(255, 0, 0): "red", (0, 255, 0): "lime", (0, 0, 255): "blue", (0, 0, 0): "black"}
    near = [name for color, name in names.items() if max(abs(a - b) for a, b in zip(color, pixel, strict=True)) < 40]
    return near[0] if near else ""


def find_box(sheet: Image.Image, color: str) -> tuple[int, int, int, int]:
    flat = Image.new("RGB", sheet.size, color)
    differs = [band.point(lambda value: 255 * (value > 0)) for band in _measure_difference(sheet, flat)]
    same = Image.merge("RGB", differs).convert("L").point(lambda value: 255 * (value == 0))
    return same.getbbox()


def _measure_difference(a: Image.Image, b: Image.Image) -> tuple[Image.Image, ...]:
    from PIL import ImageChops

    return ImageChops.difference(a, b).split()


def test_of_many_columns_the_first_last_and_evenly_spaced_ones_are_shown():
    times = [f"{step:06d}" for step in range(0, 1100, 100)]

    assert preview_grid.select_evenly_spaced(times, 6) == ["000000", "000200", "000400", "000600", "000800", "001000"]
    assert preview_grid.select_evenly_spaced(times[:3], 6) == times[:3]


def test_fewer_than_two_columns_give_no_grid(tmp_path):
    save_preview(tmp_path, "000010", 0, "red", at=200)

    assert preview_grid.write_preview_grid(tmp_path, "mine", ["one"], 0, tmp_path / "sheet.png") is None
    assert not (tmp_path / "sheet.png").exists()
