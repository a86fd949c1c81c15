"""Aspect-ratio buckets: exactly sd-scripts' (``bucket_mode kohya``), symmetric ones, and merging of small ones."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..config.types import Resolution
from ..dataset.controls import CONTROL_SIZE_STEP
from ..dataset.mask_files import has_same_aspect_ratio
from ..dataset.schema import DatasetConfig
from .manifest import Sample
from .musubi_buckets import build_musubi_bucket_chooser, choose_musubi_control_size, compute_musubi_covering_size


@dataclass(frozen=True, slots=True)
class BucketAssignment:
    """The size to which an image is resized, and the bucket cropped from it; (width, height) and (left, top)."""

    bucket_resolution: tuple[int, int]
    resized_size: tuple[int, int]
    crop_left_top: tuple[int, int]

    @classmethod
    def center_crop(cls, bucket_resolution: tuple[int, int], resized_size: tuple[int, int]) -> "BucketAssignment":
        """Crop in the center, as sd-scripts does without random_crop."""
        left, top = ((size - side) // 2 for size, side in zip(resized_size, bucket_resolution, strict=True))
        return cls(bucket_resolution, resized_size, (left, top))

    @property
    def cropped_fraction(self) -> float:
        """Fraction of the resized image that is cropped away."""
        return 1 - self.bucket_resolution[0] * self.bucket_resolution[1] / (self.resized_size[0] * self.resized_size[1])


BucketAssigner = Callable[[int, int], BucketAssignment]
"""Maps the width and height of an image to a bucket; ``ValueError`` if it fits none."""


def build_bucket_assigner(dataset: DatasetConfig) -> BucketAssigner:
    """Build the function that assigns images of a dataset to buckets, cached by image size."""
    assign = _build_uncached_assigner(dataset)
    assigned: dict[tuple[int, int], BucketAssignment] = {}

    def assign_cached(width: int, height: int) -> BucketAssignment:
        if (width, height) not in assigned:
            assigned[width, height] = assign(width, height)
        return assigned[width, height]

    return assign_cached


def _build_uncached_assigner(dataset: DatasetConfig) -> BucketAssigner:
    if dataset.file_format == "musubi-tuner":
        return _build_musubi_assigner(dataset)
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
    """Make sd-scripts' buckets of at most the area of ``resolution``; ``min_size`` is rounded down, ``max_size`` up."""
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


def _assign_nearest_bucket(
    width: int, height: int, bucket_resolutions: list[tuple[int, int]], aspect_ratios: list[float]
) -> BucketAssignment:
    ratio = width / height
    if (width, height) in bucket_resolutions:
        bucket = (width, height)
    else:
        errors = [abs(candidate - ratio) for candidate in aspect_ratios]
        bucket = bucket_resolutions[errors.index(min(errors))]  # the first minimum, as numpy's argmin
    return BucketAssignment.center_crop(
        bucket, _compute_covering_size_kohya(width, height, bucket, ratio > bucket[0] / bucket[1])
    )


def _compute_covering_size_kohya(
    width: int, height: int, bucket_resolution: tuple[int, int], is_wider: bool
) -> tuple[int, int]:
    """Scale the image so that it just covers the bucket."""
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
            f"{width}x{height} pixels leave no bucket with bucket_no_upscale and bucket_reso_steps {step}: each side"
            f" needs {step} pixels; use a larger or less narrow image, or allow upscaling"
        )
    return BucketAssignment.center_crop(bucket, resized)


def _round_down_to_step(side: float, step: int) -> int:
    rounded = int(side + 0.5)
    return rounded - rounded % step


def _build_symmetric_assigner(dataset: DatasetConfig) -> BucketAssigner:
    """Assign to the bucket nearest by log aspect ratio, if it does not crop too much."""
    resolution, step = dataset.resolution, dataset.bucket_reso_steps
    sizes = make_landscape_resolutions(
        resolution.width * resolution.height, dataset.min_bucket_reso, dataset.max_bucket_reso, step
    )

    def assign_symmetric(width: int, height: int) -> BucketAssignment:
        assignment = assign_to_bucket((width, height), find_nearest_bucket(width, height, sizes))
        if assignment.cropped_fraction > dataset.bucket_max_crop:
            bucket = _format_resolution(assignment.bucket_resolution)
            raise ValueError(
                f"{width}x{height} pixels would lose {assignment.cropped_fraction:.1%} in the nearest bucket {bucket},"
                f" more than bucket_max_crop {dataset.bucket_max_crop:g} allows; crop the image, or raise"
                " max_bucket_reso or bucket_max_crop"
            )
        return assignment

    return assign_symmetric


