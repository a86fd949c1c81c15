"""Which sample is trained where, in every step of a run: a pure function of samples, batch layout and seed.

The unit is the *global micro-batch*: batch x ranks samples of one bucket, of which each rank takes its own stretch.
In each epoch the samples of a bucket (as often as their repeats say) are shuffled, so that two copies of one sample
come into one step only where there is no other way, and cut into *blocks* of batch x ranks x accumulation.  A block
is the work of one optimizer step, so it does not matter how it is split over batch, ranks and accumulation.  What
remains of a bucket is cut into global micro-batches, the last of them filled up to full size with samples of the same
bucket that weigh nothing.  These are shuffled over all buckets and put together to steps.  Blocks and such steps come
in random order.

Every step has exactly ``accumulation`` micro-batches and may cross the end of an epoch: micro-batches without a block
come first, to complete the step that the epoch before left open, and last.  When there are too few of them, one block
is broken up.  With ``one_bucket_per_step`` the remainder of a bucket is filled up to a whole step instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from .spread import Indices, keys, order, spread
from .turns import turns_of


@dataclass(frozen=True)
class BucketSamples:
    """The samples of one dataset that are trained at one size, each as often in an epoch as its repeats say.

    With repeats of 2.5 some are shown twice and some three times, in turns from epoch to epoch.
    """

    size: tuple[int, int]
    samples: Sequence[int]
    repeats: Sequence[float]
    batch_size: int
    dataset: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one bucket: of all ranks together, or of one of them."""

    bucket: int  # index into the plan's buckets
    epoch: int
    samples: tuple[int, ...]
    copies: tuple[int, ...]  # which of the sample's repeats in this epoch
    weights: tuple[bool, ...]  # False for those that only fill up
    places: tuple[int, ...]  # in the whole optimizer step, however it is split

    def share(self, rank: int, ranks: int) -> "MicroBatch":
        """What ``rank`` trains."""
        size = len(self.samples) // ranks
        mine = slice(rank * size, (rank + 1) * size)
        return MicroBatch(self.bucket, self.epoch, self.samples[mine], self.copies[mine], self.weights[mine],
                          self.places[mine])  # fmt: skip


class Layout(Protocol):
    """Whatever says which samples are in which micro-batch."""

    @property
    def buckets(self) -> tuple[BucketSamples, ...]: ...
    @property
    def ranks(self) -> int: ...
    @property
    def accumulation(self) -> int: ...

    def micro_batch(self, position: int) -> MicroBatch:
        """The samples of all ranks."""

    def real_samples(self, step: int) -> int:
        """Samples in a step over all ranks, without those that only fill up."""


class _Epoch(NamedTuple):
    """One epoch laid out; micro-batch k is ``real[k]`` entries of ``entries[buckets[k]]`` from ``starts[k]`` on."""

    samples: list[Indices]  # of each bucket, in the order of its repeats
    entries: list[Indices]
    buckets: Indices
    starts: Indices
    real: Indices


