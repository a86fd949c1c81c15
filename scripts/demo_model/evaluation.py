"""Evaluation of the demo model: one sample of each subject as a contact sheet, and how many are recognizable."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from .dataset import place_emoji

SIZE, SIDE = (96, 96), 80
COLUMNS, CAPTION_HEIGHT, GAP = 8, 18, 8
INFERENCE_STEPS, GUIDANCE_SCALE = 25, 3.0
THUMBNAIL = (24, 24)


def generate_samples(pipe: Any, names: Sequence[str], seed: int) -> list[Image.Image]:
    """Generate one image of each name; nothing is selected."""
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": INFERENCE_STEPS, "guidance_scale": GUIDANCE_SCALE}
    images: list[Image.Image] = []
    for name in names:
        generator = torch.Generator().manual_seed(seed)
        images += pipe(f"a {name}", width=SIZE[0], height=SIZE[1], generator=generator, **options).images
    return images


def draw_contact_sheet(images: Mapping[str, Image.Image]) -> Image.Image:
    """Draw all images with their names."""
    rows = -(-len(images) // COLUMNS)
    cell = SIZE[0] + GAP, SIZE[1] + CAPTION_HEIGHT + GAP
    sheet = Image.new("RGB", (COLUMNS * cell[0] + GAP, rows * cell[1] + GAP), (255, 255, 255))
    draw: Any = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(12)
    for number, (name, image) in enumerate(images.items()):
        left, top = GAP + number % COLUMNS * cell[0], GAP + number // COLUMNS * cell[1]
        sheet.paste(image, (left, top))
        center = (left + SIZE[0] / 2, top + SIZE[1] + CAPTION_HEIGHT / 2)
        draw.text(center, name, (60, 60, 60), font, anchor="mm")
    return sheet.quantize(256)


def find_recognizable(
    images: Mapping[str, Image.Image], style: Mapping[int, Image.Image], codes: Mapping[str, int]
) -> list[str]:
    """Find the names whose image is nearer to their own emoji, at any position, than to that of any other name."""
    references = {
        name: np.stack(
            [
                _shrink(place_emoji(style[code], SIZE, SIDE, random.Random(variant) if variant else None))
                for variant in range(12)
            ]
        )
        for name, code in codes.items()
    }
    recognizable = []
    for name, image in images.items():
        thumbnail = _shrink(image)
        distances = {other: np.abs(each - thumbnail).mean((1, 2, 3)).min() for other, each in references.items()}
        if min(distances, key=lambda other: distances[other]) == name:
            recognizable.append(name)
    return recognizable


def _shrink(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image.convert("RGB").resize(THUMBNAIL, Image.Resampling.BOX), dtype=np.float32)
