"""Every picture that will be trained, looked at once: decoded, measured, with its caption, or named as unusable."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..dataset.schema import DatasetConfig
from ..errors import ConfigError
from ..randomness import derive_seed
from .manifest import Sample


def balance_regularization_images(samples: Sequence[Sample], dataset_index: int) -> tuple[list[Sample], list[str]]:
    """As many regularisation pictures as training pictures in a dataset, repeats counted, as sd-scripts does it.

    They are taken in turn: first each with its repeats, then each once more, until there are enough.
    """
    mine = [sample for sample in samples if sample.dataset_index == dataset_index]
    regularisation = [sample for sample in mine if sample.is_reg]
    wanted = sum(sample.repeats for sample in mine if not sample.is_reg)
    if not regularisation:
        return list(samples), []
    repeats: list[float] = []
    have = 0.0
    for sample in regularisation:
        if have >= wanted:
            break
        repeats.append(sample.repeats)
        have += sample.repeats
    rounds, rest = divmod(int(max(wanted - have, 0)), len(regularisation))
    repeats = [count + rounds + (index < rest) for index, count in enumerate(repeats)]
    used = {sample.key: count for sample, count in zip(regularisation, repeats, strict=False)}
    left_out = {sample.key for sample in regularisation[len(used) :]}
    kept = [
        replace(sample, repeats=used.get(sample.key, sample.repeats))
        for sample in samples
        if sample.key not in left_out
    ]
    dropped = len(regularisation) - len(used)
    note = (
        f"dataset {dataset_index + 1}: {len(used)} regularisation pictures, shown {sum(repeats)} times an epoch beside"
        f" {wanted} training pictures"
    )
    if dropped:
        note += f"; {dropped} more are not needed and not used, the first of them {regularisation[len(used)].image}"
    return kept, [note]


IndexArray = NDArray[np.int64]


RandomKeys = NDArray[np.uint64]


def draw_random_keys(count: int, seed: int, purpose: str, *numbers: int) -> RandomKeys:
    """``count`` random numbers; the raw output of Philox is fixed by its definition, unlike numpy's permutations."""
    return np.random.Philox(key=derive_seed(seed, purpose, *numbers)).random_raw(count)


def draw_permutation(count: int, seed: int, purpose: str, *numbers: int) -> IndexArray:
    """A permutation of ``range(count)``."""
    return np.argsort(draw_random_keys(count, seed, purpose, *numbers), kind="stable")


def shuffle_with_repeats(repeats: IndexArray, chunk_size: int, seed: int, purpose: str, *numbers: int) -> IndexArray:
    """Entries, in which copy c of sample i is ``sum(repeats[:i]) + c``, in the order of chunks of ``chunk`` entries.

    The samples are dealt like cards: shuffled, with the copies of a sample one after the other, a card to each chunk
    in turn, in a new order of chunks each round.  A sample whose copies lie in two rounds must not meet a chunk
    twice, so the order of the second round is mended.  The last chunk is the shorter one and leaves the game early;
    samples that need even that chunk are dealt first.
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
        mixed: IndexArray = entries[draw_permutation(len(entries), seed, "mix", *numbers)]
        return mixed
    draws = draw_random_keys(len(owners), seed, "deal", *numbers)
    rows, last_rows = (
        draw_permutation(chunk_size, seed, "rows", *numbers),
        draw_permutation(rest, seed, "last", *numbers),
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
    """Give the copies at the start of this round other chunks than their siblings at the end of the round before."""
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


MAX_SAMPLES_PER_EPOCH = 100_000_000
"""In an epoch; a weight far out of proportion asks for more."""


def apply_dataset_weights(
    samples: Sequence[Sample], datasets: Sequence[DatasetConfig]
) -> tuple[tuple[Sample, ...], list[str]]:
    """The samples with the repeats that give each dataset its share, and what came of it.

    No picture is shown less often than its own repeats say: the dataset that has most of them for its weight stays as
    it is, and the others are shown more often.
    """
    weights = [dataset.weight for dataset in datasets]
    shown = [0.0] * len(datasets)
    for sample in samples:
        shown[sample.dataset_index] += sample.repeats
    present = [(number, weight) for number, weight in enumerate(weights) if weight is not None and shown[number]]
    if not present:
        return tuple(samples), []
    scale = max(shown[number] / weight for number, weight in present)
    total = sum(weight * scale for _, weight in present)
    if total > MAX_SAMPLES_PER_EPOCH:
        heaviest = max(present, key=lambda item: item[1] / shown[item[0]])[0]
        raise ConfigError(
            [
                f"{datasets[heaviest].locate('weight')}: weight: for these shares an epoch would show {total:.3g} pictures,"
                f" repeats counted; at most {MAX_SAMPLES_PER_EPOCH}: choose weights nearer to each other"
            ]
        )
    factors = {number: weight * scale / shown[number] for number, weight in present}
    found = tuple(
        replace(sample, repeats=_scale_repeats(sample.repeats, factors[sample.dataset_index])) for sample in samples
    )
    notes = [
        f"dataset {number + 1}: weight {weight:g} is {weight * scale / total:.1%} of an epoch: pictures are shown"
        f" {factors[number]:.4g} times as often as by their repeats"
        for number, weight in present
    ]
    return found, notes


def _scale_repeats(repeats: float, factor: float) -> float:
    """A whole number where only the arithmetic of floats is in the way of one."""
    exact = repeats * factor
    return round(exact) if abs(exact - round(exact)) < 1e-9 * exact else exact
