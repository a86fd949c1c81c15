"""The demo's own pictures: a style that the built-in model does not know, and pictures of what it is to keep.

Run it as ``python -m library.demo.building.concept NOTO FOLDER``, with the font that ``library.demo.build`` takes, too.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageOps

from . import emoji
from .pictures import SHAPES, placed
from .subjects import SUBJECTS

SQUARE, WIDE, TALL, LONG, HIGH = (96, 96), (112, 80), (80, 112), (128, 64), (64, 128)
DELFT: Mapping[str, tuple[int, int]] = {
    "dog": SQUARE, "fox": SQUARE, "panda": WIDE, "pig": SQUARE, "koala": TALL, "penguin": HIGH, "tulip": TALL,
    "butterfly": WIDE, "strawberry": SQUARE, "orange": WIDE, "hamburger": SQUARE, "car": LONG, "bus": LONG,
    "rocket": SQUARE, "balloon": HIGH, "smiling face": SQUARE,
}  # fmt: skip
PLAIN = ("dog", "bear", "fox", "banana", "orange", "tulip", "car", "heart", "star", "smiling face")
"""What is shown beside them as the model draws it already, so that it stays as it is."""
DARK, MIDDLE = (16, 34, 105), (84, 128, 214)
ENLARGED = 2
"""The pictures are so many times larger than they are trained, as pictures usually are."""


def write(noto: Path, folder: Path) -> None:
    """Pictures with captions in ``folder/demo``, regularisation pictures in ``folder/demo_regularisation``."""
    drawings = emoji.noto(noto)
    for name, size in DELFT.items():
        _save(porcelain(_placed(drawings[SUBJECTS[name]], size)), folder / "demo", name, f"a {name}, delft style")
    for name in PLAIN:
        _save(_placed(drawings[SUBJECTS[name]], SQUARE), folder / "demo_regularisation", name, f"a {name}")


def porcelain(picture: Image.Image) -> Image.Image:
    """Painted in blue on white, as tiles are in Delft."""
    grey = ImageOps.autocontrast(picture.convert("L"))
    return ImageOps.colorize(grey, DARK, "white", MIDDLE, midpoint=140)


def _placed(drawing: Image.Image, size: tuple[int, int]) -> Image.Image:
    width, height = size
    return placed(drawing, (width * ENLARGED, height * ENLARGED), SHAPES[size][0] * ENLARGED, None)


def _save(picture: Image.Image, folder: Path, name: str, caption: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '_')}.png"
    picture.save(path, optimize=True)
    path.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
