"""Condition images made from the picture itself: edges, a picture with a hole, without colours, or blurred."""

import random

import numpy as np
from numpy.typing import NDArray

from ..dataset.image_inspection import Pixels

CANNY_THRESHOLDS = 100, 200
"""Gradients above the first are edges where they are connected to one above the second, as OminiControl has them."""

MAX_BLUR_RADIUS = 10


def make_condition(kind: str, pixels: Pixels, rng: random.Random) -> Pixels:
    """Make the condition image of a picture; holes and blur are drawn from ``rng``."""
    if kind == "canny":
        return np.repeat(detect_edges(pixels)[..., None], 3, axis=2)
    if kind == "colorization":
        return _remove_color(pixels)
    if kind == "deblurring":
        return _blur(pixels, rng.randint(1, MAX_BLUR_RADIUS))
    if kind == "inpainting":
        return _cut_hole(pixels, rng)
    raise AssertionError(f"unknown condition {kind}")


def _remove_color(pixels: Pixels) -> Pixels:
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L").convert("RGB"))


def _blur(pixels: Pixels, radius: int) -> Pixels:
    from PIL import Image, ImageFilter

    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))


def _cut_hole(pixels: Pixels, rng: random.Random) -> Pixels:
    """Blacken a random rectangle, or all but it; half of the pictures each."""
    height, width = pixels.shape[:2]
    left, right = sorted(rng.randint(0, width) for _ in range(2))
    top, bottom = sorted(rng.randint(0, height) for _ in range(2))
    is_kept = np.full((height, width, 1), rng.random() < 0.5)
    is_kept[top:bottom, left:right] ^= True
    return np.where(is_kept, pixels, np.uint8(0))


def detect_edges(pixels: Pixels) -> NDArray[np.uint8]:
    """Detect edges (0 or 255) with Canny's method: Sobel gradients of the strongest channel, thinned and connected."""
    values = np.pad(pixels.astype(np.int32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    columns, rows = values[:, 2:] - values[:, :-2], values[2:] - values[:-2]
    horizontal = columns[:-2] + 2 * columns[1:-1] + columns[2:]
    vertical = rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]
    strongest = (np.abs(horizontal) + np.abs(vertical)).argmax(axis=2)[..., None]
    horizontal, vertical = (np.take_along_axis(part, strongest, 2)[..., 0] for part in (horizontal, vertical))
    magnitude = np.abs(horizontal) + np.abs(vertical)
    low, high = CANNY_THRESHOLDS
    candidates = _thin_edges(horizontal, vertical, magnitude) & (magnitude > low)
    return (_connect_edges(candidates, magnitude > high) * 255).astype(np.uint8)


def _thin_edges(
    horizontal: NDArray[np.int32], vertical: NDArray[np.int32], magnitude: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Keep the pixels whose gradient is the largest along its direction, of four directions."""
    height, width = magnitude.shape
    padded = np.pad(magnitude, 1)

    def shift(down: int, right: int) -> NDArray[np.int32]:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    slope = np.abs(vertical) / np.maximum(np.abs(horizontal), 1e-9)
    flat, steep = slope < np.tan(np.pi / 8), slope > np.tan(3 * np.pi / 8)
    falling = (horizontal ^ vertical) >= 0  # both gradients have one sign
    one_side = np.select([flat, steep, falling], [shift(0, -1), shift(-1, 0), shift(-1, -1)], shift(-1, 1))
    other_side = np.select([flat, steep, falling], [shift(0, 1), shift(1, 0), shift(1, 1)], shift(1, -1))
    return (magnitude > one_side) & (magnitude >= other_side)


def _connect_edges(candidates: NDArray[np.bool_], strong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Keep the connected groups of candidates that contain a strong one."""
    numbers = np.full(np.add(candidates.shape, 2), -1)
    inner = numbers[1:-1, 1:-1]
    inner[candidates] = np.arange(candidates.sum())
    height, width = candidates.shape
    pairs = []
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):
        neighbors = numbers[1 + down : 1 + down + height, 1 + right : 1 + right + width]
        linked = (inner >= 0) & (neighbors >= 0)
        pairs.append((inner[linked], neighbors[linked]))
    first, second = (np.concatenate(each) for each in zip(*pairs, strict=True))
    groups = np.arange(candidates.sum())
    while True:  # each round joins neighbouring groups and follows the links to their smallest member
        lower = np.minimum(groups[first], groups[second])
        joined = groups.copy()
        for members in (groups[first], groups[second], first, second):
            np.minimum.at(joined, members, lower)
        joined = joined[joined]
        if np.array_equal(joined, groups):
            break
        groups = joined
    has_strong = np.zeros(len(groups), bool)
    has_strong[groups[strong[candidates]]] = True
    kept = np.zeros_like(candidates)
    kept[candidates] = has_strong[groups]
    return kept
