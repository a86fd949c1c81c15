"""Buckets and sizes of musubi-tuner: the area of ``resolution`` in fixed steps, without limits of the sides."""

import math
from collections.abc import Callable

from ..config.types import Resolution


def make_musubi_buckets(resolution: Resolution, step: int) -> list[tuple[int, int]]:
    """Make the buckets of at most the area of ``resolution``; the shorter sides go from half a square's side to it."""
    area = resolution.width * resolution.height
    side = int(math.sqrt(area))
    shortest = max(_round_down(side // 2, step), step)
    sizes = set()
    for width in range(shortest, side + step, step):
        height = _round_down(area // width, step)
        if height:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def build_musubi_bucket_chooser(
    resolution: Resolution, step: int, *, enable_bucket: bool, no_upscale: bool
) -> Callable[[int, int], tuple[int, int]]:
    """Build the function that chooses the bucket for the width and height of an image.

    With ``no_upscale``, an image of at most the area of ``resolution`` keeps its size, rounded down to steps.  The
    function raises ``ValueError`` if that leaves nothing.
    """
    if not enable_bucket:
        return lambda width, height: (resolution.width, resolution.height)
    buckets, area = make_musubi_buckets(resolution, step), resolution.width * resolution.height

    def choose_bucket(width: int, height: int) -> tuple[int, int]:
        if no_upscale and width * height <= area:
            bucket = _round_down(width, step), _round_down(height, step)
            if 0 in bucket:
                raise ValueError(
                    f"{width}x{height} pixels leave no bucket with bucket_no_upscale: each side needs {step} pixels;"
                    " use a larger image, or allow upscaling"
                )
            return bucket
        ratio = width / height
        return min(buckets, key=lambda bucket: abs(bucket[0] / bucket[1] - ratio))  # the first, as numpy's argmin

    return choose_bucket


def choose_musubi_control_size(
    width: int, height: int, resolution: Resolution | None, step: int, *, keeps_size: bool
) -> tuple[int, int]:
    """Choose the size of a control image that has one of its own, by its shape.

    With ``keeps_size`` that is its own, rounded down to steps, unless its area is above that of ``resolution``.
    """
    if resolution is None or (keeps_size and width * height <= resolution.width * resolution.height):
        return _round_down(width, step), _round_down(height, step)
    area, ratio = resolution.width * resolution.height, width / height
    middle = _round_down(int(math.sqrt(area * ratio)), step)
    widths = [middle + steps * step for steps in range(-2, 3)]
    sizes = [(width, _round_down(area // width, step)) for width in widths if width > 0]
    strip = _round_down(area // step, step), step  # for shapes that no size is near to
    return min((size for size in sizes if size[1]), key=lambda size: abs(size[0] / size[1] - ratio), default=strip)


def compute_musubi_covering_size(image_size: tuple[int, int], bucket: tuple[int, int]) -> tuple[int, int]:
    """Scale an image so that it covers the bucket, by the larger of both scales."""
    if image_size == bucket:
        return bucket
    scale = max(side / length for side, length in zip(bucket, image_size, strict=True))
    width, height = (int(length * scale + 0.5) for length in image_size)
    return width, height


def _round_down(length: int, step: int) -> int:
    return length - length % step
