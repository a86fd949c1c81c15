"""The demo model's training set: images, captions and the dataset TOML, in the trainer's own format."""

import random
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from library.randomness import derive_rng

from .captions import generate_captions
from .emoji import WHITE, compose

SHAPES: Mapping[tuple[int, int], tuple[int, int]] = {
    (96, 96): (80, 2),
    (112, 80): (72, 1),
    (80, 112): (72, 1),
    (128, 64): (56, 1),
    (64, 128): (56, 1),
}
"""Width and height: side of the square that holds the emoji, and the number of images of each subject."""
LATENT_PIXELS = 8
"""Positions differ by whole latents: shifted by less, the same drawing would be another one to the denoiser."""
DATASET = """\
[general]
enable_bucket = true
caption_extension = ".txt"
enable_wildcard = true
caption_dropout_rate = 0.1

[[datasets]]
resolution = 96
batch_size = {batch_size}
min_bucket_reso = 64
max_bucket_reso = 128
bucket_reso_steps = 16

  [[datasets.subsets]]
  image_dir = "images"
"""


def write_dataset(
    subjects: Mapping[str, int], style: Mapping[int, Image.Image], directory: Path, batch_size: int, seed: int
) -> Path:
    """Write images, captions and the dataset TOML; return the path of the latter."""
    (directory / "images").mkdir(parents=True, exist_ok=True)
    for number, (name, code) in enumerate(subjects.items()):
        rng = derive_rng(seed, "demo/pictures", number)
        captions = "\n".join(generate_captions(name)) + "\n"
        for size, (side, count) in SHAPES.items():
            for variant in range(count):
                path = directory / "images" / f"{code:05x}-{size[0]}x{size[1]}-{variant}.png"
                place_emoji(style[code], size, side, rng if variant else None).save(path)
                path.with_suffix(".txt").write_text(captions, encoding="utf-8")
    file = directory / "dataset.toml"
    file.write_text(DATASET.format(batch_size=batch_size), encoding="utf-8")
    return file


def place_emoji(emoji: Image.Image, size: tuple[int, int], side: int, rng: random.Random | None) -> Image.Image:
    """Place the emoji on white, in the center or, with ``rng``, shifted by a random number of latents."""
    square = compose(emoji, (side, side), WHITE, margin=0.0)
    canvas = Image.new("RGB", size, WHITE)
    left, top = ((length - side) // 2 for length in size)
    if rng is not None:
        left, top = (
            center + LATENT_PIXELS * rng.randint(-(center // LATENT_PIXELS), center // LATENT_PIXELS)
            for center in (left, top)
        )
    canvas.paste(square, (left, top))
    return canvas
