"""``color_aug``: one time in three, a small turn of all hues or a small change of brightness, as sd-scripts has it."""

import random

import numpy as np
from numpy.typing import NDArray

from .images import Pixels

COLOR_AUG_PROBABILITY = 0.33
MAX_HUE_SHIFT = 8 / 180
"""As a part of the circle; OpenCV, which sd-scripts uses here, cuts it into 180."""
MAX_GAMMA_CHANGE = 0.05


def augment_color(pixels: Pixels, rng: random.Random) -> Pixels:
    """The picture, or a variation of it: hue or gamma, each in half of the cases."""
    if rng.random() >= COLOR_AUG_PROBABILITY:
        return pixels
    if rng.random() < 0.5:
        return adjust_hue(pixels, rng.uniform(-MAX_HUE_SHIFT, MAX_HUE_SHIFT))
    return adjust_gamma(pixels, rng.uniform(1 - MAX_GAMMA_CHANGE, 1 + MAX_GAMMA_CHANGE))


def adjust_hue(pixels: Pixels, shift: float) -> Pixels:
    """All hues turned by a part of the circle; saturation and value (the largest of red, green and blue) stay."""
    values = pixels.astype(np.float32)
    red, green, blue = values[..., 0], values[..., 1], values[..., 2]
    value = values.max(axis=2)
    chroma = value - values.min(axis=2)
    safe = np.where(chroma == 0, 1, chroma)
    sector = np.where(value == red, (green - blue) / safe % 6,
                      np.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4))  # fmt: skip
    sector = sector + np.float32(shift * 6)
    channels = [value - chroma * _compute_missing_chroma((sector + start) % 6) for start in (5, 3, 1)]
    turned: Pixels = np.rint(np.stack(channels, axis=2)).astype(np.uint8)
    return turned


def _compute_missing_chroma(sector: NDArray[np.float32]) -> NDArray[np.float32]:
    """How much of its chroma a channel lacks at a place on the circle of six sectors."""
    lack: NDArray[np.float32] = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return lack


def adjust_gamma(pixels: Pixels, gamma: float) -> Pixels:
    """Black and white stay; a ``gamma`` above 1 makes what lies between darker."""
    table = np.rint(255 * (np.arange(256) / 255) ** gamma).astype(np.uint8)
    return np.take(table, pixels)
