"""The result of an evaluation as one picture: curves with confidence intervals, and pictures of each step below."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageOps

from ..dataloader.contact_sheet_text import TextRenderer
from .caption_sets import COMPOSING, TRAINING, UNRELATED, VALIDATION, CaptionSet
from .file_metrics import COPYING, DRIFT, LIKENESS
from .pictures import PictureRows
from .seed_bootstrap import Estimate, Resampler
from .verdict import MAX_COPYING, MAX_DRIFT, MIN_LIKENESS, EvaluationVerdict, JudgedStep

WIDTH, MARGIN, GAP = 1240, 24, 18
PANEL_HEIGHT, AXIS_WIDTH, AXIS_HEIGHT = 230, 44, 24
CELL, LABEL_WIDTH, MAX_EXAMPLES = 104, 176, 7
PAPER, CARD, INK, SOFT, GRID = (251, 251, 250), (255, 255, 255), (28, 34, 43), (92, 102, 117), (226, 228, 232)
COLORS = ((194, 65, 12), (29, 78, 216), (4, 120, 87), (126, 34, 206), (180, 83, 9), (14, 116, 144), (190, 24, 93))
"""The colors of the runs, which are those of the report of a run."""

Color = tuple[int, int, int]
PANELS = (
    (LIKENESS, "Likeness: more is better", MIN_LIKENESS),
    (COPYING, "Copying: less is better", MAX_COPYING),
    (DRIFT, "Drift without the subject: less is better", MAX_DRIFT),
)
LOSS_TITLE = "Validation loss"


@dataclass(frozen=True)
class ExamplePictures:
    """The pictures to show: real ones, those of the base model, and those of each step in the order of the verdict."""

    caption_sets: Sequence[CaptionSet]
    training: Sequence[Image.Image]
    base: Mapping[str, PictureRows]
    steps: Sequence[Mapping[str, PictureRows]]


@dataclass(frozen=True)
class _Point:
    step: float
    estimate: Estimate
    is_best: bool


@dataclass(frozen=True)
class _Panel:
    """One chart: its title, a curve of points for each run, and the limit above or below which a step is good."""

    title: str
    curves: Mapping[str, Sequence[_Point]]
    limit: float | None = None


def draw_result(verdict: EvaluationVerdict, resampler: Resampler, examples: ExamplePictures | None) -> Image.Image:
    """Draw the sentence, the charts and the example pictures, if there are any."""
    panels = _build_panels(verdict, resampler)
    canvas = Image.new("RGB", (WIDTH, 4000), PAPER)
    pen = ImageDraw.Draw(canvas, "RGBA")
    text = TextRenderer(pen)
    top = MARGIN
    for line in text.wrap_text(verdict.format_sentence(), WIDTH - 2 * MARGIN, 4, 17):
        text.draw_text((MARGIN, top), line, WIDTH - 2 * MARGIN, 17, INK)
        top += 26
    top = _draw_legend(text, pen, list(verdict.best_by_run), top + 4)
    width = (WIDTH - 2 * MARGIN - GAP * (len(panels) - 1)) // max(1, len(panels))
    for index, panel in enumerate(panels):
        _draw_panel(text, pen, panel, (MARGIN + index * (width + GAP), top, width))
    top += PANEL_HEIGHT + GAP
    if examples is not None:
        top = _draw_examples(canvas, text, _list_columns(verdict, examples), _choose_rows(examples), top)
    return canvas.crop((0, 0, WIDTH, top + MARGIN))


def _build_panels(verdict: EvaluationVerdict, resampler: Resampler) -> list[_Panel]:
    def collect(read: Callable[[JudgedStep], Estimate | None]) -> dict[str, list[_Point]]:
        curves: dict[str, list[_Point]] = {}
        for step in verdict.steps:
            if (estimate := read(step)) is not None:
                point = _Point(step.metrics.step, estimate, step is verdict.best_by_run[step.metrics.run])
                curves.setdefault(step.metrics.run, []).append(point)
        return curves

    def read_metric(name: str) -> Callable[[JudgedStep], Estimate | None]:
        def read(step: JudgedStep) -> Estimate | None:
            found = step.metrics.statistics.get(name)
            return None if found is None else resampler.estimate(found.statistic, found.group)

        return read

    def read_loss(step: JudgedStep) -> Estimate | None:
        loss = step.metrics.validation_loss
        return None if loss is None else Estimate(loss)

    panels = [_Panel(title, collect(read_metric(name)), limit) for name, title, limit in PANELS]
    panels.append(_Panel(LOSS_TITLE, collect(read_loss)))
    return [panel for panel in panels if panel.curves]


def _draw_legend(text: TextRenderer, pen: ImageDraw.ImageDraw, runs: Sequence[str], top: int) -> int:
    left = MARGIN
    for number, run in enumerate(runs):
        pen.rectangle((left, top + 5, left + 14, top + 15), fill=_get_color(number))
        text.draw_text((left + 20, top), run, 240, 14, INK)
        left += 44 + min(240, text.measure_text(run, 14))
    note = "band: 95 % interval from seeds; large dot: best step of the run; dashed: limit"
    text.draw_text((left + 10, top), note, WIDTH - left - MARGIN, 13, SOFT)
    return top + 30


def _draw_panel(text: TextRenderer, pen: ImageDraw.ImageDraw, panel: _Panel, place: tuple[int, int, int]) -> None:
    """Draw one chart; the steps have a logarithmic axis where they differ by more than a factor of 10."""
    left, top, width = place
    pen.rounded_rectangle((left, top, left + width, top + PANEL_HEIGHT), 8, fill=CARD, outline=GRID)
    text.draw_text((left + 12, top + 8), panel.title, width - 24, 13, SOFT)
    inner = (left + AXIS_WIDTH, top + 36, left + width - 14, top + PANEL_HEIGHT - AXIS_HEIGHT - 6)
    points = [point for curve in panel.curves.values() for point in curve]
    map_x, steps = _scale_steps([point.step for point in points], (inner[0] + 8, inner[2] - 8))
    map_y, ticks = _scale_values(points, panel.limit, (inner[1], inner[3]))
    for tick in ticks:
        pen.line((inner[0], map_y(tick), inner[2], map_y(tick)), fill=GRID)
        text.draw_text((left + 8, round(map_y(tick)) - 8), f"{tick:.3g}", AXIS_WIDTH - 10, 11, SOFT)
    for step in steps:
        label = f"{step:g}"
        place_x = round(map_x(step)) - text.measure_text(label, 11) // 2
        text.draw_text((place_x, inner[3] + 8), label, 60, 11, SOFT)
    if panel.limit is not None:
        _draw_dashes(pen, (inner[0], inner[2]), map_y(panel.limit))
    for number, curve in enumerate(panel.curves.values()):
        _draw_curve(pen, sorted(curve, key=lambda point: point.step), _get_color(number), map_x, map_y)


def _draw_curve(
    pen: ImageDraw.ImageDraw,
    curve: Sequence[_Point],
    color: Color,
    map_x: Callable[[float], float],
    map_y: Callable[[float], float],
) -> None:
    bounds = [(each, each.estimate.low, each.estimate.high) for each in curve]
    known = [(each, low, high) for each, low, high in bounds if low is not None and high is not None]
    if len(known) > 1:
        upper = [(map_x(each.step), map_y(high)) for each, _, high in known]
        lower = [(map_x(each.step), map_y(low)) for each, low, _ in reversed(known)]
        pen.polygon([*upper, *lower], fill=(*color, 45))
    for each, low, high in known:
        pen.line((map_x(each.step), map_y(low), map_x(each.step), map_y(high)), fill=(*color, 150), width=2)
    line = [(map_x(each.step), map_y(each.estimate.value)) for each in curve]
    if len(line) > 1:
        pen.line(line, fill=color, width=2)
    for each, (x, y) in zip(curve, line, strict=True):
        radius = 6 if each.is_best else 3
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color, outline=CARD)


def _draw_dashes(pen: ImageDraw.ImageDraw, ends: tuple[int, int], y: float) -> None:
    for x in range(ends[0], ends[1], 10):
        pen.line((x, y, min(x + 5, ends[1]), y), fill=SOFT)


def _scale_steps(steps: Sequence[float], ends: tuple[int, int]) -> tuple[Callable[[float], float], list[float]]:
    """Map steps to pixels, and choose at most five to label."""
    known = sorted(set(steps))
    low, high = known[0], known[-1]
    is_logarithmic = low > 0 and high / low > 10

    def transform(step: float) -> float:
        return math.log(step) if is_logarithmic else step

    width = transform(high) - transform(low)

    def map_x(step: float) -> float:
        share = (transform(step) - transform(low)) / width if width else 0.5
        return ends[0] + share * (ends[1] - ends[0])

    labels = [known[0]]
    for step in known[1:]:
        if map_x(step) - map_x(labels[-1]) > 46:
            labels.append(step)
    return map_x, labels


def _scale_values(
    points: Sequence[_Point], limit: float | None, ends: tuple[int, int]
) -> tuple[Callable[[float], float], list[float]]:
    """Map values to pixels, with room for intervals and the limit, and choose ticks at round numbers."""
    estimates = [point.estimate for point in points]
    values = [bound for each in estimates for bound in (each.value, each.low, each.high) if bound is not None]
    if limit is not None:
        values += [0.0, limit, 1.0 if max(values) > 0.6 else limit * 1.2]
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or 0.1
    low, high = (low if low == 0 else low - margin), high + margin
    size = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5)
    ticks = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]

    def map_y(value: float) -> float:
        return ends[1] - (value - low) / (high - low) * (ends[1] - ends[0])

    return map_y, ticks


def _choose_columns(verdict: EvaluationVerdict) -> list[int]:
    """Choose the steps whose pictures are shown: the best of each run, and evenly spaced others, in their order."""
    chosen = [index for index, step in enumerate(verdict.steps) if step in verdict.best_by_run.values()]
    others = [index for index in range(len(verdict.steps)) if index not in chosen]
    room = max(0, MAX_EXAMPLES - len(chosen))
    if len(others) > room:
        others = [others[round(n * (len(others) - 1) / max(1, room - 1))] for n in range(room)]
    return sorted({*chosen[:MAX_EXAMPLES], *others})


def _choose_rows(examples: ExamplePictures) -> list[tuple[CaptionSet, int]]:
    """Choose the captions whose pictures are shown."""
    counts = {TRAINING: 2, VALIDATION: 1, COMPOSING: 2, UNRELATED: 4}
    return [
        (captions, index)
        for captions in examples.caption_sets
        for index in range(min(counts[captions.group], len(captions.prompts)))
    ]


def _draw_examples(
    canvas: Image.Image,
    text: TextRenderer,
    columns: Sequence[tuple[str, Callable[[str, int], Image.Image | None]]],
    rows: Sequence[tuple[CaptionSet, int]],
    top: int,
) -> int:
    """Draw a row for each caption and a column for each of ``columns``, which have a title and find a picture."""
    for number, (title, _) in enumerate(columns):
        for line, part in enumerate(text.wrap_text(title, CELL, 2, 12)):
            text.draw_text((_get_left(number), top + 16 * line), part, CELL - 4, 12, SOFT)
    top += 38
    for captions, index in rows:
        label = captions.prompts[index].text
        text.draw_text((MARGIN, top + 24), captions.group, LABEL_WIDTH - 12, 12, SOFT)
        for line, part in enumerate(text.wrap_text(label, LABEL_WIDTH - 12, 3, 14)):
            text.draw_text((MARGIN, top + 42 + 18 * line), part, LABEL_WIDTH - 12, 14, INK)
        for number, (_, find) in enumerate(columns):
            image = find(captions.group, index)
            if image is not None:
                shown = ImageOps.contain(image, (CELL - 8, CELL - 8))
                margin = (CELL - 8 - shown.width) // 2, (CELL - 8 - shown.height) // 2
                canvas.paste(shown, (_get_left(number) + margin[0], top + margin[1]))
        top += CELL
    return top


def _list_columns(
    verdict: EvaluationVerdict, examples: ExamplePictures
) -> list[tuple[str, Callable[[str, int], Image.Image | None]]]:
    """List what the rows show: a training picture, the base model, and the chosen steps, all with the first seed."""

    def find_real(group: str, index: int) -> Image.Image | None:
        is_subject = group in (TRAINING, VALIDATION)
        return examples.training[index % len(examples.training)] if is_subject else None

    def read(pictures: Mapping[str, PictureRows]) -> Callable[[str, int], Image.Image | None]:
        return lambda group, index: pictures[group][index][0]

    columns = [("a training picture", find_real), ("without LoRA", read(examples.base))]
    for index in _choose_columns(verdict):
        step = verdict.steps[index]
        columns.append((f"{'* ' if step is verdict.best else ''}{step.name}", read(examples.steps[index])))
    return columns


def _get_left(column: int) -> int:
    return MARGIN + LABEL_WIDTH + column * CELL


def _get_color(number: int) -> Color:
    return COLORS[number % len(COLORS)]
