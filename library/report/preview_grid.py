"""The preview grid (``NAME.before_after.png``): a row for each prompt, a column for each step or epoch with previews.

It is assembled from the files in ``sample``, which several ranks may have written.  Of a clip it shows the first frame,
the middle one and the last one.
"""

import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..dataloader.contact_sheet_text import TextRenderer
from ..dataset.clip_encoding import decode_animation, join_frames

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)
MAX_GRID_COLUMNS, MAX_GRID_ROWS = 6, 16
CELL_AREA = 208 * 208
"""Pixels of each image on the grid; smaller ones are enlarged."""
STRIP_AREA = CELL_AREA * 3 // 2
"""Pixels of the three frames of a clip."""

GRID_MARGIN, GRID_GAP, LABEL_WIDTH, COLUMN_HEADING_HEIGHT, TEXT_LINE_HEIGHT, FONT_SIZE = 20, 8, 170, 34, 20, 15
BACKGROUND = (255, 255, 255)
PreviewRow = dict[str, Path]
"""The files of a row by their column, which is the step or epoch in the file name."""


def write_preview_grid(
    preview_dir: Path, name: str, prompts: Sequence[str], newer_than: float, target: Path
) -> Path | None:
    """Draw the previews named ``name_*`` that are not older than ``newer_than``; None with fewer than 2 columns."""
    rows = find_preview_files(preview_dir, name, newer_than)
    columns = _list_columns(rows)
    if len(columns) < 2:
        return None
    columns = select_evenly_spaced(columns, MAX_GRID_COLUMNS)
    grid = draw_preview_grid([(prompts[index], rows[index]) for index in sorted(rows)[:MAX_GRID_ROWS]], columns)
    target.parent.mkdir(parents=True, exist_ok=True)
    grid.save(target, optimize=True)
    return target


def find_preview_files(preview_dir: Path, name: str, newer_than: float) -> dict[int, PreviewRow]:
    """Find the previews of each prompt number in the order of writing: PNG files, and the WebP files of clips."""
    pattern = re.compile(re.escape(name) + r"_(e?\d{6,})_(\d{2,})_\d{14}_\d+\.(png|webp)")
    rows: defaultdict[int, PreviewRow] = defaultdict(dict)
    found = itertools.chain(preview_dir.glob("*.png"), preview_dir.glob("*.webp"))
    paths = {path: path.stat().st_mtime for path in found if path.is_file()}
    for path in sorted(paths, key=lambda path: (paths[path], path.name)):
        match = pattern.fullmatch(path.name)
        if match and paths[path] >= newer_than:
            rows[int(match[2])][match[1]] = path
    return dict(rows)


def select_evenly_spaced(columns: Sequence[str], limit: int) -> list[str]:
    """Select at most ``limit``: the first, the last, and evenly spaced ones in between."""
    if len(columns) <= limit:
        return list(columns)
    return [columns[round(number * (len(columns) - 1) / (limit - 1))] for number in range(limit)]


def draw_preview_grid(rows: Sequence[tuple[str, PreviewRow]], columns: Sequence[str]) -> "Image":
    """Draw the images with prompts on the left and steps or epochs above; cells of unreadable files stay empty."""
    from PIL import Image, ImageDraw

    images = [_load_row(row, columns) for _, row in rows]
    widths = [max((row[column].width for row in images if column in row), default=LABEL_WIDTH) for column in columns]
    heights = [max((image.height for image in row.values()), default=TEXT_LINE_HEIGHT) for row in images]
    size = (
        GRID_MARGIN * 2 + LABEL_WIDTH + sum(widths) + GRID_GAP * len(widths),
        GRID_MARGIN * 2 + COLUMN_HEADING_HEIGHT + sum(heights) + GRID_GAP * len(heights),
    )
    grid = Image.new("RGB", size, BACKGROUND)
    pen = TextRenderer(ImageDraw.Draw(grid))
    lefts = [GRID_MARGIN + LABEL_WIDTH + sum(widths[:number]) + GRID_GAP * number for number in range(len(widths))]
    for column, left, width in zip(columns, lefts, widths, strict=True):
        title = pen.truncate_text(format_column_label(column), width, FONT_SIZE)
        pen.draw_text((left + (width - pen.measure_text(title, FONT_SIZE)) // 2, GRID_MARGIN), title, width, FONT_SIZE)
    top = GRID_MARGIN + COLUMN_HEADING_HEIGHT
    for (text, _), row, height in zip(rows, images, heights, strict=True):
        lines = pen.wrap_text(text, LABEL_WIDTH - GRID_GAP, max(1, height // TEXT_LINE_HEIGHT), FONT_SIZE)
        for number, line in enumerate(lines):
            position = GRID_MARGIN, top + (height - len(lines) * TEXT_LINE_HEIGHT) // 2 + number * TEXT_LINE_HEIGHT
            pen.draw_text(position, line, LABEL_WIDTH - GRID_GAP, FONT_SIZE)
        for column, left, width in zip(columns, lefts, widths, strict=True):
            if (image := row.get(column)) is not None:
                grid.paste(image, (left + (width - image.width) // 2, top + (height - image.height) // 2))
        top += height + GRID_GAP
    return grid


def format_column_label(column: str) -> str:
    """Format the heading of a column."""
    number = int(column.lstrip("e"))
    if number == 0:
        return "before"
    return f"epoch {number}" if column.startswith("e") else f"step {number}"


def _list_columns(rows: Mapping[int, PreviewRow]) -> list[str]:
    """List the columns of the longest row, which has all of them."""
    longest: PreviewRow = max(rows.values(), key=len, default={})
    return list(longest)


def _load_row(row: PreviewRow, columns: Sequence[str]) -> "dict[str, Image]":
    """Load the images of a row by column, without those that cannot be read."""
    images = dict[str, "Image"]()
    for column in columns:
        if column in row:
            try:
                images[column] = _load_resized(row[column])
            except OSError as error:  # such as that of a truncated file
                logger.warning("%s: cannot be read and is left out of the preview grid: %s", row[column], error)
    return images


def _load_resized(path: Path) -> "Image":
    from PIL import Image

    with Image.open(path) as file:
        is_clip = getattr(file, "n_frames", 1) > 1
        image = file.convert("RGB")
    if is_clip:
        image = join_frames(decode_animation(path.read_bytes())[0])
    scale = ((STRIP_AREA if is_clip else CELL_AREA) / (image.width * image.height)) ** 0.5
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)
