"""What the built-in model draws for each of its words: a picture for people, and a count for doubters."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from .pictures import placed

SIZE, SIDE = (96, 96), 80
COLUMNS, LINE, GAP = 8, 18, 8
STEPS, SCALE = 25, 3.0
COARSE = (24, 24)


def draw(pipe: Any, names: Sequence[str], seed: int) -> list[Image.Image]:
    """The first picture for each name; nothing is selected."""
    pipe.set_progress_bar_config(disable=True)
    pictures: list[Image.Image] = []
    for name in names:
        noise = torch.Generator().manual_seed(seed)
        pictures += pipe(f"a {name}", width=SIZE[0], height=SIZE[1], num_inference_steps=STEPS, guidance_scale=SCALE,
                         generator=noise).images  # fmt: skip
    return pictures


def sheet(pictures: Mapping[str, Image.Image]) -> Image.Image:
    """All of them with their names."""
    rows = -(-len(pictures) // COLUMNS)
    cell = SIZE[0] + GAP, SIZE[1] + LINE + GAP
    paper = Image.new("RGB", (COLUMNS * cell[0] + GAP, rows * cell[1] + GAP), (255, 255, 255))
    pencil: Any = ImageDraw.Draw(paper)
    font = ImageFont.load_default(12)
    for number, (name, picture) in enumerate(pictures.items()):
        left, top = GAP + number % COLUMNS * cell[0], GAP + number // COLUMNS * cell[1]
        paper.paste(picture, (left, top))
        pencil.text((left + SIZE[0] / 2, top + SIZE[1] + LINE / 2), name, (60, 60, 60), font, anchor="mm")
    return paper.quantize(256)


def right(pictures: Mapping[str, Image.Image], style: Mapping[int, Image.Image], codes: Mapping[str, int]) -> list[str]:
    """The names whose picture is nearer to the true drawing than to that of any other name, wherever it was placed."""
    truths = {name: np.stack([_coarse(placed(style[code], SIZE, SIDE, random.Random(variant) if variant else None))
                              for variant in range(12)]) for name, code in codes.items()}  # fmt: skip
    found = []
    for name, picture in pictures.items():
        ours = _coarse(picture)
        distances = {other: np.abs(truth - ours).mean((1, 2, 3)).min() for other, truth in truths.items()}
        if min(distances, key=lambda other: distances[other]) == name:
            found.append(name)
    return found


def _coarse(picture: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(picture.convert("RGB").resize(COARSE, Image.Resampling.BOX), dtype=np.float32)
