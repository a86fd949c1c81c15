"""The contact sheet shows every bucket in order, its most cropped images first, within the width of the sheet."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from library.dataloader.buckets import BucketAssignment
from library.dataloader.contact_sheet import (
    MARGIN,
    MASK_COLOR,
    MASK_OPACITY,
    MAX_IMAGES,
    MAX_THUMBNAIL_SIDE,
    MIN_CELL_WIDTH,
    SHEET_WIDTH,
    build_cells,
    compute_thumbnail_size,
    overlay_mask,
    place_cells,
    save_contact_sheet,
)
from library.dataloader.summary import BucketSummary
from library.errors import UserError


def bucket(size: tuple[int, int], samples: range, dataset: int = 0) -> BucketSummary:
    return BucketSummary(dataset, size, tuple(samples), len(samples), 1, 1, 0, 0, 0.0, samples[0], 0.0)


@st.composite
def buckets(draw) -> list[BucketSummary]:
    sizes = st.tuples(st.sampled_from([64, 256, 512, 832, 2048]), st.sampled_from([32, 64, 512, 1024]))
    actual, first = [], 0
    for size in draw(st.lists(sizes, min_size=1, max_size=9, unique=True)):
        count = draw(st.integers(1, 30))
        actual.append(bucket(size, range(first, first + count), len(actual) % 2))
        first += count
    return actual


def build_assignments(summaries: list[BucketSummary], losses: list[int]) -> list[BucketAssignment]:
    count = sum(len(item.sample_indices) for item in summaries)
    return [BucketAssignment((100, 100), (100 + losses[index % len(losses)], 100), (0, 0)) for index in range(count)]


@given(buckets(), st.lists(st.integers(0, 90), min_size=1, max_size=20), st.integers(1, 15))
def test_every_bucket_shows_its_most_cropped_images_once_and_fits_on_the_sheet(actual, losses, limit):
    assignments = build_assignments(actual, losses)
    cells = build_cells(actual, assignments, limit)
    corners, (width, height) = place_cells(cells)
    shown: dict[BucketSummary, list[int]] = {item: [] for item in actual}
    boxes = []
    for cell, (x, y) in zip(cells, corners, strict=True):
        assert cell.is_first == (not shown[cell.summary]) and cell.size[0] >= MIN_CELL_WIDTH
        boxes.append((x, y, x + cell.size[0], y + cell.size[1]))
        shown[cell.summary].append(cell.sample_index)
    assert all(x >= MARGIN and right <= width - MARGIN and bottom <= height - MARGIN for x, _, right, bottom in boxes)
    assert width <= SHEET_WIDTH
    for number, (x, y, right, bottom) in enumerate(boxes):
        assert all(right <= a or c <= x or bottom <= b or d <= y for a, b, c, d in boxes[number + 1 :]), "overlap"
    for item in actual:
        assert len(shown[item]) == min(limit, len(item.sample_indices)) == len(set(shown[item]))
        left_out = set(item.sample_indices) - set(shown[item])
        loss = [assignments[index].cropped_fraction for index in shown[item]]
        assert all(first >= second for first, second in pairwise(loss))
        assert all(assignments[index].cropped_fraction <= loss[-1] for index in left_out)


def test_a_sheet_of_many_buckets_shows_fewer_of_each():
    many = [bucket((64 + 8 * number, 64), range(number * 20, number * 20 + 20)) for number in range(100)]
    cells = build_cells(many, build_assignments(many, [3]), max_per_bucket=12)
    assert sum(cell.is_first for cell in cells) == 100 and {cell.num_shown for cell in cells} == {MAX_IMAGES // 100}
    more = [bucket((64 + 8 * number, 64), range(number, number + 1)) for number in range(MAX_IMAGES + 5)]
    assert len(build_cells(more, build_assignments(more, [3]), max_per_bucket=12)) == MAX_IMAGES


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((64, 64), (192, 192)),
        ((1024, 1024), (200, 200)),
        ((1344, 768), (265, 151)),
        ((4096, 64), (MAX_THUMBNAIL_SIDE, 7)),
    ],
)
def test_thumbnails_have_about_one_area_and_are_enlarged_by_whole_numbers(size, expected):
    assert compute_thumbnail_size(size) == expected


def test_masked_out_pixels_are_covered_and_others_are_unchanged():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    mask = np.array([[255, 255, 255, 128, 0, 0]] * 4, np.uint8)
    actual = overlay_mask(pixels, mask)
    assert (actual[:, :3] == pixels[:, :3]).all()
    expected = pixels[:, 4:] * (1 - MASK_OPACITY) + np.array(MASK_COLOR) * MASK_OPACITY
    assert np.abs(actual[:, 4:] - expected).max() <= 0.51
    half = MASK_OPACITY * 127 / 255
    assert np.abs(actual[:, 3] - (pixels[:, 3] * (1 - half) + np.array(MASK_COLOR) * half)).max() <= 0.51


def test_a_sheet_is_written_atomically(tmp_path):
    sheet = Image.new("RGB", (20, 10), (9, 8, 7))
    save_contact_sheet(sheet, tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").size == (20, 10)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match=r"--preview: .*folder.png cannot be written"):
        save_contact_sheet(sheet, tmp_path / "folder.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png", "sheet.png"]
