"""Line and bar charts as inline SVG, for the self-contained HTML report."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 30
MAX_POINTS = 1500
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """One curve of a chart."""

    name: str
    points: Points
    is_faint: bool = False  # drawn in grey, in the background


def render_line_chart(curves: Sequence[Curve], x_label: str = "step") -> str:
    """Draw curves over a common x axis; empty without points."""
    curves = [Curve(line.name, _downsample(line.points), line.is_faint) for line in curves if line.points]
    if not curves:
        return ""
    xs = [x for line in curves for x, _ in line.points]
    ys = [y for line in curves for _, y in line.points]
    to_x, x_ticks = _build_scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, is_tight=True)
    to_y, y_ticks = _build_scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [*_render_grid(x_ticks, y_ticks, to_x, to_y), _render_text(WIDTH - RIGHT, HEIGHT - 2, x_label, "end")]
    for number, line in enumerate(curves):
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line.points)
        style = "faint" if line.is_faint else f"line colour{number % 5}"
        parts.append(f'<polyline class="{style}" points="{path}"><title>{escape(line.name)}</title></polyline>')
    legend = ""
    if len(curves) > 1:
        legend = " ".join(
            f'<span class="key {"faint" if line.is_faint else f"colour{number % 5}"}">{escape(line.name)}</span>'
            for number, line in enumerate(curves)
        )
    return _render_figure(parts, legend)


def render_bar_chart(groups: Mapping[str, Sequence[float | None]], names: Sequence[str]) -> str:
    """Draw one bar for each of ``names`` in each group; empty without values."""
    values = [value for row in groups.values() for value in row if value is not None]
    if not values:
        return ""
    to_y, ticks = _build_scale(0.0, max(values), HEIGHT - BOTTOM, TOP)
    parts = _render_grid([], ticks, float, to_y)
    bottom, group_width = to_y(0.0), (WIDTH - LEFT - RIGHT) / len(groups)
    bar_width = group_width * 0.8 / len(names)
    for position, (name, row) in enumerate(groups.items()):
        left = LEFT + group_width * (position + 0.1)
        for number, value in enumerate(row):
            if value is not None:
                top = to_y(value)
                x, size = left + number * bar_width, f'width="{bar_width:.1f}" height="{bottom - top:.1f}"'
                title = f"<title>{escape(name)}: {value:.4g}</title>"
                parts.append(f'<rect class="bar{number}" x="{x:.1f}" y="{top:.1f}" {size}>{title}</rect>')
        parts.append(_render_text(left + group_width * 0.4, HEIGHT - BOTTOM + 16, name, "middle"))
    legend = " ".join(f'<span class="key bar{number}">{escape(name)}</span>' for number, name in enumerate(names))
    return _render_figure(parts, legend)


def _render_figure(parts: Sequence[str], legend: str) -> str:
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'
    return f"<figure>{drawing}<figcaption>{legend}</figcaption></figure>"


Scale = Callable[[float], float]
"""Maps a value to an SVG coordinate."""


def _build_scale(
    lowest: float, highest: float, start: float, end: float, *, is_tight: bool = False
) -> tuple[Scale, list[float]]:
    """Build the scale of an axis, and its ticks at round values; ``is_tight`` does not extend it to the next tick."""
    if highest <= lowest:
        lowest, highest = lowest - (abs(lowest) * 0.1 or 0.5), highest + (abs(highest) * 0.1 or 0.5)
    step = _round_tick_step((highest - lowest) / 5)
    if not is_tight:
        lowest, highest = math.floor(lowest / step) * step, math.ceil(highest / step) * step
    ticks = [step * number for number in range(math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9) + 1)]
    return lambda value: start + (value - lowest) / (highest - lowest) * (end - start), ticks


def _round_tick_step(minimum: float) -> float:
    """Return 1, 2 or 5 times a power of ten that is at least ``minimum``."""
    power = 10.0 ** math.floor(math.log10(minimum))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= minimum * (1 - 1e-9))


def _render_grid(x_ticks: Sequence[float], y_ticks: Sequence[float], to_x: Scale, to_y: Scale) -> list[str]:
    parts = []
    for value in y_ticks:
        y = to_y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_render_text(LEFT - 6, y + 4, f"{value:.4g}", "end"))
    parts += [_render_text(to_x(value), HEIGHT - BOTTOM + 16, f"{value:.6g}", "middle") for value in x_ticks]
    return parts


def _render_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _downsample(points: Points) -> Points:
    """Reduce to at most ``MAX_POINTS`` means of neighbouring points, so that the page stays small."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
