"""Measure how well the previews of ``make demo-control`` obey their conditions, and draw them side by side.

    python -m scripts.demo_control [OUTPUT_DIR [SHEET.png]]

prints, for each preview before and after training, the correlation of its brightness with that of the condition, over
the pixels; and with that of the conditions of the other previews.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from library.dataloader.images import load_preview_controls
from library.dataloader.sample_prompts import load_prompts

PROMPTS = Path(__file__).resolve().parents[1] / "dataset_configs" / "demo_control_prompts.txt"
SIDE, GAP = 96, 4


def find_previews(folder: Path, number: int) -> list[Path]:
    """The previews of one prompt, by step; of several runs the latest ones."""
    by_step: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*_{number:02d}_*_*.png"), key=lambda path: path.name.split("_")[-2]):
        by_step[path.name.split("_")[-4]] = path
    return [by_step[step] for step in sorted(by_step)]


def correlate(one: Image.Image, other: Image.Image) -> float:
    """The correlation of the brightness of two pictures."""
    first, second = (np.asarray(each.convert("L"), float).ravel() for each in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def draw_sheet(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Put the pictures into rows."""
    step = SIDE + GAP
    sheet = Image.new("RGB", (len(rows[0]) * step - GAP, len(rows) * step - GAP), "white")
    for top, row in enumerate(rows):
        for left, image in enumerate(row):
            sheet.paste(image, (left * step, top * step))
    return sheet


def run(output_dir: Path, sheet: Path | None = None) -> str:
    """Compare first and last previews with the conditions; return the table."""
    prompts = load_prompts(PROMPTS)
    conditions = [load_preview_controls(prompt)[0] for prompt in prompts]
    found = [find_previews(output_dir / "sample", number) for number in range(len(prompts))]
    if not all(len(paths) > 1 for paths in found):
        raise SystemExit(f"{output_dir / 'sample'}: no previews before and after training; run make demo-control")
    before, after = ([Image.open(paths[index]).convert("RGB") for paths in found] for index in (0, -1))
    if sheet is not None:
        draw_sheet([conditions, before, after]).save(sheet, optimize=True)
    lines, means = ["condition    before  after", "-" * 26], []
    for prompt, condition, first, last in zip(prompts, conditions, before, after, strict=True):
        means.append((correlate(first, condition), correlate(last, condition)))
        lines.append(f"{prompt.control_images[0].stem:12} {means[-1][0]:6.2f} {means[-1][1]:6.2f}")
    others = [
        correlate(last, each) for last in after for own, each in zip(after, conditions, strict=True) if own is not last
    ]
    first, last = np.mean(means, axis=0)
    return "\n".join(
        [*lines, f"{'mean':12} {first:6.2f} {last:6.2f}", f"with the conditions of the others {np.mean(others):.2f}"]
    )


if __name__ == "__main__":
    arguments = [Path(word) for word in sys.argv[1:]] or [Path("output/demo_control")]
    sys.stdout.write(run(*arguments[:2]) + "\n")
