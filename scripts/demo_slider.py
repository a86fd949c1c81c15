"""Draw what the slider of ``make demo-slider`` does at several strengths, and measure it.

    python -m scripts.demo_slider [LORA.safetensors [SHEET.png]]

prints, for each subject and strength, how green it is: the mean of green minus red over its pixels, which are those
that are not white at strength 0; how much of its outline stays: the pixels that are in both outlines, as a part of
those that are in one of them; and how much its pixels change on average, of 255.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from numpy.typing import NDArray
from PIL import Image

from library.demo import BUILT_IN_MODEL_DIR

SUBJECTS = ("a red apple", "a strawberry", "a fox", "a sunflower")
STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)
SIDE, GAP, SEED, STEPS, GUIDANCE = 96, 4, 1, 15, 3.0
WHITE = 240
"""Pixels whose darkest channel is at least this bright are background."""

Pixels = NDArray[np.float64]


def draw_pictures(lora: Path, subjects: Sequence[str] = SUBJECTS) -> dict[str, list[Image.Image]]:
    """Draw each subject at each strength, always from the same noise."""
    pipe = StableDiffusionPipeline.from_pretrained(BUILT_IN_MODEL_DIR)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(lora.parent, weight_name=lora.name, adapter_name="slider")
    pictures: dict[str, list[Image.Image]] = {subject: [] for subject in subjects}
    for strength in STRENGTHS:
        pipe.set_adapters("slider", strength)
        for subject in subjects:
            noise = torch.Generator().manual_seed(SEED)
            drawn = pipe(
                subject, num_inference_steps=STEPS, guidance_scale=GUIDANCE, height=SIDE, width=SIDE, generator=noise
            )
            pictures[subject].append(drawn.images[0])
    return pictures


def find_outline(picture: Pixels) -> NDArray[np.bool_]:
    """Find the pixels of the subject, which is on white."""
    outline: NDArray[np.bool_] = picture.min(axis=2) < WHITE
    return outline


def measure(pictures: Sequence[Image.Image]) -> list[dict[str, float]]:
    """Measure the pictures of one subject against that at strength 0."""
    arrays = [np.asarray(picture.convert("RGB"), float) for picture in pictures]
    base = arrays[STRENGTHS.index(0.0)]
    outline, figures = find_outline(base), []
    for array in arrays:
        own = find_outline(array)
        figures.append(
            {
                "green": float((array[..., 1] - array[..., 0])[outline].mean()),
                "outline": float((own & outline).sum() / (own | outline).sum()),
                "change": float(np.abs(array - base).mean()),
            }
        )
    return figures


def draw_sheet(pictures: Mapping[str, Sequence[Image.Image]]) -> Image.Image:
    """Put the pictures of each subject into a row, and those of each strength into a column."""
    step, rows = SIDE + GAP, list(pictures.values())
    sheet = Image.new("RGB", (len(STRENGTHS) * step - GAP, len(rows) * step - GAP), "white")
    for top, row in enumerate(rows):
        for left, picture in enumerate(row):
            sheet.paste(picture, (left * step, top * step))
    return sheet


def format_table(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Format the figures of all subjects, a line for each figure."""
    heads = "".join(f"{strength:+8g}" for strength in STRENGTHS)
    lines = [f"{'strength':24}{heads}", "-" * (24 + len(heads))]
    for subject, row in figures.items():
        for name in row[0]:
            lines.append(f"{f'{subject}, {name}':24}" + "".join(f"{each[name]:8.2f}" for each in row))
    return "\n".join(lines)


def run(lora: Path, sheet: Path | None = None) -> str:
    """Draw and measure a slider; return the table."""
    if not lora.is_file():
        raise SystemExit(f"{lora}: no such file; run make demo-slider")
    pictures = draw_pictures(lora)
    if sheet is not None:
        draw_sheet(pictures).save(sheet, optimize=True)
    return format_table({subject: measure(row) for subject, row in pictures.items()})


if __name__ == "__main__":
    arguments = [Path(word) for word in sys.argv[1:]] or [Path("output/demo_slider/demo_slider.safetensors")]
    sys.stdout.write(run(*arguments[:2]) + "\n")
