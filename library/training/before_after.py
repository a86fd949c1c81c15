"""One picture of a whole run: a row for each prompt, a column for each time previews were drawn, the first on the left.

It is made of the preview files that the run wrote, whichever process wrote them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.sheet_text import Pen

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_COLUMNS, MOST_ROWS = 6, 16
AREA = 208 * 208
"""Of each picture on the sheet, in pixels; small ones are enlarged."""
MARGIN, GAP, LABEL_WIDTH, HEADING, LINE, TEXT = 20, 8, 170, 34, 20, 15
PAPER = (255, 255, 255)

Row = dict[str, Path]
"""When a picture was drawn, as its file name says it, and the file."""


def write(folder: Path, name: str, prompts: Sequence[str], since: float, target: Path) -> Path | None:
    """Draw the sheet of the previews in ``folder`` that are not older than ``since``, if there are at least two times.

    ``name`` is what their file names begin with.
    """
    rows = found(folder, name, since)
    times = _times(rows)
    if len(times) < 2:
        return None
    columns = spread(times, MOST_COLUMNS)
    sheet = draw([(prompts[index], rows[index]) for index in sorted(rows)[:MOST_ROWS]], columns)
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target, optimize=True)
    return target


def found(folder: Path, name: str, since: float) -> dict[int, Row]:
    """The previews by number of the prompt, each row in the order in which they were drawn."""
    pattern = re.compile(re.escape(name) + r"_(e?\d{6,})_(\d{2,})_\d{14}_\d+\.png")
    rows: defaultdict[int, Row] = defaultdict(dict)
    paths = {path: path.stat().st_mtime for path in folder.glob("*.png")}
    for path in sorted(paths, key=lambda path: (paths[path], path.name)):
        match = pattern.fullmatch(path.name)
        if match and paths[path] >= since:
            rows[int(match[2])][match[1]] = path
    return dict(rows)


def spread(times: Sequence[str], most: int) -> list[str]:
    """The first, the last, and others evenly between them."""
    if len(times) <= most:
        return list(times)
    return [times[round(number * (len(times) - 1) / (most - 1))] for number in range(most)]


def draw(rows: Sequence[tuple[str, Row]], columns: Sequence[str]) -> "Image":
    """Pictures with the prompts at their left and the times above them."""
    from PIL import Image, ImageDraw

    pictures = [{when: _sized(row[when]) for when in columns if when in row} for _, row in rows]
    widths = [max(row[when].width for row in pictures if when in row) for when in columns]
    heights = [max((picture.height for picture in row.values()), default=LINE) for row in pictures]
    size = (MARGIN * 2 + LABEL_WIDTH + sum(widths) + GAP * len(widths), MARGIN * 2 + HEADING + sum(heights)
            + GAP * len(heights))  # fmt: skip
    sheet = Image.new("RGB", size, PAPER)
    pen = Pen(ImageDraw.Draw(sheet))
    lefts = [MARGIN + LABEL_WIDTH + sum(widths[:number]) + GAP * number for number in range(len(widths))]
    for when, left, width in zip(columns, lefts, widths, strict=True):
        title = pen.fitted(label(when), width, TEXT)
        pen.write((left + (width - pen.length(title, TEXT)) // 2, MARGIN), title, width, TEXT)
    top = MARGIN + HEADING
    for (text, _), row, height in zip(rows, pictures, heights, strict=True):
        lines = pen.wrapped(text, LABEL_WIDTH - GAP, max(1, height // LINE), TEXT)
        for number, line in enumerate(lines):
            place = MARGIN, top + (height - len(lines) * LINE) // 2 + number * LINE
            pen.write(place, line, LABEL_WIDTH - GAP, TEXT)
        for when, left, width in zip(columns, lefts, widths, strict=True):
            if (picture := row.get(when)) is not None:
                sheet.paste(picture, (left + (width - picture.width) // 2, top + (height - picture.height) // 2))
        top += height + GAP
    return sheet


def label(when: str) -> str:
    """What stands above a column."""
    number = int(when.lstrip("e"))
    if number == 0:
        return "before"
    return f"epoch {number}" if when.startswith("e") else f"step {number}"


def _times(rows: Mapping[int, Row]) -> list[str]:
    """Every time at which anything was drawn, in order; the rows agree about the order."""
    longest = max(rows.values(), key=len, default={})
    return list(longest)


def _sized(path: Path) -> "Image":
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    scale = (AREA / (picture.width * picture.height)) ** 0.5
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)
