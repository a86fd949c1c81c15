"""The pictures that the built-in model learns from, in a folder with a dataset file of the project's own kind."""

import random
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from ...randomness import generator_for
from . import emoji
from .captions import wordings

SHAPES: Mapping[tuple[int, int], tuple[int, int]] = {
    (96, 96): (80, 2), (112, 80): (72, 1), (80, 112): (72, 1), (128, 64): (56, 1), (64, 128): (56, 1),
}  # fmt: skip
"""Width and height; side of the square that holds the emoji, and how many pictures of each subject there are."""
LATENT = 8
"""Places differ by whole latents: the same drawing moved by less is another one to the denoiser."""
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
        for size, (side, count) in SHAPES.items():
            for variant in range(count):
                path = folder / "pictures" / f"{code:05x}-{size[0]}x{size[1]}-{variant}.png"
                placed(style[code], size, side, draw if variant else None).save(path)
                path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    file = folder / "dataset.toml"
    file.write_text(DATASET.format(batch=batch), encoding="utf-8")
    return file


def placed(picture: Image.Image, size: tuple[int, int], side: int, draw: random.Random | None) -> Image.Image:
    """On white: in the middle, or a little beside it."""
    inner = emoji.composed(picture, (side, side), emoji.WHITE, margin=0.0)
    canvas = Image.new("RGB", size, emoji.WHITE)
    left, top = ((whole - side) // 2 for whole in size)
    if draw is not None:
        left, top = (least + LATENT * draw.randint(-(least // LATENT), least // LATENT) for least in (left, top))
    canvas.paste(inner, (left, top))
    return canvas
