"""Color augmentation: its range, its probability, and reproducible differences between epochs and repeats."""

import colorsys
import random

import numpy as np
import pytest
from PIL import Image

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.augment import MAX_GAMMA_CHANGE, MAX_HUE_SHIFT, adjust_gamma, adjust_hue, augment_color
from library.dataloader.loader import MicroBatchDataset
from library.dataloader.prepare import prepare_data


def every_kind(count: int = 4000) -> np.ndarray:
    """Random colors, all gray levels, and the edges of the color cube."""
    draw = np.random.default_rng(0)
    corners = np.array([[a, b, c] for a in (0, 128, 255) for b in (0, 128, 255) for c in (0, 128, 255)], np.uint8)
    grays = np.arange(256, dtype=np.uint8)[:, None].repeat(3, axis=1)
    return np.concatenate([draw.integers(0, 256, (count, 3), np.uint8), corners, grays])[None]


def test_a_hue_shift_of_zero_changes_nothing():
    assert (adjust_hue(every_kind(), 0.0) == every_kind()).all()


@pytest.mark.parametrize("turn", [MAX_HUE_SHIFT, -MAX_HUE_SHIFT, 0.01, 0.5, -0.9])
def test_hue_shifts_are_equal_to_colorsys(turn):
    pixels = every_kind(500)
    expected = []
    for red, green, blue in pixels[0] / 255:
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        expected.append([255 * part for part in colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)])
    actual = adjust_hue(pixels, turn)
    assert actual.dtype == np.uint8 and np.abs(actual[0] - np.array(expected)).max() <= 0.51
    assert (actual.max(axis=2) == pixels.max(axis=2)).all() and (actual.min(axis=2) == pixels.min(axis=2)).all()


def test_gamma_preserves_black_white_and_order():
    every = np.arange(256, dtype=np.uint8)[None, :, None].repeat(3, axis=2)
    dark, light = adjust_gamma(every, 1 + MAX_GAMMA_CHANGE), adjust_gamma(every, 1 - MAX_GAMMA_CHANGE)
    assert (adjust_gamma(every, 1.0) == every).all()
    for actual in (dark, light):
        assert actual[0, 0, 0] == 0 and actual[0, 255, 0] == 255 and (np.diff(actual[0, :, 0].astype(int)) >= 0).all()
    assert (dark <= every).all() and (light >= every).all()
    assert 1 <= np.abs(dark.astype(int) - every).max() <= 6
    assert light[0, 100, 0] == round(255 * (100 / 255) ** 0.95)


def test_a_third_of_the_views_is_augmented_half_in_hue_and_half_in_brightness():
    gray = np.full((1, 1, 3), 128, np.uint8)  # gray has no hue
    red = np.array([[[255, 0, 0]]], np.uint8)  # gamma does not change black and white
    draws = range(3000)
    in_brightness = sum(bool((augment_color(gray, random.Random(seed)) != gray).any()) for seed in draws)
    in_hue = sum(bool((augment_color(red, random.Random(seed)) != red).any()) for seed in draws)
    assert 0.15 < in_hue / 3000 < 0.18
    assert 0.1 < in_brightness / 3000 < 0.18  # the smallest changes are rounded away
    greens = [int(augment_color(red, random.Random(seed))[0, 0, 1]) for seed in draws]
    blues = [int(augment_color(red, random.Random(seed))[0, 0, 2]) for seed in draws]
    limit = round(255 * 6 * MAX_HUE_SHIFT)  # 16 degrees
    assert max(greens) in (limit, limit - 1) and max(blues) in (limit, limit - 1)


def test_color_augmentation_differs_between_epochs_and_repeats_and_is_reproducible(tmp_path):
    (tmp_path / "a").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    text = "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'a'\nflip_aug = true\n"
    (tmp_path / "set.toml").write_text(text)
    readers = []
    for is_on in (True, False):
        prepared = prepare_data(DataConfig(dataset_config=str(tmp_path / "set.toml"), color_aug=is_on), 8)
        plan = prepared.build_batch_plan(1, TrainConfig())
        readers.append(MicroBatchDataset(prepared.manifest, prepared.assignments, plan, 0, 3, 100))
    with_colors, without = readers
    for place in (lambda n: (n, 0), lambda n: (0, n)):
        shown = [with_colors.load_image(place(n)[0], 0, place(n)[1]).pixels for n in range(60)]
        plain = [without.load_image(place(n)[0], 0, place(n)[1]).pixels for n in range(60)]
        second = [with_colors.load_image(place(n)[0], 0, place(n)[1]).pixels for n in range(60)]
        assert all((one == other).all() for one, other in zip(shown, second, strict=True))
        changed = [n for n in range(60) if (shown[n] != plain[n]).any()]
        assert 8 < len(changed) < 32 and len({shown[n].tobytes() for n in changed}) > len(changed) - 3
        mirrored = sum(bool((one != pixels).any()) for one in plain)
        assert 15 < mirrored < 45  # color augmentation does not change other random numbers
