"""How much a bench of the data measures, and the pictures that are made for it."""

import io
import time
from dataclasses import dataclass
from pathlib import Path

from ..config.schema import DataConfig

SHAPES = 24
SECONDS_TO_SETTLE = 2.5
"""Of a file that was changed more recently, times are not believed; the first start shall not come so soon."""


@dataclass(frozen=True)
class Scale:
    """What the parts of the bench are told."""

    folder: Path
    pictures: int
    entries: int
    repetitions: int


def make_pictures(folder: Path, count: int, side: int) -> DataConfig:
    """JPEG files of about ``side`` pixels, no two alike, with captions; as a dataset."""
    folder.mkdir(parents=True)
    bases = [_jpeg(shape, side) for shape in range(SHAPES)]
    for number in range(count):
        data, mark = bases[number % SHAPES], b"%010d" % number
        comment = b"\xff\xfe" + (len(mark) + 2).to_bytes(2, "big") + mark
        (folder / f"{number:07d}.jpg").write_bytes(data[:2] + comment + data[2:])
        caption = (
            f"a photo of thing {number}, standing, outdoors, blue sky, high quality, detailed, number {7 * number}"
        )
        (folder / f"{number:07d}.txt").write_text(caption, encoding="utf-8")
    time.sleep(SECONDS_TO_SETTLE)
    table = f'[[datasets]]\nresolution = {max(64, side // 64 * 64)}\nenable_bucket = true\nbatch_size = 4\n' \
            'min_bucket_reso = 64\nbucket_reso_steps = 16\n[[datasets.subsets]]\ncaption_extension = ".txt"\n' \
            f"image_dir = {str(folder)!r}\n"  # fmt: skip
    file = folder.with_suffix(".toml")
    file.write_text(table, encoding="utf-8")
    return DataConfig(dataset_config=str(file))


def _jpeg(shape: int, side: int) -> bytes:
    """Coarse noise and fine noise on top of it, which a JPEG of a photograph is like."""
    import numpy as np
    from PIL import Image

    draw = np.random.Generator(np.random.Philox(shape))
    width, height = int(side * draw.uniform(0.7, 1.5)), int(side * draw.uniform(0.7, 1.5))
    coarse = Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    fine = draw.integers(-12, 13, (height, width, 1))
    pixels = np.clip(np.asarray(coarse).astype(np.int16) + fine, 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=90)
    return stream.getvalue()
