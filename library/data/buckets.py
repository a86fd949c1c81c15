"""At which size a picture is trained: to the bit the buckets of sd-scripts, and the crop that is really made."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..config.values import Size
from ..dataset.schema import DatasetConfig
from .symmetric import covering, lying_sizes, nearest


@dataclass(frozen=True, slots=True)
class Placement:
    """A picture is resized, then the bucket is cut out of it; (width, height), and (left, top) of the cut."""

    bucket: tuple[int, int]
    resized: tuple[int, int]
    crop: tuple[int, int]

    @classmethod
    def centred(cls, bucket: tuple[int, int], resized: tuple[int, int]) -> "Placement":
        """With the cut in the middle, as sd-scripts makes it without random_crop."""
        return cls(bucket, resized, ((resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2))

    @property
    def crop_loss(self) -> float:
        """The share of the resized picture that is cut away; on which sides is another matter."""
        return 1 - self.bucket[0] * self.bucket[1] / (self.resized[0] * self.resized[1])


Place = Callable[[int, int], Placement]
"""From the width and height of a picture; ``ValueError`` says why it fits nowhere."""


def place_for(dataset: DatasetConfig) -> Place:
    """How the pictures of a dataset are placed; all of one size have one and the same place."""
    place = _place_for(dataset)
    known: dict[tuple[int, int], Placement] = {}

    def remembered(width: int, height: int) -> Placement:
        if (width, height) not in known:
            known[width, height] = place(width, height)
        return known[width, height]

    return remembered


def _place_for(dataset: DatasetConfig) -> Place:
    if not dataset.enable_bucket:
        return lambda width, height: _single(width, height, dataset.resolution)
    if dataset.bucket_mode == "symmetric":
        return _symmetric(dataset)
    area, step = dataset.resolution.width * dataset.resolution.height, dataset.bucket_reso_steps
    if dataset.bucket_no_upscale:
        return lambda width, height: _never_enlarged(width, height, area, step)
    buckets = bucket_sizes(dataset.resolution, dataset.min_bucket_reso, dataset.max_bucket_reso, step)
    ratios = [width / height for width, height in buckets]
    return lambda width, height: _nearest(width, height, buckets, ratios)


def bucket_sizes(resolution: Size, smallest: int, largest: int, step: int) -> list[tuple[int, int]]:
    """The sizes around the area of ``resolution``; ``smallest`` is rounded down to steps and ``largest`` up."""
    area = resolution.width * resolution.height
    smallest -= smallest % step
    largest += -largest % step
    square = int(math.sqrt(area) // step) * step
    sizes = {(square, square)}
    for width in range(smallest, largest + 1, step):
        height = min(largest, int((area // width) // step) * step)
        if height >= smallest:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def _nearest(width: int, height: int, buckets: list[tuple[int, int]], ratios: list[float]) -> Placement:
    ratio = width / height
    if (width, height) in buckets:
        bucket = (width, height)
    else:
        errors = [abs(candidate - ratio) for candidate in ratios]
        bucket = buckets[errors.index(min(errors))]  # the first of equals, as numpy's argmin
    return Placement.centred(bucket, _covering(width, height, bucket, ratio > bucket[0] / bucket[1]))


def _covering(width: int, height: int, bucket: tuple[int, int], is_wider: bool) -> tuple[int, int]:
    """The size at which the picture just covers the bucket."""
    scale = bucket[1] / height if is_wider else bucket[0] / width
    return int(width * scale + 0.5), int(height * scale + 0.5)


def _never_enlarged(width: int, height: int, area: int, step: int) -> Placement:
    resized = (width, height)
    if width * height > area:
        ratio = width / height
        ideal_width = math.sqrt(area * ratio)
        ideal_height = area / ideal_width
        by_width, by_height = _floored(ideal_width, step), _floored(ideal_height, step)
        height_error, width_error = math.inf, math.inf
        if _floored(by_width / ratio, step) > 0:
            height_error = abs(by_width / _floored(by_width / ratio, step) - ratio)
        if by_height > 0:
            width_error = abs(_floored(by_height * ratio, step) / by_height - ratio)
        if height_error < width_error:
            resized = (by_width, int(by_width / ratio + 0.5))
        else:
            resized = (int(by_height * ratio + 0.5), by_height)
    bucket = (resized[0] - resized[0] % step, resized[1] - resized[1] % step)
    if 0 in bucket:
        raise ValueError(
            f"{width}x{height} pixels leave no bucket with bucket_no_upscale and bucket_reso_steps {step}; each side"
            f" has to keep {step} pixels: use a larger or less narrow picture, or allow enlarging"
        )
    return Placement.centred(bucket, resized)


def _floored(length: float, step: int) -> int:
    rounded = int(length + 0.5)
    return rounded - rounded % step


def _symmetric(dataset: DatasetConfig) -> Place:
    """The nearest bucket by log aspect ratio, if it leaves enough of the picture."""
    resolution, step = dataset.resolution, dataset.bucket_reso_steps
    sizes = lying_sizes(resolution.width * resolution.height, dataset.min_bucket_reso, dataset.max_bucket_reso, step)

    def place(width: int, height: int) -> Placement:
        placement = covered((width, height), nearest(width, height, sizes))
        if placement.crop_loss > dataset.bucket_max_crop:
            raise ValueError(
                f"{width}x{height} pixels would lose {placement.crop_loss:.1%} in the nearest bucket"
                f" {placement.bucket[0]}x{placement.bucket[1]}, more than bucket_max_crop {dataset.bucket_max_crop:g}"
                " allows; cut the picture, or raise max_bucket_reso or bucket_max_crop"
            )
        return placement

    return place


def covered(picture: tuple[int, int], bucket: tuple[int, int]) -> Placement:
    """A picture in a bucket of ``bucket_mode symmetric``."""
    return Placement.centred(bucket, covering(picture, bucket))


def _single(width: int, height: int, resolution: Size) -> Placement:
    """Without buckets each picture covers the one size, as sd-scripts does when it caches latents."""
    bucket = (resolution.width, resolution.height)
    if (width, height) == bucket:
        return Placement.centred(bucket, bucket)
    return Placement.centred(bucket, _covering(width, height, bucket, width / height > bucket[0] / bucket[1]))
