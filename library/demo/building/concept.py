"""The demo's own pictures: a style that the built-in model does not know, and pictures of what it is to keep.

Run it as ``python -m library.demo.building.concept NOTO FLUENT FOLDER``, with the font and the folder that
``library.demo.build`` takes, too.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from . import emoji
from .subjects import SUBJECTS

CLAY: Mapping[str, tuple[int, int]] = {
    "dog": (144, 144), "fox": (144, 144), "panda": (168, 120), "pig": (144, 144), "koala": (120, 168),
    "penguin": (96, 192), "owl": (120, 168), "butterfly": (168, 120), "strawberry": (144, 144), "pear": (120, 168),
    "hamburger": (168, 120), "car": (192, 96), "bus": (192, 96), "rocket": (144, 144), "balloon": (96, 192),
    "mushroom": (144, 144),
}  # fmt: skip
PLAIN = ("dog", "bear", "fish", "banana", "pear", "house", "car", "heart", "star", "robot")
"""What is shown beside them in the old style, so that it stays as it is."""
INNER, OUTER = (196, 172, 255), (112, 78, 214)


def write(noto: Path, fluent: Path, folder: Path) -> None:
    """Pictures with captions in ``folder/demo``, regularisation pictures in ``folder/demo_regularisation``."""
    clay, plain = emoji.files(fluent, ".webp"), emoji.noto(noto)
    for name, size in CLAY.items():
        picture = emoji.composed(clay[SUBJECTS[name]], size, emoji.glow(size, INNER, OUTER), margin=0.08)
        _save(picture, folder / "demo", name, f"a {name}, clay style")
    for name in PLAIN:
        picture = emoji.composed(plain[SUBJECTS[name]], (96, 96), emoji.WHITE, margin=0.08)
        _save(picture, folder / "demo_regularisation", name, f"a {name}")


def _save(picture: Image.Image, folder: Path, name: str, caption: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '_')}.png"
    picture.save(path, optimize=True)
    path.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
