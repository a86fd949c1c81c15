"""A small embedding of pictures that needs no model: colors and edges, of the subject and of the whole picture.

It tells flat drawings such as those of the demo model apart.  It knows nothing of what a photo shows; for real models,
``--image_model`` names one that was trained for that.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .embedding_metrics import Array, normalize_embeddings

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE, GRID, BINS = 32, 4, 8
MIN_CONTRAST = 24
"""How much a pixel differs from the color of the border, of 255, to belong to the subject."""
POSITION_WEIGHT = 0.5
"""The weight of where in the picture the subject is, beside what it looks like."""


class FeatureEmbedder:
    """The embedding as an object, as the pictures of embedding models are computed."""

    name = "colors and edges (built in)"

    def embed_pictures(self, images: "Sequence[Image]") -> Array:
        """Compute one embedding for each picture."""
        return np.stack([compute_features(image) for image in images])


def compute_features(image: "Image") -> Array:
    """Compute colors and edges of the subject, cut out and scaled to one size, and a small view of the whole."""
    pixels = np.asarray(image.convert("RGB"), np.float64)
    subject = _resize(pixels[_find_subject(pixels)], SIDE)
    thumbnail = _resize(pixels, 12)
    parts = [
        (1.0, _center(_resize(subject.astype(np.float64), 10))),
        (1.0, _count_gradients(subject)),
        (1.0, _count_colors(subject)),
        (POSITION_WEIGHT, _center(thumbnail)),
    ]
    return np.concatenate([weight * normalize_embeddings(part.ravel()) for weight, part in parts])


def _find_subject(pixels: Array) -> tuple[slice, slice]:
    """Find the rectangle of what differs from the color of the border; the whole picture if nothing does."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    differs = np.abs(pixels - np.median(border, axis=0)).max(axis=2) > MIN_CONTRAST
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    if len(rows) < 4 or len(columns) < 4:
        return slice(None), slice(None)
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def _resize(pixels: Array, side: int) -> Array:
    from PIL import Image

    image = Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))
    return np.asarray(image.resize((side, side), Image.Resampling.BOX), np.float64)


def _center(pixels: Array) -> Array:
    """Subtract gray, so that opposite colors are opposite vectors; white borders of all pictures do not count."""
    centered: Array = (255 - pixels) / 255
    return centered


def _count_gradients(pixels: Array) -> Array:
    """Count directions of brightness in a grid of cells, weighted by their strength."""
    gray = pixels.mean(axis=2)
    rows, columns = np.gradient(gray)
    strength = np.hypot(rows, columns)
    direction = (np.arctan2(rows, columns) % np.pi / np.pi * BINS).astype(np.int64) % BINS
    return np.sqrt(_count_in_cells(direction, strength, BINS))


def _count_colors(pixels: Array) -> Array:
    """Count colors, four levels of each channel, over the whole subject."""
    levels: NDArray[np.int64] = np.minimum(pixels / 64, 3).astype(np.int64)
    codes = levels @ np.array([16, 4, 1])
    counts: Array = np.bincount(codes.ravel(), minlength=64).astype(np.float64)
    counts[63] = 0  # white, the background
    return np.sqrt(counts)


def _count_in_cells(codes: NDArray[np.int64], weights: Array, num_codes: int) -> Array:
    """Sum the weights of each code in each cell of the grid."""
    cells = np.arange(SIDE) * GRID // SIDE
    places = (cells[:, None] * GRID + cells[None, :]) * num_codes + codes
    sums: Array = np.bincount(places.ravel(), weights.ravel(), GRID * GRID * num_codes).astype(np.float64)
    return sums
