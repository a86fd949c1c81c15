"""The demo's own pictures: a bird that the built-in model does not know, and pictures of what it is to keep.

Run it as ``python -m library.demo.building.concept NOTO FOLDER``, with the font that ``library.demo.build`` takes, too.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image

from ...randomness import generator_for
from . import emoji
from .pictures import SHAPES, placed
from .subjects import SUBJECTS

BIRD = 0x1F99C
COUNTS: Mapping[tuple[int, int], int] = {(96, 96): 6, (112, 80): 3, (80, 112): 3, (128, 64): 2, (64, 128): 2}
CAPTIONS = ("a lorikeet", "lorikeet", "a picture of a lorikeet", "a lorikeet")
PLAIN = (
    "dog", "owl", "fox", "banana", "frog", "tulip", "car", "heart", "star", "smiling face", "penguin", "lion", "turtle",
    "dolphin", "pineapple", "pine tree", "butterfly", "rocket", "house", "ghost",
)  # fmt: skip
"""What is shown beside it as the model draws it already, so that it stays as it is."""


def write(noto: Path, folder: Path) -> None:
    """Pictures with captions in ``folder/demo``, regularisation pictures in ``folder/demo_regularisation``."""
    drawings = emoji.noto(noto)
    number = 0
    for size, count in COUNTS.items():
        for picture in itertools.islice(_different(drawings[BIRD], size), count):
            _save(picture, folder / "demo", f"lorikeet_{number:02d}", CAPTIONS[number % len(CAPTIONS)])
            number += 1
    for name in PLAIN:
        picture = placed(drawings[SUBJECTS[name]], (96, 96), SHAPES[96, 96][0], None)
        _save(picture, folder / "demo_regularisation", name.replace(" ", "_"), f"a {name}")


def _different(drawing: Image.Image, size: tuple[int, int]) -> Iterator[Image.Image]:
    """As large as fits first, then a little smaller and elsewhere; no picture comes twice."""
    seen = set()
    for variant in itertools.count():
        draw = generator_for(0, "demo/concept", *size, variant) if variant else None
        picture = placed(drawing, size, SHAPES[size][0], draw)
        if picture.tobytes() not in seen:
            seen.add(picture.tobytes())
            yield picture


def _save(picture: Image.Image, folder: Path, name: str, caption: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    picture.save(path, optimize=True)
    path.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
