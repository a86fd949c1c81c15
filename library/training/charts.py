"""Charts as SVG text, to stand in a page that needs nothing from anywhere."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 30
MOST_POINTS = 1500
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    points: Points
    is_faint: bool = False  # behind the others


def curves(lines: Sequence[Line], across: str = "step") -> str:
    """Curves over a common axis; nothing where there is nothing to draw."""
    lines = [Line(line.name, _thinned(line.points), line.is_faint) for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    to_x, x_marks = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, is_tight=True)
    to_y, y_marks = _scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x_marks, y_marks, to_x, to_y), _text(WIDTH - RIGHT, HEIGHT - 2, across, "end")]
    for number, line in enumerate(lines):
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line.points)
        style = "faint" if line.is_faint else f"line colour{number % 5}"
        parts.append(f'<polyline class="{style}" points="{path}"><title>{escape(line.name)}</title></polyline>')
    legend = ""
    if len(lines) > 1:
        legend = " ".join(f'<span class="key {"faint" if line.is_faint else f"colour{number % 5}"}">{escape(line.name)}'
                          "</span>" for number, line in enumerate(lines))  # fmt: skip
    return _figure(parts, legend)


def bars(groups: Mapping[str, Sequence[float | None]], names: Sequence[str]) -> str:
    """For each entry of ``groups`` one bar for each of ``names``, side by side."""
    values = [value for row in groups.values() for value in row if value is not None]
    if not values:
        return ""
    to_y, marks = _scale(0.0, max(values), HEIGHT - BOTTOM, TOP)
    parts = _grid([], marks, float, to_y)
    bottom, each = to_y(0.0), (WIDTH - LEFT - RIGHT) / len(groups)
    wide = each * 0.8 / len(names)
    for place, (name, row) in enumerate(groups.items()):
        left = LEFT + each * (place + 0.1)
        for number, value in enumerate(row):
            if value is not None:
                top = to_y(value)
                frame = f'x="{left + number * wide:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{bottom - top:.1f}"'
                title = f"<title>{escape(name)}: {value:.4g}</title>"
                parts.append(f'<rect class="bar{number}" {frame}>{title}</rect>')
        parts.append(_text(left + each * 0.4, HEIGHT - BOTTOM + 16, name, "middle"))
    legend = " ".join(f'<span class="key bar{number}">{escape(name)}</span>' for number, name in enumerate(names))
    return _figure(parts, legend)


def _figure(parts: Sequence[str], legend: str) -> str:
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'
    return f"<figure>{drawing}<figcaption>{legend}</figcaption></figure>"


Place = Callable[[float], float]
"""From a value to where it is drawn."""


def _scale(lowest: float, highest: float, start: float, end: float, *,
           is_tight: bool = False) -> tuple[Place, list[float]]:  # fmt: skip
    """From values to places, and round values to mark."""
    if highest <= lowest:
        lowest, highest = lowest - (abs(lowest) * 0.1 or 0.5), highest + (abs(highest) * 0.1 or 0.5)
    step = _round_step((highest - lowest) / 5)
    if not is_tight:
        lowest, highest = math.floor(lowest / step) * step, math.ceil(highest / step) * step
    marks = [step * number for number in range(math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9) + 1)]
    return lambda value: start + (value - lowest) / (highest - lowest) * (end - start), marks


def _round_step(wanted: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``wanted``."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def _grid(x_marks: Sequence[float], y_marks: Sequence[float], to_x: Place, to_y: Place) -> list[str]:
    parts = []
    for value in y_marks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{to_y(value):.1f}" y2="{to_y(value):.1f}"/>'
        )
        parts.append(_text(LEFT - 6, to_y(value) + 4, f"{value:.4g}", "end"))
    parts += [_text(to_x(value), HEIGHT - BOTTOM + 16, f"{value:.6g}", "middle") for value in x_marks]
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _thinned(points: Points) -> Points:
    """At most so many points that a page stays small; each stands for the mean of those it replaces."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
