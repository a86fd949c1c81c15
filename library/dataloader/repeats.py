"""Repeats: regularization balance, dataset weights, fractional repeats, and the shuffle that spreads copies.

A dataset weight may give an image 2.5 repeats.  The plan alternates 2 and 3, so that all epochs have the same length.
Repeats of a subset (``num_repeats``) are set in manifest_builder.py; batch_plan.py orders the samples.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..dataset.schema import DatasetConfig
from ..randomness import Purpose, derive_seed
from .manifest import Sample


def balance_regularization_images(samples: Sequence[Sample], dataset_index: int) -> tuple[list[Sample], list[str]]:
    """Use as many regularization as training images in a dataset, repeats counted, as sd-scripts does.

    First each is used with its own repeats, then each once more, until there are enough.
    """
    mine = [sample for sample in samples if sample.dataset_index == dataset_index]
    reg_samples = [sample for sample in mine if sample.is_reg]
    wanted = sum(sample.repeats for sample in mine if not sample.is_reg)
    if not reg_samples:
        return list(samples), []
    repeats: list[float] = []
    have = 0.0
    for sample in reg_samples:
        if have >= wanted:
            break
        repeats.append(sample.repeats)
        have += sample.repeats
    rounds, rest = divmod(int(max(wanted - have, 0)), len(reg_samples))
    repeats = [count + rounds + (index < rest) for index, count in enumerate(repeats)]
    used = {sample.key: count for sample, count in zip(reg_samples, repeats, strict=False)}
    left_out = {sample.key for sample in reg_samples[len(used) :]}
    kept = [
        replace(sample, repeats=used.get(sample.key, sample.repeats))
        for sample in samples
        if sample.key not in left_out
    ]
    dropped = len(reg_samples) - len(used)
    note = (
        f"dataset {dataset_index + 1}: {len(used)} regularization images, {sum(repeats)} times an epoch for"
        f" {wanted} training images"
    )
    if dropped:
        note += f"; {dropped} more are not used, the first of them {reg_samples[len(used)].image}"
    return kept, [note]


IndexArray = NDArray[np.int64]
RandomKeys = NDArray[np.uint64]


def draw_random_keys(count: int, seed: int, purpose: str, *numbers: int) -> RandomKeys:
    """Draw random numbers as raw Philox output, which never changes, unlike numpy's permutations."""
    return np.random.Philox(key=derive_seed(seed, purpose, *numbers)).random_raw(count)


def draw_permutation(count: int, seed: int, purpose: str, *numbers: int) -> IndexArray:
    """Draw a permutation of ``range(count)``."""
    return np.argsort(draw_random_keys(count, seed, purpose, *numbers), kind="stable")


def shuffle_with_repeats(repeats: IndexArray, chunk_size: int, seed: int, purpose: str, *numbers: int) -> IndexArray:
    """Shuffle entries so that copies of a sample are in different chunks; copy c of i is ``sum(repeats[:i]) + c``.

    Entries are dealt like cards: samples are shuffled, with the copies of each adjacent, and every round gives one
    entry to each chunk, in a new order of chunks.  If the copies of a sample cross two rounds, the order of the second
    one is corrected, so that no chunk gets two of them.  The last, shorter chunk drops out early; samples with a copy
    for every chunk are dealt first.
    """
    chunks, rest = divmod(int(repeats.sum()), chunk_size)
    needs_all = repeats > chunks
    samples = np.lexsort((draw_random_keys(len(repeats), seed, purpose, *numbers), ~needs_all))
    counts = repeats[samples]
    starts = (np.cumsum(repeats) - repeats)[samples]
    owners = np.repeat(np.arange(len(samples)), counts)
    entries: IndexArray = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[owners]
    if len(owners) == len(repeats) or not chunks:  # no copies, or a single chunk
        if counts.max(initial=1) == 1:
            return entries
        mixed: IndexArray = entries[draw_permutation(len(entries), seed, Purpose.REPEAT_MIX, *numbers)]
        return mixed
    draws = draw_random_keys(len(owners), seed, Purpose.REPEAT_OWNERS, *numbers)
    rows, last_rows = (
        draw_permutation(chunk_size, seed, Purpose.REPEAT_ROWS, *numbers),
        draw_permutation(rest, seed, Purpose.REPEAT_REST, *numbers),
    )
    dealt: IndexArray = np.empty_like(entries)
    before: IndexArray = np.empty(0, np.int64)
    at = 0
    for turn in range(chunk_size):
        width = chunks + (turn < rest)
        turns: IndexArray = np.argsort(draws[at : at + width], kind="stable")
        _separate_repeats(turns, before, owners, at)
        row = np.where(turns < chunks, rows[turn], last_rows[turn] if turn < rest else 0)
        dealt[turns * chunk_size + row] = entries[at : at + width]
        at, before = at + width, turns
    return dealt


