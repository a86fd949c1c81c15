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

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from .repeats import IndexArray, build_bucket_repeats, draw_permutation, draw_random_keys, shuffle_with_repeats


@dataclass(frozen=True)
class Bucket:
    """The samples of one dataset that are trained at one size, each as often in an epoch as its repeats say.

    With repeats of 2.5 some are shown twice and some three times, in turns from epoch to epoch.
    """

    resolution: tuple[int, int]
    sample_indices: Sequence[int]
    repeats: Sequence[float]
    batch_size: int
    dataset_number: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one bucket: of all ranks together, or of one of them."""

    bucket_index: int  # index into the plan's buckets
    epoch: int
    sample_indices: tuple[int, ...]
    repeat_indices: tuple[int, ...]  # which of the sample's repeats in this epoch
    is_real: tuple[bool, ...]  # False for those that only fill up
    global_positions: tuple[int, ...]  # in the whole optimizer step, however it is split

    def shard(self, rank: int, dp_size: int) -> "MicroBatch":
        """What ``rank`` trains."""
        size = len(self.sample_indices) // dp_size
        mine = slice(rank * size, (rank + 1) * size)
        return MicroBatch(
            self.bucket_index,
            self.epoch,
            self.sample_indices[mine],
            self.repeat_indices[mine],
            self.is_real[mine],
            self.global_positions[mine],
        )


class MicroBatchSchedule(Protocol):
    """Whatever says which samples are in which micro-batch."""

    @property
    def buckets(self) -> tuple[Bucket, ...]: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def accumulation_steps(self) -> int: ...

    def get_micro_batch(self, position: int) -> MicroBatch:
        """The samples of all ranks."""

    def count_real_samples(self, step: int) -> int:
        """Samples in a step over all ranks, without those that only fill up."""


class _EpochLayout(NamedTuple):
    """One epoch laid out; micro-batch k is ``real[k]`` entries of ``entries[buckets[k]]`` from ``starts[k]`` on."""

    sample_indices: list[IndexArray]  # of each bucket, in the order of its repeats
    entries: list[IndexArray]
    bucket_indices: IndexArray
    starts: IndexArray
    real_counts: IndexArray


class BatchPlan:
    """Every step of a run; epochs and positions are without end, and only the epochs asked for are laid out."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dp_size: int,
        accumulation_steps: int,
        seed: int,
        *,
        one_bucket_per_step: bool = False,
    ):
        self.buckets, self.dp_size, self.accumulation_steps, self.seed = (
            tuple(buckets),
            dp_size,
            accumulation_steps,
            seed,
        )
        self.one_bucket_per_step = one_bucket_per_step
        self._bucket_repeats = build_bucket_repeats(
            [bucket.repeats for bucket in buckets], [bucket.dataset_number for bucket in buckets]
        )
        self._repeats = [turns.repeats for turns in self._bucket_repeats]
        self._sample_indices = [np.asarray(bucket.sample_indices, np.int64) for bucket in self.buckets]
        self._global_micro_batch_sizes = np.asarray([bucket.batch_size * dp_size for bucket in self.buckets], np.int64)
        self._entries_per_epoch = np.asarray([int(repeats.sum()) for repeats in self._repeats], np.int64)
        self._repeat_ends = [np.cumsum(repeats) for repeats in self._repeats]
        self._num_blocks = self._entries_per_epoch // (self._global_micro_batch_sizes * accumulation_steps)
        remainders = self._entries_per_epoch - self._num_blocks * self._global_micro_batch_sizes * accumulation_steps
        if one_bucket_per_step:
            self._num_blocks = self._num_blocks + (remainders > 0)
            remainders = remainders * 0
        self._num_leftover_batches = -(-remainders // self._global_micro_batch_sizes)
        self.samples_per_epoch = int(self._entries_per_epoch.sum())
        self.micro_batches_per_epoch = int(self._num_blocks.sum()) * accumulation_steps + int(
            self._num_leftover_batches.sum()
        )
        if not self.micro_batches_per_epoch:
            raise ValueError("a plan needs at least one sample")
        self._epoch_cache: dict[int, _EpochLayout] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that an epoch reaches into, rounded up."""
        return self.count_steps_for_epochs(1)

    @property
    def has_remainders(self) -> bool:
        """Whether buckets do not fill whole steps, so that it matters how a step is split."""
        return bool(self._num_leftover_batches.any())

    def count_steps_for_epochs(self, epochs: int) -> int:
        """Steps after which ``epochs`` epochs are complete."""
        return -(-epochs * self.micro_batches_per_epoch // self.accumulation_steps)

    def get_epoch(self, step: int) -> int:
        """The epoch in which a step begins."""
        return step * self.accumulation_steps // self.micro_batches_per_epoch

    def count_completed_epochs(self, step: int) -> int:
        """Whole epochs after so many steps."""
        return step * self.accumulation_steps // self.micro_batches_per_epoch

    def count_padding(self, bucket_index: int) -> int:
        """Samples that weigh nothing, in one epoch of a bucket."""
        return self.count_micro_batches(bucket_index) * int(self._global_micro_batch_sizes[bucket_index]) - int(
            self._entries_per_epoch[bucket_index]
        )

    def count_samples(self, bucket_index: int) -> int:
        """Samples of a bucket in one epoch, repeats counted."""
        return int(self._entries_per_epoch[bucket_index])

    def count_micro_batches(self, bucket_index: int) -> int:
        """Global micro-batches of a bucket in one epoch."""
        return int(self._num_blocks[bucket_index] * self.accumulation_steps + self._num_leftover_batches[bucket_index])

    def get_micro_batch(self, position: int) -> MicroBatch:
        """Global micro-batch ``position``, counted from the start of the run, with the samples of all ranks."""
        number, k = divmod(position, self.micro_batches_per_epoch)
        epoch = self._get_epoch_layout(number)
        bucket, start, real = int(epoch.bucket_indices[k]), int(epoch.starts[k]), int(epoch.real_counts[k])
        size = int(self._global_micro_batch_sizes[bucket])
        # behind the end of the bucket it begins anew, to fill up
        entries = epoch.entries[bucket].take(np.arange(start, start + size), mode="wrap")
        owners = np.searchsorted(self._repeat_ends[bucket], entries, side="right")
        copies = entries - (self._repeat_ends[bucket] - self._repeats[bucket])[owners]
        first = self._count_preceding_samples(position)
        return MicroBatch(
            bucket,
            number,
            tuple(epoch.sample_indices[bucket][owners].tolist()),
            tuple(copies.tolist()),
            (True,) * real + (False,) * (size - real),
            tuple(range(first, first + size)),
        )

    def get_step(self, step: int) -> tuple[MicroBatch, ...]:
        """The global micro-batches of an optimizer step."""
        return tuple(self.get_micro_batch(position) for position in self._get_step_positions(step))

    def get_rank_step(self, step: int, rank: int) -> tuple[MicroBatch, ...]:
        """What one rank trains in an optimizer step."""
        return tuple(batch.shard(rank, self.dp_size) for batch in self.get_step(step))

    def count_real_samples(self, step: int) -> int:
        """Samples in a step over all ranks, without those that only fill up."""
        return sum(
            int(self._get_epoch_layout(number).real_counts[k])
            for number, k in map(self._split_position, self._get_step_positions(step))
        )

    def _get_step_positions(self, step: int) -> range:
        return range(step * self.accumulation_steps, (step + 1) * self.accumulation_steps)

    def _split_position(self, position: int) -> tuple[int, int]:
        return divmod(position, self.micro_batches_per_epoch)

    def _count_preceding_samples(self, position: int) -> int:
        earlier = range(position - position % self.accumulation_steps, position)
        return sum(
            int(self._global_micro_batch_sizes[self._get_epoch_layout(number).bucket_indices[k]])
            for number, k in map(self._split_position, earlier)
        )

    def _get_epoch_layout(self, epoch: int) -> _EpochLayout:
        if epoch not in self._epoch_cache:
            kept = self.accumulation_steps // self.micro_batches_per_epoch + 2  # as many as one step can reach into
            while len(self._epoch_cache) >= kept:
                del self._epoch_cache[next(iter(self._epoch_cache))]
            self._epoch_cache[epoch] = self._build_epoch_layout(epoch)
        return self._epoch_cache[epoch]

    def _build_epoch_layout(self, epoch: int) -> _EpochLayout:
        entries, cuts = [], []
        for bucket, repeats in enumerate(self._repeats):
            size = int(self._global_micro_batch_sizes[bucket])
            whole = size * self.accumulation_steps
            dealt = shuffle_with_repeats(repeats, whole, self.seed, "spread", epoch, bucket)
            tail = int(self._entries_per_epoch[bucket]) // whole * whole
            entries.append(np.concatenate([dealt[:tail], self._spread_remainder(dealt[tail:], bucket, epoch)]))
            count = self.count_micro_batches(bucket)
            starts = np.arange(count, dtype=np.int64) * size
            real = np.clip(self._entries_per_epoch[bucket] - starts, 0, size)
            cuts.append(np.stack([np.full(count, bucket, np.int64), starts, real]))
        table = np.concatenate(cuts, axis=1)[:, self._order_micro_batches(epoch)]
        samples = [
            mine[turns.get_positions(epoch, self.seed, bucket)] if turns.groups else mine
            for bucket, (mine, turns) in enumerate(zip(self._sample_indices, self._bucket_repeats, strict=True))
        ]
        return _EpochLayout(samples, entries, table[0], table[1], table[2])

    def _spread_remainder(self, entries: IndexArray, bucket_index: int, epoch: int) -> IndexArray:
        """What is left over after the blocks, with copies spread over its micro-batches, too."""
        if self.one_bucket_per_step:  # one step trains them all, in whatever order
            return entries
        owners, counts = np.unique(
            np.searchsorted(self._repeat_ends[bucket_index], entries, side="right"), return_counts=True
        )
        if len(owners) == len(entries):
            return entries
        by_owner = np.sort(entries)  # copies of one sample are neighbours
        return by_owner[
            shuffle_with_repeats(
                counts, int(self._global_micro_batch_sizes[bucket_index]), self.seed, "remainder", epoch, bucket_index
            )
        ]

    def _order_micro_batches(self, epoch: int) -> IndexArray:
        """The order of an epoch's micro-batches, which are counted bucket by bucket, blocks first."""
        per_bucket = self._num_blocks * self.accumulation_steps + self._num_leftover_batches
        first = np.cumsum(per_bucket) - per_bucket
        blocks = np.concatenate(
            [
                first[bucket] + np.arange(count) * self.accumulation_steps
                for bucket, count in enumerate(self._num_blocks)
            ]
        )
        singles = np.concatenate(
            [
                first[bucket] + self._num_blocks[bucket] * self.accumulation_steps + np.arange(count)
                for bucket, count in enumerate(self._num_leftover_batches)
            ]
        )
        # the keys of blocks do not depend on anything else, so that their order is that of every other split, too
        block_keys = draw_random_keys(len(blocks), self.seed, "blocks", epoch)
        within = np.arange(self.accumulation_steps)
        missing = (
            -epoch * self.micro_batches_per_epoch % self.accumulation_steps
        )  # in the step that the epoch before left open
        if len(singles) < missing and len(blocks):
            broken = int(np.argmax(block_keys))
            singles = np.concatenate([singles, blocks[broken] + within])
            blocks, block_keys = np.delete(blocks, broken), np.delete(block_keys, broken)
        singles = singles[draw_permutation(len(singles), self.seed, "singles", epoch)]
        groups = (len(singles) - min(missing, len(singles))) // self.accumulation_steps
        head, tail = singles[:missing], singles[missing + groups * self.accumulation_steps :]
        grouped = singles[missing : missing + groups * self.accumulation_steps].reshape(groups, self.accumulation_steps)
        steps = np.concatenate([blocks[:, None] + within, grouped])
        step_keys = np.concatenate([block_keys, draw_random_keys(groups, self.seed, "groups", epoch)])
        ordered = steps[np.argsort(step_keys, kind="stable")].ravel()
        arranged: IndexArray = np.concatenate([head, ordered, tail]).astype(np.int64)
        return arranged


@dataclass(frozen=True)
class PlannedStage:
    """The steps from ``first`` up to ``end``, which is left out."""

    first_step: int
    end_step: int | None
    batch_plan: BatchPlan
    first_bucket_index: int = 0
    first_epoch: int = 0

    @property
    def num_epochs(self) -> int:
        """How many epochs it reaches into."""
        if self.end_step is None:
            return 0
        return -(
            -(self.end_step - self.first_step)
            * self.batch_plan.accumulation_steps
            // self.batch_plan.micro_batches_per_epoch
        )


class StagedBatchPlan:
    """Like a ``BatchPlan``, and that of the last stage goes on without end."""

    def __init__(self, stages: Sequence[tuple[int, int | None, BatchPlan]]):
        found: list[PlannedStage] = []
        bucket = epoch = 0
        for first, end, plan in stages:
            found.append(PlannedStage(first, end, plan, bucket, epoch))
            bucket, epoch = bucket + len(plan.buckets), epoch + found[-1].num_epochs
        self.stages = tuple(found)
        self.buckets: tuple[Bucket, ...] = tuple(bucket for stage in found for bucket in stage.batch_plan.buckets)
        start = found[0].batch_plan
        self.dp_size, self.accumulation_steps, self.seed = start.dp_size, start.accumulation_steps, start.seed
        self._first_steps = [stage.first_step for stage in found]

    def get_stage(self, step: int) -> PlannedStage:
        """The one that a step belongs to."""
        return self.stages[bisect_right(self._first_steps, step) - 1]

    def count_steps_for_epochs(self, epochs: int) -> int:
        """Steps after which ``epochs`` epochs are complete, or cut off."""
        stage = [stage for stage in self.stages if stage.first_epoch < epochs][-1]
        steps = stage.first_step + stage.batch_plan.count_steps_for_epochs(epochs - stage.first_epoch)
        return steps if stage.end_step is None or stage is self.stages[-1] else min(steps, stage.end_step)

    def get_epoch(self, step: int) -> int:
        """The epoch in which a step begins."""
        stage = self.get_stage(step)
        return stage.first_epoch + stage.batch_plan.get_epoch(step - stage.first_step)

    def count_completed_epochs(self, step: int) -> int:
        """Epochs that are complete, or cut off, after so many steps."""
        stage = self.get_stage(step)
        return stage.first_epoch + stage.batch_plan.count_completed_epochs(step - stage.first_step)

    def get_micro_batch(self, position: int) -> MicroBatch:
        """Global micro-batch ``position``, counted from the start of the run, with the samples of all ranks."""
        stage = self.get_stage(position // self.accumulation_steps)
        batch = stage.batch_plan.get_micro_batch(position - stage.first_step * self.accumulation_steps)
        return replace(
            batch, bucket_index=stage.first_bucket_index + batch.bucket_index, epoch=stage.first_epoch + batch.epoch
        )

    def get_step(self, step: int) -> tuple[MicroBatch, ...]:
        """The global micro-batches of an optimizer step."""
        return tuple(
            self.get_micro_batch(step * self.accumulation_steps + number) for number in range(self.accumulation_steps)
        )

    def count_real_samples(self, step: int) -> int:
        """Samples in a step over all ranks, without those that only fill up."""
        stage = self.get_stage(step)
        return stage.batch_plan.count_real_samples(step - stage.first_step)


AnyBatchPlan = BatchPlan | StagedBatchPlan


def get_planned_stages(batch_plan: AnyBatchPlan) -> tuple[PlannedStage, ...]:
    """Those of a plan; one without any is a single one."""
    return batch_plan.stages if isinstance(batch_plan, StagedBatchPlan) else (PlannedStage(0, None, batch_plan),)
