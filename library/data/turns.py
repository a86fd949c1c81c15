"""Repeats that are no whole number: samples take turns, so that every epoch has the same length."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .spread import Indices, order


@dataclass(frozen=True)
class Turns:
    """Samples of one bucket that share repeats of n + a part: ``extra`` of them are shown n + 1 times in an epoch."""

    slots: Indices  # positions in the bucket; the first ``extra`` are those shown once more
    extra: int

    def taken_by(self, epoch: int, seed: int, bucket: int) -> Indices:
        """Which position of the bucket stands in each slot; over the epochs each stands in each equally often."""
        first = int(self.slots[0])
        mixed = self.slots[order(len(self.slots), seed, "turns", bucket, first)]
        return np.roll(mixed, -(epoch * self.extra) % len(mixed))


@dataclass(frozen=True)
class BucketTurns:
    """A bucket with whole repeats: what each slot is shown in an epoch, and which samples take turns in them."""

    repeats: Indices
    groups: tuple[Turns, ...]

    def positions(self, epoch: int, seed: int, bucket: int) -> Indices:
        """Slot -> position in the bucket."""
        found = np.arange(len(self.repeats))
        for group in self.groups:
            found[group.slots] = group.taken_by(epoch, seed, bucket)
        return found


def turns_of(repeats: Sequence[Sequence[float]], datasets: Sequence[int]) -> list[BucketTurns]:
    """For each bucket; what a dataset is shown in all is its sum of repeats, rounded once."""
    rest: defaultdict[int, float] = defaultdict(float)  # of each dataset: what is due, and not yet shown
    found = []
    for values, dataset in zip(repeats, datasets, strict=True):
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
            groups.append(Turns(slots, extra))
        found.append(BucketTurns(whole, tuple(groups)))
    return found
