"""Repeats that are no whole number: samples take turns, so that every epoch has the same length."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .spread import IndexArray, draw_permutation


@dataclass(frozen=True)
class FractionalRepeatGroup:
    """Samples of one bucket that share repeats of n + a part: ``extra`` of them are shown n + 1 times in an epoch."""

    slots: IndexArray  # positions in the bucket; the first ``extra`` are those shown once more
    num_extra: int

    def assign_slots(self, epoch: int, seed: int, bucket_index: int) -> IndexArray:
        """Which position of the bucket stands in each slot; over the epochs each stands in each equally often."""
        first = int(self.slots[0])
        mixed = self.slots[draw_permutation(len(self.slots), seed, "turns", bucket_index, first)]
        return np.roll(mixed, -(epoch * self.num_extra) % len(mixed))


@dataclass(frozen=True)
class BucketRepeats:
    """A bucket with whole repeats: what each slot is shown in an epoch, and which samples take turns in them."""

    repeats: IndexArray
    groups: tuple[FractionalRepeatGroup, ...]

    def get_positions(self, epoch: int, seed: int, bucket_index: int) -> IndexArray:
        """Slot -> position in the bucket."""
        found = np.arange(len(self.repeats))
        for group in self.groups:
            found[group.slots] = group.assign_slots(epoch, seed, bucket_index)
        return found


def build_bucket_repeats(repeats: Sequence[Sequence[float]], dataset_numbers: Sequence[int]) -> list[BucketRepeats]:
    """For each bucket; what a dataset is shown in all is its sum of repeats, rounded once."""
    rest: defaultdict[int, float] = defaultdict(float)  # of each dataset: what is due, and not yet shown
    found = []
    for values, dataset in zip(repeats, dataset_numbers, strict=True):
        whole = np.floor(np.asarray(values, np.float64)).astype(np.int64)
        groups = []
        by_value: defaultdict[float, list[int]] = defaultdict(list)
        for position in np.flatnonzero(whole != np.asarray(values)).tolist():
            by_value[values[position]].append(position)
        for value, positions in by_value.items():
            due = rest[dataset] + len(positions) * (value - math.floor(value))
            extra = min(max(math.floor(due + 0.5), 0), len(positions))
            rest[dataset] = due - extra
            slots = np.asarray(positions, np.int64)
            whole[slots[:extra]] += 1
            groups.append(FractionalRepeatGroup(slots, extra))
        found.append(BucketRepeats(whole, tuple(groups)))
    return found
