"""Buckets with too few pictures join their neighbours: a pure function of what was placed."""

from collections import defaultdict
from collections.abc import Sequence

from ..dataset.schema import DatasetConfig
from .buckets import Placement, covered
from .sample import Sample
from .symmetric import Pair, ratio_of


def merged(samples: Sequence[Sample], placements: Sequence[Placement],
           datasets: Sequence[DatasetConfig]) -> tuple[tuple[Placement, ...], list[str]]:  # fmt: skip
    """The placements after merging, and what was merged.

    Pictures are counted, not their repeats.  Of the buckets below ``bucket_min_pictures``, the one with the fewest
    pictures joins the bucket nearest to it by log aspect ratio, until none is left that can.  A bucket stays when one
    of its pictures would lose more than ``bucket_max_crop``.
    """
    found, notes = list(placements), []
    for number, dataset in enumerate(datasets):
        if dataset.bucket_min_pictures == 1:
            continue
        members: defaultdict[Pair, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            if sample.dataset == number:
                members[found[index].bucket].append(index)
        stays: set[Pair] = set()
        while (small := _smallest(members, dataset.bucket_min_pictures, stays)) is not None and len(members) > 1:
            target = _nearest(small, members)
            moved = {index: covered(samples[index].size, target) for index in members[small]}
            worst = max(placement.crop_loss for placement in moved.values())
            what = f"dataset {number + 1}: bucket {_named(small)} has fewer pictures ({len(moved)}) than" \
                   f" bucket_min_pictures {dataset.bucket_min_pictures}"  # fmt: skip
            if worst > dataset.bucket_max_crop:
                stays.add(small)
                notes.append(f"{what}, and stays: in {_named(target)} one of them would lose {worst:.1%}, more than"
                             f" bucket_max_crop {dataset.bucket_max_crop:g}")  # fmt: skip
                continue
            for index, placement in moved.items():
                found[index] = placement
            members[target] += members.pop(small)
            notes.append(f"{what}; they join {_named(target)}, where they lose at most {worst:.1%}")
    return tuple(found), notes


def _smallest(members: dict[Pair, list[int]], least: int, stays: set[Pair]) -> Pair | None:
    """Of equals the one farthest from the square."""
    small = [bucket for bucket in members if len(members[bucket]) < least and bucket not in stays]
    return min(small, key=lambda bucket: (len(members[bucket]), -ratio_of(bucket), bucket), default=None)


def _nearest(small: Pair, members: dict[Pair, list[int]]) -> Pair:
    def distance(bucket: Pair) -> tuple[float, int, Pair]:
        return abs(_signed(bucket) - _signed(small)), -len(members[bucket]), bucket

    return min((bucket for bucket in members if bucket != small), key=distance)


def _signed(bucket: Pair) -> float:
    """Lying is positive, upright negative."""
    return ratio_of(bucket) if bucket[0] >= bucket[1] else -ratio_of(bucket)


def _named(bucket: Pair) -> str:
    return f"{bucket[0]}x{bucket[1]}"
