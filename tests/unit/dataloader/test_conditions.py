"""Condition images made from a picture: edges, holes, gray and blurred pictures."""

import random

import numpy as np
import pytest

from library.dataloader.augment import detect_edges, draw_mask, make_condition

RAMP = np.repeat(np.linspace(0, 255, 32).astype(np.uint8)[None, :, None], 24, axis=0)


def draw_square(contrast, size=32):
    pixels = np.full((size, size, 3), 40, np.uint8)
    pixels[8:24, 8:24, 1] += np.uint8(contrast)  # one channel: brightness changes less than the gradient
    return pixels


def test_the_edges_of_a_square_are_thin_closed_and_on_its_border():
    edges = detect_edges(draw_square(120)) == 255
    rows, columns = np.nonzero(edges)
    assert {rows.min(), columns.min()} <= {7, 8} and {rows.max(), columns.max()} <= {23, 24}
    assert not edges[10:22, 10:22].any()
    assert (edges.sum(0)[10:22] == 2).all() and (edges.sum(1)[10:22] == 2).all()  # one pixel on each side


def test_weak_edges_are_kept_where_they_are_connected_to_strong_ones():
    assert not detect_edges(draw_square(20)).any()  # below the first threshold
    weak = draw_square(30)
    assert not detect_edges(weak).any()  # between the two, and nowhere above the second
    weak[8:24, 8:16, 1] = 240  # the left half is strong
    edges = detect_edges(weak) == 255
    assert edges[8:24, 22:25].any(), "the weak right side is connected to the strong left half"


def test_pictures_without_edges_have_none():
    assert not detect_edges(np.full((8, 9, 3), 77, np.uint8)).any()
    assert not detect_edges(np.repeat(RAMP, 3, axis=2)).any()


@pytest.mark.parametrize("kind", ["canny", "colorization", "deblurring", "inpainting", "mask"])
def test_a_condition_is_drawn_by_its_generator_alone(kind):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    one, again = (make_condition(kind, pixels, random.Random(3)) for _ in range(2))
    assert one.shape == pixels.shape and one.dtype == np.uint8 and np.array_equal(one, again)
    drawn = {make_condition(kind, pixels, random.Random(seed)).tobytes() for seed in range(8)}
    assert (len(drawn) > 1) == (kind in ("deblurring", "inpainting", "mask"))


def test_holes_are_black_rectangles_and_the_rest_is_the_picture():
    pixels = np.full((24, 32, 3), 200, np.uint8)
    kept = [make_condition("inpainting", pixels, random.Random(seed))[..., 0] for seed in range(20)]
    assert all(set(np.unique(each)) <= {0, 200} for each in kept)
    holes = [each[0, 0] == 200 for each in kept]
    assert any(holes) and not all(holes)  # outside or inside of the rectangle


def test_masks_are_shapes_of_white_on_black_and_a_quarter_of_them_is_white_everywhere():
    masks = [draw_mask(48, 64, random.Random(seed)) for seed in range(400)]
    assert all(mask.shape == (48, 64, 3) and set(np.unique(mask)) <= {0, 255} for mask in masks)
    shares = np.array([mask.mean() / 255 for mask in masks])
    assert 0.18 < (shares == 1).mean() < 0.32
    assert (shares > 0).all() and 0.05 < np.median(shares[shares < 1]) < 0.6
    is_painted = np.mean([mask[..., 0] for mask, share in zip(masks, shares, strict=True) if share < 1], axis=0)
    assert is_painted.min() > 0, "no place is never covered"
