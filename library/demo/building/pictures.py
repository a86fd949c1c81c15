"""The pictures that the built-in model learns from, in a folder with a dataset file of the project's own kind."""

import random
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from ...randomness import generator_for
from . import emoji
from .captions import wordings

SHAPES: Mapping[tuple[int, int], int] = {(96, 96): 6, (112, 80): 3, (80, 112): 3, (128, 64): 3, (64, 128): 3}
"""Width and height, and how many pictures of each subject there are of it."""
DATASET = """\
[general]
enable_bucket = true
caption_extension = ".txt"
enable_wildcard = true
caption_dropout_rate = 0.1

[[datasets]]
resolution = 96
batch_size = {batch}
min_bucket_reso = 64
max_bucket_reso = 128
bucket_reso_steps = 16

  [[datasets.subsets]]
  image_dir = "pictures"
"""


def write(subjects: Mapping[str, int], style: Mapping[int, Image.Image], folder: Path, batch: int, seed: int) -> Path:
    """Pictures, captions and the dataset file, whose path comes back."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number, (name, code) in enumerate(subjects.items()):
        draw = generator_for(seed, "demo/pictures", number)
        caption = "\n".join(wordings(name)) + "\n"
        for size, count in SHAPES.items():
            for variant in range(count):
                path = folder / "pictures" / f"{code:05x}-{size[0]}x{size[1]}-{variant}.png"
                placed(style[code], size, draw).save(path)
                path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    file = folder / "dataset.toml"
    file.write_text(DATASET.format(batch=batch), encoding="utf-8")
    return file


def placed(picture: Image.Image, size: tuple[int, int], draw: random.Random) -> Image.Image:
    """On white, about in the middle and about as large as there is room."""
    return emoji.composed(picture, size, emoji.WHITE, margin=draw.uniform(0.04, 0.12),
                          at=(draw.uniform(0.3, 0.7), draw.uniform(0.3, 0.7)))  # fmt: skip
