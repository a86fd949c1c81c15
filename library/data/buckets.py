"""At which size a picture is trained: to the bit the buckets of sd-scripts, and the crop that is really made."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..config.values import Resolution
from ..dataset.schema import DatasetConfig
from .symmetric import compute_covering_size, make_landscape_resolutions, find_nearest_bucket


@dataclass(frozen=True, slots=True)
class BucketAssignment:
    """A picture is resized, then the bucket is cut out of it; (width, height), and (left, top) of the cut."""

    bucket_resolution: tuple[int, int]
    resized_size: tuple[int, int]
    crop_left_top: tuple[int, int]

    @classmethod
    def center_crop(cls, bucket_resolution: tuple[int, int], resized_size: tuple[int, int]) -> "BucketAssignment":
        """With the cut in the middle, as sd-scripts makes it without random_crop."""
        return cls(bucket_resolution, resized_size, ((resized_size[0] - bucket_resolution[0]) // 2, (resized_size[1] - bucket_resolution[1]) // 2))

    @property
    def cropped_fraction(self) -> float:
        """The share of the resized picture that is cut away; on which sides is another matter."""
        return 1 - self.bucket_resolution[0] * self.bucket_resolution[1] / (self.resized_size[0] * self.resized_size[1])


BucketAssigner = Callable[[int, int], BucketAssignment]
"""From the width and height of a picture; ``ValueError`` says why it fits nowhere."""


def build_bucket_assigner(dataset: DatasetConfig) -> BucketAssigner:
    """How the pictures of a dataset are placed; all of one size have one and the same place."""
    place = _build_uncached_assigner(dataset)
    known: dict[tuple[int, int], BucketAssignment] = {}

    def assign_cached(width: int, height: int) -> BucketAssignment:
        if (width, height) not in known:
            known[width, height] = place(width, height)
        return known[width, height]

    return assign_cached


def _build_uncached_assigner(dataset: DatasetConfig) -> BucketAssigner:
    if not dataset.enable_bucket:
        return lambda width, height: _assign_single_resolution(width, height, dataset.resolution)
    if dataset.bucket_mode == "symmetric":
        return _build_symmetric_assigner(dataset)
    area, step = dataset.resolution.width * dataset.resolution.height, dataset.bucket_reso_steps
    if dataset.bucket_no_upscale:
        return lambda width, height: _assign_without_upscaling(width, height, area, step)
    buckets = make_bucket_resolutions(dataset.resolution, dataset.min_bucket_reso, dataset.max_bucket_reso, step)
    ratios = [width / height for width, height in buckets]
    return lambda width, height: _assign_nearest_bucket(width, height, buckets, ratios)


def make_bucket_resolutions(resolution: Resolution, min_size: int, max_size: int, step: int) -> list[tuple[int, int]]:
    """The sizes around the area of ``resolution``; ``smallest`` is rounded down to steps and ``largest`` up."""
    area = resolution.width * resolution.height
    min_size -= min_size % step
    max_size += -max_size % step
    square = int(math.sqrt(area) // step) * step
    sizes = {(square, square)}
    for width in range(min_size, max_size + 1, step):
        height = min(max_size, int((area // width) // step) * step)
        if height >= min_size:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def _assign_nearest_bucket(width: int, height: int, bucket_resolutions: list[tuple[int, int]], aspect_ratios: list[float]) -> BucketAssignment:
    ratio = width / height
    if (width, height) in bucket_resolutions:
        bucket = (width, height)
    else:
        errors = [abs(candidate - ratio) for candidate in aspect_ratios]
        bucket = bucket_resolutions[errors.index(min(errors))]  # the first of equals, as numpy's argmin
    return BucketAssignment.center_crop(bucket, _compute_covering_size_kohya(width, height, bucket, ratio > bucket[0] / bucket[1]))


def _compute_covering_size_kohya(width: int, height: int, bucket_resolution: tuple[int, int], is_wider: bool) -> tuple[int, int]:
    """The size at which the picture just covers the bucket."""
    scale = bucket_resolution[1] / height if is_wider else bucket_resolution[0] / width
    return int(width * scale + 0.5), int(height * scale + 0.5)


def _assign_without_upscaling(width: int, height: int, area: int, step: int) -> BucketAssignment:
    resized = (width, height)
    if width * height > area:
        ratio = width / height
        ideal_width = math.sqrt(area * ratio)
        ideal_height = area / ideal_width
        by_width, by_height = _round_down_to_step(ideal_width, step), _round_down_to_step(ideal_height, step)
        height_error, width_error = math.inf, math.inf
        if _round_down_to_step(by_width / ratio, step) > 0:
            height_error = abs(by_width / _round_down_to_step(by_width / ratio, step) - ratio)
        if by_height > 0:
            width_error = abs(_round_down_to_step(by_height * ratio, step) / by_height - ratio)
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
    return BucketAssignment.center_crop(bucket, resized)


def _round_down_to_step(side: float, step: int) -> int:
    rounded = int(side + 0.5)
    return rounded - rounded % step


def _build_symmetric_assigner(dataset: DatasetConfig) -> BucketAssigner:
    """The nearest bucket by log aspect ratio, if it leaves enough of the picture."""
    resolution, step = dataset.resolution, dataset.bucket_reso_steps
    sizes = make_landscape_resolutions(resolution.width * resolution.height, dataset.min_bucket_reso, dataset.max_bucket_reso, step)

    def assign_symmetric(width: int, height: int) -> BucketAssignment:
        placement = assign_to_bucket((width, height), find_nearest_bucket(width, height, sizes))
        if placement.cropped_fraction > dataset.bucket_max_crop:
            raise ValueError(
                f"{width}x{height} pixels would lose {placement.cropped_fraction:.1%} in the nearest bucket"
                f" {placement.bucket_resolution[0]}x{placement.bucket_resolution[1]}, more than bucket_max_crop {dataset.bucket_max_crop:g}"
                " allows; cut the picture, or raise max_bucket_reso or bucket_max_crop"
            )
        return placement

    return assign_symmetric


def assign_to_bucket(image_size: tuple[int, int], bucket_resolution: tuple[int, int]) -> BucketAssignment:
    """A picture in a bucket of ``bucket_mode symmetric``."""
    return BucketAssignment.center_crop(bucket_resolution, compute_covering_size(image_size, bucket_resolution))


def _assign_single_resolution(width: int, height: int, resolution: Resolution) -> BucketAssignment:
    """Without buckets each picture covers the one size, as sd-scripts does when it caches latents."""
    bucket = (resolution.width, resolution.height)
    if (width, height) == bucket:
        return BucketAssignment.center_crop(bucket, bucket)
    return BucketAssignment.center_crop(bucket, _compute_covering_size_kohya(width, height, bucket, width / height > bucket[0] / bucket[1]))
