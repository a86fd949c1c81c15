"""Draws the pictures of dataset_configs/demo: a coloured shape each, with its caption in a text file beside it.

Run it as ``python -m library.demo.make_pictures FOLDER``.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (214, 48, 49), "green": (39, 174, 96), "blue": (41, 98, 255), "yellow": (247, 202, 24)}
GROUNDS = {"white": (250, 250, 250), "black": (18, 18, 18), "grey": (150, 150, 150), "pink": (255, 182, 203)}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ((160, 96), (96, 160), (128, 128), (144, 112))
SMOOTHING = 4
"""Drawn so many times larger and reduced, for smooth edges."""


def make(folder: Path) -> None:
    """Write sixteen pictures and captions; every colour with every shape, on four sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, caption, picture in pictures():
        picture.save(folder / f"{name}.png", optimize=True)
        (folder / f"{name}.txt").write_text(f"{caption}\n", encoding="utf-8")


def pictures() -> Iterator[tuple[str, str, Image.Image]]:
    """File name without ending, caption, picture."""
    for row, colour in enumerate(COLOURS):
        for column, shape in enumerate(SHAPES):
            # Two orthogonal Latin squares: every ground meets every colour, shape and size just once.
            ground = tuple(GROUNDS)[row ^ column]
            size = SIZES[row ^ (0, 2, 3, 1)[column]]
            picture = draw(shape, COLOURS[colour], GROUNDS[ground], size)
            yield f"{colour}_{shape}", f"a {colour} {shape} on {ground} ground", picture


def draw(shape: str, colour: tuple[int, int, int], ground: tuple[int, int, int], size: tuple[int, int]) -> Image.Image:
    """One shape in the middle of a plain ground; ``size`` is (width, height)."""
    width, height = (side * SMOOTHING for side in size)
    picture = Image.new("RGB", (width, height), ground)
    pencil = ImageDraw.Draw(picture)
    radius = min(width, height) * 0.36
    left, top, right, bottom = width / 2 - radius, height / 2 - radius, width / 2 + radius, height / 2 + radius
    if shape == "circle":
        pencil.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        pencil.rectangle((left, top, right, bottom), fill=colour)
    elif shape == "triangle":
        pencil.polygon(((width / 2, top), (right, bottom), (left, bottom)), fill=colour)
    else:
        arm = radius / 3
        pencil.rectangle((left, height / 2 - arm, right, height / 2 + arm), fill=colour)
        pencil.rectangle((width / 2 - arm, top, width / 2 + arm, bottom), fill=colour)
    return picture.resize(size, Image.Resampling.BOX)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