def _build_musubi_assigner(dataset: DatasetConfig) -> BucketAssigner:
    choose_bucket = build_musubi_bucket_chooser(
        dataset.resolution,
        dataset.bucket_reso_steps,
        enable_bucket=dataset.enable_bucket,
        no_upscale=dataset.bucket_no_upscale,
    )
    return lambda width, height: _cover_musubi_bucket((width, height), choose_bucket(width, height))


def _cover_musubi_bucket(image_size: tuple[int, int], bucket_resolution: tuple[int, int]) -> BucketAssignment:
    return BucketAssignment.center_crop(bucket_resolution, compute_musubi_covering_size(image_size, bucket_resolution))


def assign_to_bucket(image_size: tuple[int, int], bucket_resolution: tuple[int, int]) -> BucketAssignment:
    """Assign an image to a given bucket of ``bucket_mode symmetric``."""
    return BucketAssignment.center_crop(bucket_resolution, compute_covering_size(image_size, bucket_resolution))


def _assign_single_resolution(width: int, height: int, resolution: Resolution) -> BucketAssignment:
    """Crop every image to ``resolution``, as sd-scripts does without buckets when it caches latents."""
    bucket = (resolution.width, resolution.height)
    if (width, height) == bucket:
        return BucketAssignment.center_crop(bucket, bucket)
    return BucketAssignment.center_crop(
        bucket, _compute_covering_size_kohya(width, height, bucket, width / height > bucket[0] / bucket[1])
    )


def assign_controls(
    sample: Sample, assignment: BucketAssignment, dataset: DatasetConfig
) -> tuple[BucketAssignment, ...]:
    """Assign the control images of a sample: to the bucket of their picture, or each to a size of its own."""
    assigned = []
    for control in sample.controls:
        if control.is_reference:
            assigned.append(assign_reference(control.size, assignment.bucket_resolution))
        elif control.square_side:
            square = Resolution(control.square_side, control.square_side)
            assigned.append(_assign_single_resolution(*control.size, square))
        elif dataset.file_format == "musubi-tuner" and not dataset.subsets[sample.subset_index].random_crop:
            assigned.append(_assign_musubi_control(control.size, assignment.bucket_resolution, dataset))
        elif dataset.has_own_control_size:
            size = assign_control_size(*control.size, dataset.control_resolution, dataset.no_resize_control)
            assigned.append(size)
        elif has_same_aspect_ratio(control.size, sample.size):
            assigned.append(assignment)
        else:
            assigned.append(_assign_single_resolution(*control.size, Resolution(*assignment.bucket_resolution)))
    return tuple(assigned)


def assign_reference(size: tuple[int, int], bucket_resolution: tuple[int, int]) -> BucketAssignment:
    """Fit a reference image into the bucket of its clip, as VACE does; the rest of it is white."""
    scale = min(bucket_resolution[0] / size[0], bucket_resolution[1] / size[1])
    resized = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
    return BucketAssignment(bucket_resolution, resized, (0, 0))


BucketKey = tuple[int, tuple[int, int], int, bool, tuple[tuple[int, int], ...], int]
"""What the samples of a bucket have in common: dataset, resolution, frames, whether they have sound, the resolutions of
control images, and how many of these, the last ones, are reference images of clips."""


def build_bucket_key(sample: Sample, assignment: BucketAssignment, dataset: DatasetConfig) -> BucketKey:
    """Build what a sample has in common with the others of its bucket."""
    controls = tuple(each.bucket_resolution for each in assign_controls(sample, assignment, dataset))
    num_references = sum(each.is_reference for each in sample.controls)
    return (
        sample.dataset_index,
        assignment.bucket_resolution,
        sample.num_frames,
        sample.has_sound,
        controls,
        num_references,
    )


def _assign_musubi_control(
    size: tuple[int, int], bucket_resolution: tuple[int, int], dataset: DatasetConfig
) -> BucketAssignment:
    """Assign a control image to the bucket of its picture, or to a size of its own."""
    if dataset.has_own_control_size:
        bucket_resolution = choose_musubi_control_size(
            *size, dataset.control_resolution, dataset.bucket_reso_steps, keeps_size=dataset.no_resize_control
        )
    return _cover_musubi_bucket(size, bucket_resolution)


