"""Draw what the slider of ``make demo-slider`` does at several strengths, and measure it.

    python -m scripts.demo_slider [LORA.safetensors [SHEET.png]]

prints, for each subject and strength, how green it is: the mean of green minus red over its pixels, which are those
that are white neither here nor at strength 0; how much of its outline stays: these pixels as a part of those that are
not white in one of the two; and how much the pixels of the picture change on average, of 255.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from numpy.typing import NDArray
from PIL import Image

from library.demo import BUILT_IN_MODEL_DIR

SUBJECTS = ("a red apple", "a strawberry", "a fox", "a sunflower")
STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)
SIDE, GAP, STEPS, GUIDANCE = 96, 4, 15, 3.0
SEEDS = (1, 2, 3, 4)
"""Each subject is drawn with all of them; the figures are means, and the sheet has the first."""
WHITE = 240
"""Pixels whose darkest channel is at least this bright are background."""

Pixels = NDArray[np.float64]


def draw_pictures(lora: Path, subjects: Sequence[str] = SUBJECTS) -> dict[str, list[list[Image.Image]]]:
    """Draw each subject at each strength with all seeds."""
    pipeline_class: Any = StableDiffusionPipeline
    pipe = pipeline_class.from_pretrained(BUILT_IN_MODEL_DIR)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(lora.parent, weight_name=lora.name, adapter_name="slider")
    pictures: dict[str, list[list[Image.Image]]] = {subject: [] for subject in subjects}
    for strength in STRENGTHS:
        pipe.set_adapters("slider", strength)
        for subject in subjects:
            drawn = pipe(
                [subject] * len(SEEDS),
                num_inference_steps=STEPS,
                guidance_scale=GUIDANCE,
                height=SIDE,
                width=SIDE,
                generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
            )
            pictures[subject].append(drawn.images)
    return pictures


def find_outline(picture: Pixels) -> NDArray[np.bool_]:
    """Find the pixels of the subject, which is on white."""
    outline: NDArray[np.bool_] = picture.min(axis=2) < WHITE
    return outline


def measure(pictures: Sequence[Sequence[Image.Image]]) -> list[dict[str, float]]:
    """Measure the pictures of one subject at each strength against those at strength 0 with the same seed."""
    arrays = [[np.asarray(picture.convert("RGB"), float) for picture in row] for row in pictures]
    return [_compare_rows(row, arrays[STRENGTHS.index(0.0)]) for row in arrays]


def _compare_rows(row: Sequence[Pixels], base: Sequence[Pixels]) -> dict[str, float]:
    """Compare the pictures of all seeds with those at strength 0; return the means."""
    figures = []
    for array, first in zip(row, base, strict=True):
        own, outline = find_outline(array), find_outline(first)
        both = own & outline
        green = (array[..., 1] - array[..., 0])[both].mean()
        figures.append((green, both.sum() / (own | outline).sum(), np.abs(array - first).mean()))
    return dict(zip(("green", "outline", "change"), np.mean(figures, axis=0).tolist(), strict=True))


def draw_sheet(pictures: Mapping[str, Sequence[Sequence[Image.Image]]]) -> Image.Image:
    """Put the pictures of each subject into a row, and those of each strength into a column."""
    step, rows = SIDE + GAP, list(pictures.values())
    sheet = Image.new("RGB", (len(STRENGTHS) * step - GAP, len(rows) * step - GAP), "white")
    for top, row in enumerate(rows):
        for left, drawn in enumerate(row):
            sheet.paste(drawn[0], (left * step, top * step))
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
