"""Write images whose number can be read from their pixels."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_numbered_images(folder: Path, count: int, *, with_masks: bool = False) -> None:
    """Write images of two sizes, black on the left, with a gray level and a caption for their number.

    ``with_masks``: every other image gets more transparent to the right.
    """
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        width, height = (96, 64) if number % 3 else (64, 96)
        pixels = np.full((height, width, 3), 10 * number + 20, np.uint8)
        pixels[:, : width // 2] = 0
        if with_masks and number % 2:
            pixels = np.dstack([pixels, (255 - np.arange(width) - number)[None].repeat(height, 0).astype(np.uint8)])
        Image.fromarray(pixels).save(folder / "images" / f"{(number * 7) % count:02d}.png")
        (folder / "images" / f"{(number * 7) % count:02d}.txt").write_text(f"{number}, 100, 1000")
