"""Buckets of one area, the same upright as lying, and the nearest of them by log aspect ratio: pure functions.

A ratio is the natural logarithm of long side / short side.  From a square of side s, one step more on one side and one
less on the other is a ratio of 2 x step / s; this is the *pitch*, in which buckets are wanted, as in sd-scripts.

The square is always a bucket.  The axis of ratios is cut into slots of one pitch around the square, and in each slot
the size of least area error is a bucket if the error is within ``TOLERANCE``.  Where two neighbours lie further apart
than ``WIDEST_GAP`` pitches, the step does not allow the tolerance.  There, the size of least area error between them is
a bucket, too, if that error is less than what it saves: a picture in the middle of a gap g would lose about g / 2 of
itself, and with a bucket in the middle at most g / 4.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

WidthHeight = tuple[int, int]

AREA_TOLERANCE = 0.02
"""How far the area of a bucket may be from the one that was set, as a share of it."""
MAX_GAP_IN_PITCHES = 1.5
MIN_DISTANCE_IN_PITCHES = 0.5
"""In pitches: what lies nearer to a bucket than this does not help to close a gap."""


def make_landscape_resolutions(area: int, min_size: int, max_size: int, step: int) -> list[WidthHeight]:
    """The square and all lying buckets, by their ratio; turned by a quarter they are the upright ones."""
    min_size -= min_size % step
    max_size += -max_size % step
    side = max(step, round(math.sqrt(area) / step) * step)
    pitch = 2 * step / math.sqrt(area)

    def compute_area_error(size: WidthHeight) -> float:
        return abs(size[0] * size[1] / area - 1)

    candidates = [size for size in _list_candidate_resolutions(area, max_size, step) if min_size <= size[1] < size[0] <= max_size]
    slots: dict[int, WidthHeight] = {}
    for size in candidates:
        slot = round(compute_log_aspect_ratio(size) / pitch)
        if slot > 0 and compute_area_error(size) <= AREA_TOLERANCE and (slot not in slots or compute_area_error(size) < compute_area_error(slots[slot])):
            slots[slot] = size
    sizes = sorted({(side, side), *slots.values()}, key=compute_log_aspect_ratio)
    return _fill_gaps(sizes, sorted((compute_area_error(size), size) for size in candidates), pitch)


def find_nearest_bucket(width: int, height: int, landscape_resolutions: Sequence[WidthHeight]) -> WidthHeight:
    """The bucket of a picture; of two at equal distance the one nearer to the square."""
    ratio = compute_log_aspect_ratio((width, height))
    at = bisect_left(landscape_resolutions, ratio, key=compute_log_aspect_ratio)
    if at == len(landscape_resolutions) or (at > 0 and ratio - compute_log_aspect_ratio(landscape_resolutions[at - 1]) <= compute_log_aspect_ratio(landscape_resolutions[at]) - ratio):
        at -= 1
    long, short = landscape_resolutions[at]
    return (long, short) if width >= height else (short, long)


def compute_covering_size(image_size: WidthHeight, bucket_resolution: WidthHeight) -> WidthHeight:
    """The size at which the picture just covers the bucket; in whole numbers, so that turning it changes nothing."""
    width, height = image_size
    if width * bucket_resolution[1] >= height * bucket_resolution[0]:
        return max(bucket_resolution[0], _divide_rounded(width * bucket_resolution[1], height)), bucket_resolution[1]
    return bucket_resolution[0], max(bucket_resolution[1], _divide_rounded(height * bucket_resolution[0], width))


def compute_log_aspect_ratio(resolution: WidthHeight) -> float:
    """The log aspect ratio, never negative."""
    return math.log(max(resolution) / min(resolution))


def _divide_rounded(dividend: int, divisor: int) -> int:
    """Rounded to the nearest whole number."""
    return (2 * dividend + divisor) // (2 * divisor)


def _list_candidate_resolutions(area: int, max_size: int, step: int) -> Iterable[WidthHeight]:
    """For every length of one side the two of the other between which the area lies."""
    sizes = set()
    for side in range(step, max_size + 1, step):
        other = area // side // step * step
        sizes |= {(max(side, other), min(side, other)), (max(side, other + step), min(side, other + step))}
    return sizes


def _fill_gaps(resolutions: Sequence[WidthHeight], candidates_by_error: Sequence[tuple[float, WidthHeight]], pitch: float) -> list[WidthHeight]:
    """``sizes`` and what is needed between them; behind the last one there is nothing to be near to."""
    closed = [resolutions[0]]
    waiting = list(reversed(resolutions[1:]))
    while waiting:
        low, high = compute_log_aspect_ratio(closed[-1]), compute_log_aspect_ratio(waiting[-1])
        between: WidthHeight | None = None
        if high - low > MAX_GAP_IN_PITCHES * pitch:
            between = next((size for error, size in candidates_by_error if error < (high - low) / 4
                            and low + MIN_DISTANCE_IN_PITCHES * pitch < compute_log_aspect_ratio(size) < high - MIN_DISTANCE_IN_PITCHES * pitch), None)  # fmt: skip
        if between is not None:
            waiting.append(between)
        else:
            closed.append(waiting.pop())
    return closed
