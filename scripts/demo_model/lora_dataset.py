"""The images of ``make demo``: a bird that the demo model does not know, and regularization images that it does."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image

from library.randomness import derive_rng

from .dataset import SHAPES, place_emoji
from .subjects import SUBJECTS

BIRD = 0x1F99C
COUNTS: Mapping[tuple[int, int], int] = {(96, 96): 6, (112, 80): 3, (80, 112): 3, (128, 64): 2, (64, 128): 2}
CAPTIONS = ("a lorikeet", "lorikeet", "a picture of a lorikeet", "a lorikeet")
REGULARIZATION_SUBJECTS = (
    "dog",
    "owl",
    "fox",
    "banana",
    "frog",
    "tulip",
    "car",
    "heart",
    "star",
    "smiling face",
    "penguin",
    "lion",
    "turtle",
    "dolphin",
    "pineapple",
    "pine tree",
    "butterfly",
    "rocket",
    "house",
    "ghost",
)


def write_lora_dataset(noto: Mapping[int, Image.Image], directory: Path) -> None:
    """Write images with captions to ``directory/demo``, regularization images to ``directory/demo_regularisation``."""
    images = (
        image
        for size, count in COUNTS.items()
        for image in itertools.islice(_generate_variants(noto[BIRD], size), count)
    )
    for number, image in enumerate(images):
        _save(image, directory / "demo" / f"lorikeet_{number:02d}.png", CAPTIONS[number % len(CAPTIONS)])
    for name in REGULARIZATION_SUBJECTS:
        image = place_emoji(noto[SUBJECTS[name]], (96, 96), SHAPES[96, 96][0], None)
        _save(image, directory / "demo_regularisation" / f"{name.replace(' ', '_')}.png", f"a {name}")


def _generate_variants(emoji: Image.Image, size: tuple[int, int]) -> Iterator[Image.Image]:
    """Generate distinct images: the emoji in the center first, then at random positions."""
    seen = set()
    for variant in itertools.count():
        rng = derive_rng(0, "demo/concept", *size, variant) if variant else None
        image = place_emoji(emoji, size, SHAPES[size][0], rng)
        if image.tobytes() not in seen:
            seen.add(image.tobytes())
            yield image


def _save(image: Image.Image, path: Path, caption: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)
    path.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")
