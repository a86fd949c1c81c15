"""Buckets with too few pictures join their neighbours: a pure function of what was placed."""

from collections import defaultdict
from collections.abc import Sequence

from ..dataset.schema import DatasetConfig
from .buckets import BucketAssignment, assign_to_bucket
from .sample import Sample
from .symmetric import WidthHeight, compute_log_aspect_ratio


def merge_small_buckets(samples: Sequence[Sample], assignments: Sequence[BucketAssignment],
           datasets: Sequence[DatasetConfig]) -> tuple[tuple[BucketAssignment, ...], list[str]]:  # fmt: skip
    """The placements after merging, and what was merged.

    Pictures are counted, not their repeats.  Of the buckets below ``bucket_min_pictures``, the one with the fewest
    pictures joins the bucket nearest to it by log aspect ratio, until none is left that can.  A bucket stays when one
    of its pictures would lose more than ``bucket_max_crop``.
    """
    found, notes = list(assignments), []
    for number, dataset in enumerate(datasets):
        if dataset.bucket_min_pictures == 1:
            continue
        members: defaultdict[WidthHeight, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            if sample.dataset_index == number:
                members[found[index].bucket_resolution].append(index)
        stays: set[WidthHeight] = set()
        while (small := _find_smallest_bucket(members, dataset.bucket_min_pictures, stays)) is not None and len(members) > 1:
            target = _find_nearest_neighbor(small, members)
            moved = {index: assign_to_bucket(samples[index].size, target) for index in members[small]}
            worst = max(placement.cropped_fraction for placement in moved.values())
            what = f"dataset {number + 1}: bucket {_format_resolution(small)} has fewer pictures ({len(moved)}) than" \
                   f" bucket_min_pictures {dataset.bucket_min_pictures}"  # fmt: skip
            if worst > dataset.bucket_max_crop:
                stays.add(small)
                notes.append(f"{what}, and stays: in {_format_resolution(target)} one of them would lose {worst:.1%}, more than"
                             f" bucket_max_crop {dataset.bucket_max_crop:g}")  # fmt: skip
                continue
            for index, placement in moved.items():
                found[index] = placement
            members[target] += members.pop(small)
            notes.append(f"{what}; they join {_format_resolution(target)}, where they lose at most {worst:.1%}")
    return tuple(found), notes


def _find_smallest_bucket(bucket_members: dict[WidthHeight, list[int]], min_images: int, unmergeable: set[WidthHeight]) -> WidthHeight | None:
    """Of equals the one farthest from the square."""
    small = [bucket for bucket in bucket_members if len(bucket_members[bucket]) < min_images and bucket not in unmergeable]
    return min(small, key=lambda bucket: (len(bucket_members[bucket]), -compute_log_aspect_ratio(bucket), bucket), default=None)


def _find_nearest_neighbor(small_bucket: WidthHeight, bucket_members: dict[WidthHeight, list[int]]) -> WidthHeight:
    def compute_distance(bucket: WidthHeight) -> tuple[float, int, WidthHeight]:
        return abs(_compute_signed_log_ratio(bucket) - _compute_signed_log_ratio(small_bucket)), -len(bucket_members[bucket]), bucket

    return min((bucket for bucket in bucket_members if bucket != small_bucket), key=compute_distance)


def _compute_signed_log_ratio(resolution: WidthHeight) -> float:
    """Lying is positive, upright negative."""
    return compute_log_aspect_ratio(resolution) if resolution[0] >= resolution[1] else -compute_log_aspect_ratio(resolution)


def _format_resolution(resolution: WidthHeight) -> str:
    return f"{resolution[0]}x{resolution[1]}"
