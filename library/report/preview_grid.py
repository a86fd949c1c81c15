"""One picture of a whole run: a row for each prompt, a column for each time previews were drawn, the first on the left.

It is made of the preview files that the run wrote, whichever process wrote them.
"""

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
"""Of each picture on the sheet, in pixels; small ones are enlarged."""


GRID_MARGIN, GRID_GAP, LABEL_WIDTH, COLUMN_HEADING_HEIGHT, TEXT_LINE_HEIGHT, FONT_SIZE = 20, 8, 170, 34, 20, 15


BACKGROUND = (255, 255, 255)


PreviewRow = dict[str, Path]
"""When a picture was drawn, as its file name says it, and the file."""


def write_preview_grid(
    preview_dir: Path, name: str, prompts: Sequence[str], newer_than: float, target: Path
) -> Path | None:
    """Draw the sheet of the previews in ``folder`` that are not older than ``since``, if there are at least two times.

    ``name`` is what their file names begin with.
    """
    rows = find_preview_files(preview_dir, name, newer_than)
    times = _list_columns(rows)
    if len(times) < 2:
        return None
    columns = select_evenly_spaced(times, MAX_GRID_COLUMNS)
    sheet = draw_preview_grid([(prompts[index], rows[index]) for index in sorted(rows)[:MAX_GRID_ROWS]], columns)
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target, optimize=True)
    return target


def find_preview_files(preview_dir: Path, name: str, newer_than: float) -> dict[int, PreviewRow]:
    """The previews by number of the prompt, each row in the order in which they were drawn."""
    pattern = re.compile(re.escape(name) + r"_(e?\d{6,})_(\d{2,})_\d{14}_\d+\.png")
    rows: defaultdict[int, PreviewRow] = defaultdict(dict)
    paths = {path: path.stat().st_mtime for path in preview_dir.glob("*.png")}
    for path in sorted(paths, key=lambda path: (paths[path], path.name)):
        match = pattern.fullmatch(path.name)
        if match and paths[path] >= newer_than:
            rows[int(match[2])][match[1]] = path
    return dict(rows)


def select_evenly_spaced(times: Sequence[str], limit: int) -> list[str]:
    """The first, the last, and others evenly between them."""
    if len(times) <= limit:
        return list(times)
    return [times[round(number * (len(times) - 1) / (limit - 1))] for number in range(limit)]


def draw_preview_grid(rows: Sequence[tuple[str, PreviewRow]], columns: Sequence[str]) -> "Image":
    """Pictures with the prompts at their left and the times above them."""
    from PIL import Image, ImageDraw

    pictures = [{when: _load_resized(row[when]) for when in columns if when in row} for _, row in rows]
    widths = [max(row[when].width for row in pictures if when in row) for when in columns]
    heights = [max((picture.height for picture in row.values()), default=TEXT_LINE_HEIGHT) for row in pictures]
    size = (
        GRID_MARGIN * 2 + LABEL_WIDTH + sum(widths) + GRID_GAP * len(widths),
        GRID_MARGIN * 2 + COLUMN_HEADING_HEIGHT + sum(heights) + GRID_GAP * len(heights),
    )
    sheet = Image.new("RGB", size, BACKGROUND)
    pen = TextRenderer(ImageDraw.Draw(sheet))
    lefts = [GRID_MARGIN + LABEL_WIDTH + sum(widths[:number]) + GRID_GAP * number for number in range(len(widths))]
    for when, left, width in zip(columns, lefts, widths, strict=True):
        title = pen.truncate_text(format_column_label(when), width, FONT_SIZE)
        pen.draw_text((left + (width - pen.measure_text(title, FONT_SIZE)) // 2, GRID_MARGIN), title, width, FONT_SIZE)
    top = GRID_MARGIN + COLUMN_HEADING_HEIGHT
    for (text, _), row, height in zip(rows, pictures, heights, strict=True):
        lines = pen.wrap_text(text, LABEL_WIDTH - GRID_GAP, max(1, height // TEXT_LINE_HEIGHT), FONT_SIZE)
        for number, line in enumerate(lines):
            place = GRID_MARGIN, top + (height - len(lines) * TEXT_LINE_HEIGHT) // 2 + number * TEXT_LINE_HEIGHT
            pen.draw_text(place, line, LABEL_WIDTH - GRID_GAP, FONT_SIZE)
        for when, left, width in zip(columns, lefts, widths, strict=True):
            if (picture := row.get(when)) is not None:
                sheet.paste(picture, (left + (width - picture.width) // 2, top + (height - picture.height) // 2))
        top += height + GRID_GAP
    return sheet


def format_column_label(when: str) -> str:
    """What stands above a column."""
    number = int(when.lstrip("e"))
    if number == 0:
        return "before"
    return f"epoch {number}" if when.startswith("e") else f"step {number}"


def _list_columns(rows: Mapping[int, PreviewRow]) -> list[str]:
    """Every time at which anything was drawn, in order; the rows agree about the order."""
    longest = max(rows.values(), key=len, default={})
    return list(longest)


def _load_resized(path: Path) -> "Image":
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    scale = (CELL_AREA / (picture.width * picture.height)) ** 0.5
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)
