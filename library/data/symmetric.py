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

Pair = tuple[int, int]

TOLERANCE = 0.02
"""How far the area of a bucket may be from the one that was set, as a share of it."""
WIDEST_GAP = 1.5
CLOSEST = 0.5
"""In pitches: what lies nearer to a bucket than this does not help to close a gap."""


def lying_sizes(area: int, smallest: int, largest: int, step: int) -> list[Pair]:
    """The square and all lying buckets, by their ratio; turned by a quarter they are the upright ones."""
    smallest -= smallest % step
    largest += -largest % step
    side = max(step, round(math.sqrt(area) / step) * step)
    pitch = 2 * step / math.sqrt(area)

    def error(size: Pair) -> float:
        return abs(size[0] * size[1] / area - 1)

    candidates = [size for size in _candidates(area, largest, step) if smallest <= size[1] < size[0] <= largest]
    slots: dict[int, Pair] = {}
    for size in candidates:
        slot = round(ratio_of(size) / pitch)
        if slot > 0 and error(size) <= TOLERANCE and (slot not in slots or error(size) < error(slots[slot])):
            slots[slot] = size
    sizes = sorted({(side, side), *slots.values()}, key=ratio_of)
    return _without_gaps(sizes, sorted((error(size), size) for size in candidates), pitch)


def nearest(width: int, height: int, lying: Sequence[Pair]) -> Pair:
    """The bucket of a picture; of two at equal distance the one nearer to the square."""
    ratio = ratio_of((width, height))
    at = bisect_left(lying, ratio, key=ratio_of)
    if at == len(lying) or (at > 0 and ratio - ratio_of(lying[at - 1]) <= ratio_of(lying[at]) - ratio):
        at -= 1
    long, short = lying[at]
    return (long, short) if width >= height else (short, long)


def covering(picture: Pair, bucket: Pair) -> Pair:
    """The size at which the picture just covers the bucket; in whole numbers, so that turning it changes nothing."""
    width, height = picture
    if width * bucket[1] >= height * bucket[0]:
        return max(bucket[0], _divided(width * bucket[1], height)), bucket[1]
    return bucket[0], max(bucket[1], _divided(height * bucket[0], width))


def ratio_of(size: Pair) -> float:
    """The log aspect ratio, never negative."""
    return math.log(max(size) / min(size))


def _divided(dividend: int, divisor: int) -> int:
    """Rounded to the nearest whole number."""
    return (2 * dividend + divisor) // (2 * divisor)


def _candidates(area: int, largest: int, step: int) -> Iterable[Pair]:
    """For every length of one side the two of the other between which the area lies."""
    sizes = set()
    for side in range(step, largest + 1, step):
        other = area // side // step * step
        sizes |= {(max(side, other), min(side, other)), (max(side, other + step), min(side, other + step))}
    return sizes


def _without_gaps(sizes: Sequence[Pair], by_error: Sequence[tuple[float, Pair]], pitch: float) -> list[Pair]:
    """``sizes`` and what is needed between them; behind the last one there is nothing to be near to."""
    closed = [sizes[0]]
    waiting = list(reversed(sizes[1:]))
    while waiting:
        low, high = ratio_of(closed[-1]), ratio_of(waiting[-1])
        between: Pair | None = None
        if high - low > WIDEST_GAP * pitch:
            between = next((size for error, size in by_error if error < (high - low) / 4
                            and low + CLOSEST * pitch < ratio_of(size) < high - CLOSEST * pitch), None)  # fmt: skip
        if between is not None:
            waiting.append(between)
        else:
            closed.append(waiting.pop())
    return closed