class BatchPlan:
    """Every step of a run; epochs and positions are without end, and only the epochs asked for are laid out."""

    def __init__(self, buckets: Sequence[BucketSamples], ranks: int, accumulation: int, seed: int, *,
                 one_bucket_per_step: bool = False):  # fmt: skip
        self.buckets, self.ranks, self.accumulation, self.seed = tuple(buckets), ranks, accumulation, seed
        self.one_bucket_per_step = one_bucket_per_step
        self._turns = turns_of([bucket.repeats for bucket in buckets], [bucket.dataset for bucket in buckets])
        self._repeats = [turns.repeats for turns in self._turns]
        self._samples = [np.asarray(bucket.samples, np.int64) for bucket in self.buckets]
        self._globals = np.asarray([bucket.batch_size * ranks for bucket in self.buckets], np.int64)
        self._totals = np.asarray([int(repeats.sum()) for repeats in self._repeats], np.int64)
        self._ends = [np.cumsum(repeats) for repeats in self._repeats]
        self._blocks = self._totals // (self._globals * accumulation)
        remainders = self._totals - self._blocks * self._globals * accumulation
        if one_bucket_per_step:
            self._blocks = self._blocks + (remainders > 0)
            remainders = remainders * 0
        self._singles = -(-remainders // self._globals)
        self.samples_per_epoch = int(self._totals.sum())
        self.batches_per_epoch = int(self._blocks.sum()) * accumulation + int(self._singles.sum())
        if not self.batches_per_epoch:
            raise ValueError("a plan needs at least one sample")
        self._laid_out: dict[int, _Epoch] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that an epoch reaches into, rounded up."""
        return self.steps_for_epochs(1)

    @property
    def has_remainders(self) -> bool:
        """Whether buckets do not fill whole steps, so that it matters how a step is split."""
        return bool(self._singles.any())

    def steps_for_epochs(self, epochs: int) -> int:
        """Steps after which ``epochs`` epochs are complete."""
        return -(-epochs * self.batches_per_epoch // self.accumulation)

    def epoch_of(self, step: int) -> int:
        """The epoch in which a step begins."""
        return step * self.accumulation // self.batches_per_epoch

    def epochs_done(self, step: int) -> int:
        """Whole epochs after so many steps."""
        return step * self.accumulation // self.batches_per_epoch

    def padding_per_epoch(self, bucket: int) -> int:
        """Samples that weigh nothing, in one epoch of a bucket."""
        return self.batches_of(bucket) * int(self._globals[bucket]) - int(self._totals[bucket])

    def samples_of(self, bucket: int) -> int:
        """Samples of a bucket in one epoch, repeats counted."""
        return int(self._totals[bucket])

    def batches_of(self, bucket: int) -> int:
        """Global micro-batches of a bucket in one epoch."""
        return int(self._blocks[bucket] * self.accumulation + self._singles[bucket])

    def micro_batch(self, position: int) -> MicroBatch:
        """Global micro-batch ``position``, counted from the start of the run, with the samples of all ranks."""
        number, k = divmod(position, self.batches_per_epoch)
        epoch = self._epoch(number)
        bucket, start, real = int(epoch.buckets[k]), int(epoch.starts[k]), int(epoch.real[k])
        size = int(self._globals[bucket])
        # behind the end of the bucket it begins anew, to fill up
        entries = epoch.entries[bucket].take(np.arange(start, start + size), mode="wrap")
        owners = np.searchsorted(self._ends[bucket], entries, side="right")
        copies = entries - (self._ends[bucket] - self._repeats[bucket])[owners]
        first = self._places_before(position)
        return MicroBatch(bucket, number, tuple(epoch.samples[bucket][owners].tolist()), tuple(copies.tolist()),
                          (True,) * real + (False,) * (size - real), tuple(range(first, first + size)))  # fmt: skip

    def step(self, step: int) -> tuple[MicroBatch, ...]:
        """The global micro-batches of an optimizer step."""
        return tuple(self.micro_batch(position) for position in self._positions(step))

    def for_rank(self, step: int, rank: int) -> tuple[MicroBatch, ...]:
        """What one rank trains in an optimizer step."""
        return tuple(batch.share(rank, self.ranks) for batch in self.step(step))

    def real_samples(self, step: int) -> int:
        """Samples in a step over all ranks, without those that only fill up."""
        return sum(int(self._epoch(number).real[k]) for number, k in map(self._located, self._positions(step)))

    def _positions(self, step: int) -> range:
        return range(step * self.accumulation, (step + 1) * self.accumulation)

    def _located(self, position: int) -> tuple[int, int]:
        return divmod(position, self.batches_per_epoch)

    def _places_before(self, position: int) -> int:
        earlier = range(position - position % self.accumulation, position)
        return sum(int(self._globals[self._epoch(number).buckets[k]]) for number, k in map(self._located, earlier))

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._laid_out:
            kept = self.accumulation // self.batches_per_epoch + 2  # as many as one step can reach into
            while len(self._laid_out) >= kept:
                del self._laid_out[next(iter(self._laid_out))]
            self._laid_out[number] = self._lay_out(number)
        return self._laid_out[number]

    def _lay_out(self, number: int) -> _Epoch:
        entries, cuts = [], []
        for bucket, repeats in enumerate(self._repeats):
            size = int(self._globals[bucket])
            whole = size * self.accumulation
            dealt = spread(repeats, whole, self.seed, "spread", number, bucket)
            tail = int(self._totals[bucket]) // whole * whole
            entries.append(np.concatenate([dealt[:tail], self._remainder(dealt[tail:], bucket, number)]))
            count = self.batches_of(bucket)
            starts = np.arange(count, dtype=np.int64) * size
            real = np.clip(self._totals[bucket] - starts, 0, size)
            cuts.append(np.stack([np.full(count, bucket, np.int64), starts, real]))
        table = np.concatenate(cuts, axis=1)[:, self._arranged(number)]
        samples = [mine[turns.positions(number, self.seed, bucket)] if turns.groups else mine
                   for bucket, (mine, turns) in enumerate(zip(self._samples, self._turns, strict=True))]  # fmt: skip
        return _Epoch(samples, entries, table[0], table[1], table[2])

    def _remainder(self, entries: Indices, bucket: int, number: int) -> Indices:
        """What is left over after the blocks, with copies spread over its micro-batches, too."""
        if self.one_bucket_per_step:  # one step trains them all, in whatever order
            return entries
        owners, counts = np.unique(np.searchsorted(self._ends[bucket], entries, side="right"), return_counts=True)
        if len(owners) == len(entries):
            return entries
        by_owner = np.sort(entries)  # copies of one sample are neighbours
        return by_owner[spread(counts, int(self._globals[bucket]), self.seed, "remainder", number, bucket)]

    def _arranged(self, number: int) -> Indices:
        """The order of an epoch's micro-batches, which are counted bucket by bucket, blocks first."""
        per_bucket = self._blocks * self.accumulation + self._singles
        first = np.cumsum(per_bucket) - per_bucket
        blocks = np.concatenate([first[bucket] + np.arange(count) * self.accumulation
                                 for bucket, count in enumerate(self._blocks)])  # fmt: skip
        singles = np.concatenate([first[bucket] + self._blocks[bucket] * self.accumulation + np.arange(count)
                                  for bucket, count in enumerate(self._singles)])  # fmt: skip
        # the keys of blocks do not depend on anything else, so that their order is that of every other split, too
        block_keys = keys(len(blocks), self.seed, "blocks", number)
        within = np.arange(self.accumulation)
        missing = -number * self.batches_per_epoch % self.accumulation  # in the step that the epoch before left open
        if len(singles) < missing and len(blocks):
            broken = int(np.argmax(block_keys))
            singles = np.concatenate([singles, blocks[broken] + within])
            blocks, block_keys = np.delete(blocks, broken), np.delete(block_keys, broken)
        singles = singles[order(len(singles), self.seed, "singles", number)]
        groups = (len(singles) - min(missing, len(singles))) // self.accumulation
        head, tail = singles[:missing], singles[missing + groups * self.accumulation :]
        grouped = singles[missing : missing + groups * self.accumulation].reshape(groups, self.accumulation)
        steps = np.concatenate([blocks[:, None] + within, grouped])
        step_keys = np.concatenate([block_keys, keys(groups, self.seed, "groups", number)])
        ordered = steps[np.argsort(step_keys, kind="stable")].ravel()
        arranged: Indices = np.concatenate([head, ordered, tail]).astype(np.int64)
        return arranged
