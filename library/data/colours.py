"""``color_aug``: one time in three, a small turn of all hues or a small change of brightness, as sd-scripts has it."""

import random

import numpy as np
from numpy.typing import NDArray

from .images import Pixels

SHARE = 0.33
HUE = 8 / 180
"""As a part of the circle; OpenCV, which sd-scripts uses here, cuts it into 180."""
GAMMA = 0.05


def varied(pixels: Pixels, draw: random.Random) -> Pixels:
    """The picture, or a variation of it: hue or gamma, each in half of the cases."""
    if draw.random() >= SHARE:
        return pixels
    if draw.random() < 0.5:
        return hue_turned(pixels, draw.uniform(-HUE, HUE))
    return with_gamma(pixels, draw.uniform(1 - GAMMA, 1 + GAMMA))


def hue_turned(pixels: Pixels, turn: float) -> Pixels:
    """All hues turned by a part of the circle; saturation and value (the largest of red, green and blue) stay."""
    values = pixels.astype(np.float32)
    red, green, blue = values[..., 0], values[..., 1], values[..., 2]
    value = values.max(axis=2)
    chroma = value - values.min(axis=2)
    safe = np.where(chroma == 0, 1, chroma)
    sector = np.where(value == red, (green - blue) / safe % 6,
                      np.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4))  # fmt: skip
    sector = sector + np.float32(turn * 6)
    channels = [value - chroma * _distance((sector + start) % 6) for start in (5, 3, 1)]
    turned: Pixels = np.rint(np.stack(channels, axis=2)).astype(np.uint8)
    return turned


def _distance(place: NDArray[np.float32]) -> NDArray[np.float32]:
    """How much of its chroma a channel lacks at a place on the circle of six sectors."""
    lack: NDArray[np.float32] = np.clip(np.minimum(place, 4 - place), 0, 1)
    return lack


def with_gamma(pixels: Pixels, gamma: float) -> Pixels:
    """Black and white stay; a ``gamma`` above 1 makes what lies between darker."""
    table = np.rint(255 * (np.arange(256) / 255) ** gamma).astype(np.uint8)
    return np.take(table, pixels)
