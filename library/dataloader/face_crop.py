"""Crops around the face that a file name gives, as sd-scripts makes them (``face_crop_aug_range``)."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath

from ..config.types import FaceCropRange
from ..dataset.listing import format_first_names
from ..dataset.schema import DatasetConfig
from ..problems import Problem
from .buckets import BucketAssignment
from .manifest import Sample

MIN_SHIFTED_FACE = 40
"""The size from which on a face is moved a little off the center, in pixels of the file; it also has to be more than a
tenth of the crop."""

MAX_SHIFT = 20
"""A face is moved by at most this fraction of its size."""


@dataclass(frozen=True)
class Face:
    """The center and the size of a face in pixels of the file."""

    center: tuple[int, int]
    size: int
    """The longer side."""


def parse_face(name: str) -> Face | None:
    """Read the face from a file name such as ``mika_320_180_90_100.png``; None where it has none.

    The last four of five or more parts between underscores are center x and y, width and height. ``ValueError`` says
    that they are no numbers.
    """
    parts = PurePath(name).stem.split("_")
    if len(parts) < 5:
        return None
    x, y, width, height = map(int, parts[-4:])
    return Face((x, y), max(width, height)) if x > 0 and max(width, height) > 0 else None


def crops_faces(dataset: DatasetConfig, sample: Sample) -> bool:
    """Whether the images of a subset are cropped around faces: not in buckets, as in sd-scripts."""
    return dataset.subsets[sample.subset_index].face_crop_aug_range is not None and not dataset.enable_bucket


def draw_face_crop(
    face: Face,
    size: tuple[int, int],
    assignment: BucketAssignment,
    crop_range: FaceCropRange,
    *,
    is_random: bool,
    rng: random.Random,
) -> BucketAssignment:
    """Draw the scale of an image and the crop around its face, which ``is_random`` (``random_crop``) moves."""
    target = assignment.bucket_resolution
    if size == target:
        return replace(assignment, resized_size=size, crop_left_top=(0, 0))
    scale = _draw_scale(face.size, size, target, crop_range, rng)
    resized = tuple(max(int(side * scale + 0.5), goal) for side, goal in zip(size, target, strict=True))
    starts = {}
    for axis in (1, 0):  # the order in which sd-scripts draws
        center, goal = int(face.center[axis] * scale + 0.5), target[axis]
        start = center - goal // 2
        if is_random:
            distance = max(resized[axis] - center, center)  # from the face to the farther edge
            start += rng.randint(0, distance) + rng.randint(0, distance) - distance
        elif crop_range.low != crop_range.high and face.size > min(target) // 10 and face.size >= MIN_SHIFTED_FACE:
            start += rng.randint(-face.size // MAX_SHIFT, face.size // MAX_SHIFT)
        starts[axis] = max(0, min(start, resized[axis] - goal))
    return BucketAssignment(target, (resized[0], resized[1]), (starts[0], starts[1]))


def _draw_scale(
    face_size: int, size: tuple[int, int], target: tuple[int, int], crop_range: FaceCropRange, rng: random.Random
) -> float:
    """Draw the factor by which the image is resized: no enlargement, unless the image is smaller than the crop."""
    covering = max(goal / side for goal, side in zip(target, size, strict=True))
    lowest = min(1.0, max(covering, min(target) / (face_size * crop_range.high)))
    highest = min(1.0, max(lowest, min(target) / (face_size * crop_range.low)))
    scale = lowest if lowest >= highest else rng.uniform(lowest, highest)
    return max(scale, covering)


def find_unreadable_faces(samples: Iterable[Sample], datasets: tuple[DatasetConfig, ...]) -> Iterator[Problem]:
    """Find the file names whose last four parts are no numbers, by subset."""
    found: defaultdict[Problem, list[str]] = defaultdict(list)
    for sample in samples:
        dataset = datasets[sample.dataset_index]
        if not crops_faces(dataset, sample):
            continue
        try:
            parse_face(sample.image.name)
        except ValueError:
            text = "file names do not end in the face's center, width and height"
            subset = dataset.subsets[sample.subset_index]
            fix = "rename them, such as NAME_320_180_90_100.png, or remove their underscores"
            found[subset.report("face_crop_aug_range", text, fix)].append(sample.image.name)
    for problem, names in found.items():
        yield replace(problem, text=f"{problem.text}: {format_first_names(list(dict.fromkeys(names)))}")