def list_control_facts(sample: Sample, assignments: Sequence[BucketAssignment]) -> Iterator[str | int]:
    """List all that decides the pixels of the control images of a sample besides flip and filter."""
    for control, own in zip(sample.controls, assignments, strict=True):
        kind = "reference" if control.is_reference else "control"
        yield from (kind, control.content_hash, *own.resized_size, *own.crop_left_top, *own.bucket_resolution)
        if control.clip is not None:
            yield control.clip.conversion.describe()
        if control.made:
            yield control.made
        if control.has_alpha:
            yield "alpha"
        if control.is_mask:
            yield "mask file"


def assign_control_size(width: int, height: int, resolution: Resolution | None, keeps_size: bool) -> BucketAssignment:
    """Assign a control image to a bucket of ``resolution``, or crop it to whole steps where it keeps its size."""
    step = CONTROL_SIZE_STEP
    area = math.inf if resolution is None else resolution.width * resolution.height
    if resolution is None or (keeps_size and width * height <= area):
        bucket = (width - width % step, height - height % step)
        return BucketAssignment.center_crop(bucket, (width, height))
    side = int(math.sqrt(area))
    buckets = make_bucket_resolutions(resolution, max(step, side // 2), 2 * side, step)
    return _assign_nearest_bucket(width, height, buckets, [each[0] / each[1] for each in buckets])


def merge_small_buckets(
    samples: Sequence[Sample], assignments: Sequence[BucketAssignment], datasets: Sequence[DatasetConfig]
) -> tuple[tuple[BucketAssignment, ...], list[str]]:
    """Merge buckets with fewer than ``bucket_min_images`` images; return the assignments and a note for each bucket.

    Images are counted without repeats.  The smallest bucket first joins the one nearest by log aspect ratio.  A bucket
    stays if one of its images would lose more than ``bucket_max_crop``.
    """
    merged, notes = list(assignments), []
    for number, dataset in enumerate(datasets):
        has_symmetric_buckets = dataset.enable_bucket and dataset.bucket_mode == "symmetric"
        if not has_symmetric_buckets or dataset.bucket_min_images == 1:
            continue
        members: defaultdict[WidthHeight, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            if sample.dataset_index == number:
                members[merged[index].bucket_resolution].append(index)
        stays: set[WidthHeight] = set()
        while (small := _find_smallest_bucket(members, dataset.bucket_min_images, stays)) is not None and len(
            members
        ) > 1:
            target = _find_nearest_neighbor(small, members)
            moved = {index: assign_to_bucket(samples[index].size, target) for index in members[small]}
            worst = max(assignment.cropped_fraction for assignment in moved.values())
            what = (
                f"dataset {number + 1}: bucket {_format_resolution(small)} has fewer images ({len(moved)}) than"
                f" bucket_min_images {dataset.bucket_min_images}"
            )
            if worst > dataset.bucket_max_crop:
                stays.add(small)
                notes.append(
                    f"{what}, and stays: in {_format_resolution(target)} an image would lose {worst:.1%}, more than"
                    f" bucket_max_crop {dataset.bucket_max_crop:g}"
                )
                continue
            for index, assignment in moved.items():
                merged[index] = assignment
            members[target] += members.pop(small)
            notes.append(f"{what}; merged into {_format_resolution(target)}, where images lose at most {worst:.1%}")
    return tuple(merged), notes


WidthHeight = tuple[int, int]


def _find_smallest_bucket(
    bucket_members: dict[WidthHeight, list[int]], min_images: int, unmergeable: set[WidthHeight]
) -> WidthHeight | None:
    """Find the bucket with the fewest images; of equal ones the one farthest from the square."""
    small = [
        bucket for bucket in bucket_members if len(bucket_members[bucket]) < min_images and bucket not in unmergeable
    ]
    return min(
        small, key=lambda bucket: (len(bucket_members[bucket]), -compute_log_aspect_ratio(bucket), bucket), default=None
    )


def _find_nearest_neighbor(small_bucket: WidthHeight, bucket_members: dict[WidthHeight, list[int]]) -> WidthHeight:
    def compute_distance(bucket: WidthHeight) -> tuple[float, int, WidthHeight]:
        return (
            abs(_compute_signed_log_ratio(bucket) - _compute_signed_log_ratio(small_bucket)),
            -len(bucket_members[bucket]),
            bucket,
        )

    return min((bucket for bucket in bucket_members if bucket != small_bucket), key=compute_distance)


def _compute_signed_log_ratio(resolution: WidthHeight) -> float:
    """Compute the logarithm of the aspect ratio, which is positive for landscape and negative for portrait."""
    ratio = compute_log_aspect_ratio(resolution)
    return ratio if resolution[0] >= resolution[1] else -ratio


def _format_resolution(resolution: WidthHeight) -> str:
    return f"{resolution[0]}x{resolution[1]}"


AREA_TOLERANCE = 0.02
"""Relative deviation of a bucket's area from that of ``resolution``."""

MAX_GAP_IN_PITCHES = 1.5
MIN_DISTANCE_IN_PITCHES = 0.5
"""A candidate nearer to a bucket than this does not close a gap."""


def make_landscape_resolutions(area: int, min_size: int, max_size: int, step: int) -> list[WidthHeight]:
    """Make the square and the landscape buckets, sorted by aspect ratio; portrait buckets are their transposes."""
    min_size -= min_size % step
    max_size += -max_size % step
    side = max(step, round(math.sqrt(area) / step) * step)
    pitch = 2 * step / math.sqrt(area)

    def compute_area_error(size: WidthHeight) -> float:
        return abs(size[0] * size[1] / area - 1)

    candidates = [
        size for size in _list_candidate_resolutions(area, max_size, step) if min_size <= size[1] < size[0] <= max_size
    ]
    slots: dict[int, WidthHeight] = {}
    for size in candidates:
        slot = round(compute_log_aspect_ratio(size) / pitch)
        if (
            slot > 0
            and compute_area_error(size) <= AREA_TOLERANCE
            and (slot not in slots or compute_area_error(size) < compute_area_error(slots[slot]))
        ):
            slots[slot] = size
    sizes = sorted({(side, side), *slots.values()}, key=compute_log_aspect_ratio)
    return _fill_gaps(sizes, sorted((compute_area_error(size), size) for size in candidates), pitch)


def find_nearest_bucket(width: int, height: int, landscape_resolutions: Sequence[WidthHeight]) -> WidthHeight:
    """Find the bucket of an image; of two equally near ones the one closer to the square."""
    ratio = compute_log_aspect_ratio((width, height))
    at = bisect_left(landscape_resolutions, ratio, key=compute_log_aspect_ratio)
    if at == len(landscape_resolutions) or (
        at > 0
        and ratio - compute_log_aspect_ratio(landscape_resolutions[at - 1])
        <= compute_log_aspect_ratio(landscape_resolutions[at]) - ratio
    ):
        at -= 1
    long, short = landscape_resolutions[at]
    return (long, short) if width >= height else (short, long)


def compute_covering_size(image_size: WidthHeight, bucket_resolution: WidthHeight) -> WidthHeight:
    """Scale the image so that it just covers the bucket, in integers: transposing the image transposes the result."""
    width, height = image_size
    if width * bucket_resolution[1] >= height * bucket_resolution[0]:
        return max(bucket_resolution[0], _divide_rounded(width * bucket_resolution[1], height)), bucket_resolution[1]
    return bucket_resolution[0], max(bucket_resolution[1], _divide_rounded(height * bucket_resolution[0], width))


def compute_log_aspect_ratio(resolution: WidthHeight) -> float:
    """Compute the absolute log aspect ratio."""
    return math.log(max(resolution) / min(resolution))


def _divide_rounded(dividend: int, divisor: int) -> int:
    return (2 * dividend + divisor) // (2 * divisor)


def _list_candidate_resolutions(area: int, max_size: int, step: int) -> Iterable[WidthHeight]:
    """List resolutions around the wanted area: for every length of one side, the two nearest lengths of the other."""
    sizes = set()
    for side in range(step, max_size + 1, step):
        other = area // side // step * step
        sizes |= {(max(side, other), min(side, other)), (max(side, other + step), min(side, other + step))}
    return sizes


def _fill_gaps(
    resolutions: Sequence[WidthHeight], candidates_by_error: Sequence[tuple[float, WidthHeight]], pitch: float
) -> list[WidthHeight]:
    """Add the best candidate between neighbors that are too far apart."""
    closed = [resolutions[0]]
    waiting = list(reversed(resolutions[1:]))
    while waiting:
        low, high = compute_log_aspect_ratio(closed[-1]), compute_log_aspect_ratio(waiting[-1])
        between: WidthHeight | None = None
        if high - low > MAX_GAP_IN_PITCHES * pitch:
            between = next(
                (
                    size
                    for error, size in candidates_by_error
                    if error < (high - low) / 4
                    and low + MIN_DISTANCE_IN_PITCHES * pitch
                    < compute_log_aspect_ratio(size)
                    < high - MIN_DISTANCE_IN_PITCHES * pitch
                ),
                None,
            )
        if between is not None:
            waiting.append(between)
        else:
            closed.append(waiting.pop())
    return closed
