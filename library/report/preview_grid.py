"""Draw the previews of a run as a grid: a row for each prompt, a column for each step or epoch, from their files."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.contact_sheet_text import TextRenderer

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_GRID_COLUMNS, MAX_GRID_ROWS = 6, 16

CELL_AREA = 208 * 208
"""Pixels of each image on the grid; small ones are enlarged."""

GRID_MARGIN, GRID_GAP, LABEL_WIDTH, COLUMN_HEADING_HEIGHT, TEXT_LINE_HEIGHT, FONT_SIZE = 20, 8, 170, 34, 20, 15

BACKGROUND = (255, 255, 255)

PreviewRow = dict[str, Path]
"""Step or epoch in the file name, such as ``000010`` or ``e000002``, and the file."""


def write_preview_grid(
    preview_dir: Path, name: str, prompts: Sequence[str], newer_than: float, target: Path
) -> Path | None:
    """Draw the previews named ``name`` that are not older than ``newer_than``, if they have at least two columns."""
    rows = find_preview_files(preview_dir, name, newer_than)
    columns = select_evenly_spaced(_list_columns(rows), MAX_GRID_COLUMNS)
    if len(columns) < 2:
        return None
    sheet = draw_preview_grid([(prompts[index], rows[index]) for index in sorted(rows)[:MAX_GRID_ROWS]], columns)
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target, optimize=True)
    return target


def find_preview_files(preview_dir: Path, name: str, newer_than: float) -> dict[int, PreviewRow]:
    """List the preview files by prompt number, each row in the order of creation."""
    pattern = re.compile(re.escape(name) + r"_(e?\d{6,})_(\d{2,})_\d{14}_\d+\.png")
    rows: defaultdict[int, PreviewRow] = defaultdict(dict)
    paths = {path: path.stat().st_mtime for path in preview_dir.glob("*.png")}
    for path in sorted(paths, key=lambda path: (paths[path], path.name)):
        match = pattern.fullmatch(path.name)
        if match and paths[path] >= newer_than:
            rows[int(match[2])][match[1]] = path
    return dict(rows)


def select_evenly_spaced(columns: Sequence[str], limit: int) -> list[str]:
    """Select the first, the last, and others evenly spaced between them."""
    if len(columns) <= limit:
        return list(columns)
    return [columns[round(number * (len(columns) - 1) / (limit - 1))] for number in range(limit)]


def draw_preview_grid(rows: Sequence[tuple[str, PreviewRow]], columns: Sequence[str]) -> "Image":
    """Draw the images with the prompts on the left and steps or epochs above."""
    from PIL import Image, ImageDraw

    images = [{column: _load_resized(row[column]) for column in columns if column in row} for _, row in rows]
    widths = [max(row[column].width for row in images if column in row) for column in columns]
    heights = [max((image.height for image in row.values()), default=TEXT_LINE_HEIGHT) for row in images]
    size = (
        GRID_MARGIN * 2 + LABEL_WIDTH + sum(widths) + GRID_GAP * len(widths),
        GRID_MARGIN * 2 + COLUMN_HEADING_HEIGHT + sum(heights) + GRID_GAP * len(heights),
    )
    sheet = Image.new("RGB", size, BACKGROUND)
    renderer = TextRenderer(ImageDraw.Draw(sheet))
    lefts = [GRID_MARGIN + LABEL_WIDTH + sum(widths[:number]) + GRID_GAP * number for number in range(len(widths))]
    for column, left, width in zip(columns, lefts, widths, strict=True):
        title = renderer.truncate_text(format_column_label(column), width, FONT_SIZE)
        title_left = left + (width - renderer.measure_text(title, FONT_SIZE)) // 2
        renderer.draw_text((title_left, GRID_MARGIN), title, width, FONT_SIZE)
    top = GRID_MARGIN + COLUMN_HEADING_HEIGHT
    for (text, _), row, height in zip(rows, images, heights, strict=True):
        lines = renderer.wrap_text(text, LABEL_WIDTH - GRID_GAP, max(1, height // TEXT_LINE_HEIGHT), FONT_SIZE)
        text_top = top + (height - len(lines) * TEXT_LINE_HEIGHT) // 2
        for number, line in enumerate(lines):
            corner = GRID_MARGIN, text_top + number * TEXT_LINE_HEIGHT
            renderer.draw_text(corner, line, LABEL_WIDTH - GRID_GAP, FONT_SIZE)
        for column, left, width in zip(columns, lefts, widths, strict=True):
            if (image := row.get(column)) is not None:
                sheet.paste(image, (left + (width - image.width) // 2, top + (height - image.height) // 2))
        top += height + GRID_GAP
    return sheet


def format_column_label(column: str) -> str:
    number = int(column.lstrip("e"))
    if number == 0:
        return "before"
    return f"epoch {number}" if column.startswith("e") else f"step {number}"


def _list_columns(rows: Mapping[int, PreviewRow]) -> list[str]:
    """List the columns of the longest row; all rows have the same order."""
    longest = max(rows.values(), key=len, default={})
    return list(longest)


def _load_resized(path: Path) -> "Image":
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    scale = (CELL_AREA / (image.width * image.height)) ** 0.5
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)