def _separate_repeats(
    chunk_order: IndexArray, previous_chunks: IndexArray, entry_owners: IndexArray, start: int
) -> None:
    """Give the copies at the start of this round other chunks than those at the end of the previous round."""
    if not len(previous_chunks) or entry_owners[start] != entry_owners[start - 1]:
        return
    first, last = (
        np.searchsorted(entry_owners, entry_owners[start]),
        np.searchsorted(entry_owners, entry_owners[start], side="right"),
    )
    taken = set(previous_chunks[max(len(previous_chunks) - (start - int(first)), 0) :].tolist())
    here = min(int(last) - start, len(chunk_order))
    clashing = [index for index in range(here) if int(chunk_order[index]) in taken]
    free = [index for index in range(here, len(chunk_order)) if int(chunk_order[index]) not in taken]
    for mine, other in zip(clashing, free, strict=False):
        chunk_order[mine], chunk_order[other] = chunk_order[other], chunk_order[mine]


@dataclass(frozen=True)
class FractionalRepeatGroup:
    """Samples of one bucket with equal fractional repeats: ``num_extra`` of them get one repeat more in an epoch."""

    slots: IndexArray  # positions in the bucket; the first ``num_extra`` get one repeat more
    num_extra: int

    def assign_slots(self, epoch: int, seed: int, bucket_index: int) -> IndexArray:
        """Assign positions of the bucket to slots; over the epochs each position gets each slot equally often."""
        first = int(self.slots[0])
        mixed = self.slots[draw_permutation(len(self.slots), seed, Purpose.FRACTIONAL_REPEATS, bucket_index, first)]
        return np.roll(mixed, -(epoch * self.num_extra) % len(mixed))


@dataclass(frozen=True)
class BucketRepeats:
    """Integer repeats of each slot of a bucket, and the samples that alternate between slots."""

    repeats: IndexArray
    groups: tuple[FractionalRepeatGroup, ...]

    def get_positions(self, epoch: int, seed: int, bucket_index: int) -> IndexArray:
        """Return the position in the bucket of each slot."""
        found = np.arange(len(self.repeats))
        for group in self.groups:
            found[group.slots] = group.assign_slots(epoch, seed, bucket_index)
        return found


def build_bucket_repeats(repeats: Sequence[Sequence[float]], dataset_indices: Sequence[int]) -> list[BucketRepeats]:
    """Round the repeats of each bucket to integers, so that each dataset's total is rounded only once."""
    rest: defaultdict[int, float] = defaultdict(float)  # the rounding error of each dataset so far
    found = []
    for values, dataset in zip(repeats, dataset_indices, strict=True):
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


def compute_weight_factors(samples: Sequence[Sample], datasets: Sequence[DatasetConfig]) -> dict[int, float]:
    """Compute the factor on the repeats of each dataset that gives it its fraction of an epoch.

    Factors are at least 1: the dataset with the most samples for its weight is unchanged, the others get more.
    """
    counts = [0.0] * len(datasets)
    for sample in samples:
        counts[sample.dataset_index] += sample.repeats
    weights = {
        number: dataset.weight
        for number, dataset in enumerate(datasets)
        if dataset.weight is not None and counts[number]
    }
    scale = max((counts[number] / weight for number, weight in weights.items()), default=1.0)
    return {number: weight * scale / counts[number] for number, weight in weights.items()}


def apply_dataset_weights(
    samples: Sequence[Sample], datasets: Sequence[DatasetConfig], factors: Mapping[int, float]
) -> tuple[tuple[Sample, ...], list[str]]:
    """Multiply repeats by the factor of each dataset; also return a note for each dataset."""
    if not factors:
        return tuple(samples), []
    scaled = tuple(
        replace(sample, repeats=_scale_repeats(sample.repeats, factors[sample.dataset_index])) for sample in samples
    )
    weights = {number: datasets[number].weight or 0.0 for number in factors}
    notes = [
        f"dataset {number + 1}: weight {weight:g} is {weight / sum(weights.values()):.1%} of an epoch: repeats are"
        f" multiplied by {factors[number]:.4g}"
        for number, weight in weights.items()
    ]
    return scaled, notes


def _scale_repeats(repeats: float, factor: float) -> float:
    """Multiply, and round to an integer if only the float error differs."""
    exact = repeats * factor
    return round(exact) if abs(exact - round(exact)) < 1e-9 * exact else exact
