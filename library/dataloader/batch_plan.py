"""The batch plan: which sample is in which batch, as a pure function of the buckets, the batch layout and the seed.

The unit is the *global micro-batch*: batch size x data-parallel size samples of one bucket, of which each rank takes
a contiguous slice.  In each epoch the samples of a bucket (each ``repeats`` times) are shuffled, so that two copies of
one sample are in one step only if that is unavoidable, and split into *blocks* of batch size x data-parallel size x
accumulation steps.  A block is one optimizer step, so the same samples are trained together however the global batch is
split.  The remainder of a bucket is split into global micro-batches, the last one padded with samples of weight 0.
These micro-batches are shuffled over all buckets and grouped to steps; blocks and grouped steps come in random order.

Every step has exactly ``accumulation_steps`` micro-batches and may cross an epoch boundary: micro-batches outside of
blocks come first, to complete the step that the previous epoch left open, and last.  If there are too few of them, one
block is broken up.  With ``one_bucket_per_step`` the remainder of a bucket is padded to a full step instead.

The remainders of all buckets are pooled because small folders that are trained with accumulation would otherwise train
mostly padding.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from ..randomness import Purpose
from .repeats import IndexArray, build_bucket_repeats, draw_permutation, draw_random_keys, shuffle_with_repeats


def format_bucket_size(resolution: tuple[int, int], num_frames: int = 1, *, has_sound: bool = False) -> str:
    """Format the size of a bucket: ``512x288``, of clips with their frames ``512x288x81``."""
    frames = f"x{num_frames}" if num_frames > 1 else ""
    return f"{resolution[0]}x{resolution[1]}{frames}{' with sound' if has_sound else ''}"


@dataclass(frozen=True)
class Bucket:
    """The samples of one dataset trained at one resolution and number of frames; repeats of 2.5 alternate between 2
    and 3 over epochs."""

    resolution: tuple[int, int]
    sample_indices: Sequence[int]
    repeats: Sequence[float]
    batch_size: int
    dataset_index_in_file: int = 0
    control_resolutions: tuple[tuple[int, int], ...] = ()  # the resolutions of the control images of each sample
    num_references: int = 0  # of these, the last ones: reference images of a clip
    num_frames: int = 1  # of each sample; 1 for images
    has_sound: bool = False  # which is trained together with the frames

    def format_size(self) -> str:
        """Format width, height and, of clips, frames."""
        return format_bucket_size(self.resolution, self.num_frames, has_sound=self.has_sound)


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one bucket, of all ranks or of one."""

    bucket_index: int  # index into the plan's buckets
    epoch: int
    sample_indices: tuple[int, ...]
    repeat_indices: tuple[int, ...]  # the number of the sample's repeat in this epoch
    is_real: tuple[bool, ...]  # False for padding
    global_positions: tuple[int, ...]  # positions in the optimizer step, however it is split

    def shard(self, rank: int, dp_size: int) -> "MicroBatch":
        """Return the slice of one rank."""
        size = len(self.sample_indices) // dp_size
        own = slice(rank * size, (rank + 1) * size)
        return MicroBatch(
            bucket_index=self.bucket_index,
            epoch=self.epoch,
            sample_indices=self.sample_indices[own],
            repeat_indices=self.repeat_indices[own],
            is_real=self.is_real[own],
            global_positions=self.global_positions[own],
        )


class MicroBatchSchedule(Protocol):
    """The mapping of positions to micro-batches: a batch plan, or the fixed batches of validation."""

    @property
    def buckets(self) -> tuple[Bucket, ...]: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def accumulation_steps(self) -> int: ...

    def get_micro_batch(self, position: int) -> MicroBatch:
        """Return a global micro-batch."""

    def count_real_samples(self, step: int) -> int:
        """Count the samples of a step over all ranks, without padding."""


class _EpochLayout(NamedTuple):
    """Micro-batch k of an epoch is ``real_counts[k]`` of ``entries[bucket_indices[k]]``, from ``starts[k]`` on."""

    sample_indices: list[IndexArray]  # the samples of each bucket, in the order of its ``repeats``
    entries: list[IndexArray]
    bucket_indices: IndexArray
    starts: IndexArray
    real_counts: IndexArray


class BatchPlan:
    """The batches of every step, without end; an epoch is computed when one of its batches is requested."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dp_size: int,
        accumulation_steps: int,
        seed: int,
        *,
        one_bucket_per_step: bool = False,
    ):
        self.buckets, self.dp_size = tuple(buckets), dp_size
        self.accumulation_steps, self.seed = accumulation_steps, seed
        self.one_bucket_per_step = one_bucket_per_step
        self._bucket_repeats = build_bucket_repeats(
            [bucket.repeats for bucket in buckets], [bucket.dataset_index_in_file for bucket in buckets]
        )
        self._repeats = [item.repeats for item in self._bucket_repeats]
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
        num_leftover = int(self._num_leftover_batches.sum())
        self.micro_batches_per_epoch = int(self._num_blocks.sum()) * accumulation_steps + num_leftover
        if not self.micro_batches_per_epoch:
            raise ValueError("a batch plan needs at least one sample")
        self._epoch_cache: dict[int, _EpochLayout] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, rounded up."""
        return self.count_steps_for_epochs(1)

    @property
    def has_remainders(self) -> bool:
        """Whether a bucket does not fill its last step, so that the batch layout decides what is trained together."""
        return bool(self._num_leftover_batches.any())

    def count_steps_for_epochs(self, epochs: int) -> int:
        """Count the steps after which ``epochs`` epochs are complete."""
        return -(-epochs * self.micro_batches_per_epoch // self.accumulation_steps)

    def get_epoch(self, step: int) -> int:
        """Return the epoch in which a step begins."""
        return step * self.accumulation_steps // self.micro_batches_per_epoch

    def count_completed_epochs(self, step: int) -> int:
        """Count the epochs that are complete after ``step`` steps."""
        return step * self.accumulation_steps // self.micro_batches_per_epoch

    def count_padding(self, bucket_index: int) -> int:
        """Count the padding samples of a bucket in one epoch."""
        size = int(self._global_micro_batch_sizes[bucket_index])
        return self.count_micro_batches(bucket_index) * size - int(self._entries_per_epoch[bucket_index])

    def count_samples(self, bucket_index: int) -> int:
        """Count the samples of a bucket in one epoch, with repeats."""
        return int(self._entries_per_epoch[bucket_index])

    def count_micro_batches(self, bucket_index: int) -> int:
        """Count the global micro-batches of a bucket in one epoch."""
        return int(self._num_blocks[bucket_index] * self.accumulation_steps + self._num_leftover_batches[bucket_index])

    def get_micro_batch(self, position: int) -> MicroBatch:
        """Return global micro-batch ``position``, counted from the start of the run."""
        number, k = divmod(position, self.micro_batches_per_epoch)
        epoch = self._get_epoch_layout(number)
        bucket, start, real = int(epoch.bucket_indices[k]), int(epoch.starts[k]), int(epoch.real_counts[k])
        size = int(self._global_micro_batch_sizes[bucket])
        # padding: past its end, a bucket is read from its start
        entries = epoch.entries[bucket].take(np.arange(start, start + size), mode="wrap")
        owners = np.searchsorted(self._repeat_ends[bucket], entries, side="right")
        copies = entries - (self._repeat_ends[bucket] - self._repeats[bucket])[owners]
        first = self._count_preceding_samples(position)
        return MicroBatch(
            bucket_index=bucket,
            epoch=number,
            sample_indices=tuple(epoch.sample_indices[bucket][owners].tolist()),
            repeat_indices=tuple(copies.tolist()),
            is_real=(True,) * real + (False,) * (size - real),
            global_positions=tuple(range(first, first + size)),
        )

    def get_step(self, step: int) -> tuple[MicroBatch, ...]:
        """Return the global micro-batches of an optimizer step."""
        return tuple(self.get_micro_batch(position) for position in self._get_step_positions(step))

    def get_rank_step(self, step: int, rank: int) -> tuple[MicroBatch, ...]:
        """Return one rank's micro-batches of an optimizer step."""
        return tuple(batch.shard(rank, self.dp_size) for batch in self.get_step(step))

    def count_real_samples(self, step: int) -> int:
        """Count the samples of a step over all ranks, without padding."""
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
            max_epochs = self.accumulation_steps // self.micro_batches_per_epoch + 2  # what one step can reach into
            while len(self._epoch_cache) >= max_epochs:
                del self._epoch_cache[next(iter(self._epoch_cache))]
            self._epoch_cache[epoch] = self._build_epoch_layout(epoch)
        return self._epoch_cache[epoch]

    def _build_epoch_layout(self, epoch: int) -> _EpochLayout:
        entries, micro_batches = [], []
        for bucket, repeats in enumerate(self._repeats):
            size = int(self._global_micro_batch_sizes[bucket])
            block_size = size * self.accumulation_steps
            shuffled = shuffle_with_repeats(repeats, block_size, self.seed, Purpose.BLOCK_SAMPLES, epoch, bucket)
            tail = int(self._entries_per_epoch[bucket]) // block_size * block_size
            entries.append(np.concatenate([shuffled[:tail], self._spread_remainder(shuffled[tail:], bucket, epoch)]))
            count = self.count_micro_batches(bucket)
            starts = np.arange(count, dtype=np.int64) * size
            real = np.clip(self._entries_per_epoch[bucket] - starts, 0, size)
            micro_batches.append(np.stack([np.full(count, bucket, np.int64), starts, real]))
        table = np.concatenate(micro_batches, axis=1)[:, self._order_micro_batches(epoch)]
        samples = [
            indices[repeats.get_positions(epoch, self.seed, bucket)] if repeats.groups else indices
            for bucket, (indices, repeats) in enumerate(zip(self._sample_indices, self._bucket_repeats, strict=True))
        ]
        return _EpochLayout(samples, entries, table[0], table[1], table[2])

    def _spread_remainder(self, entries: IndexArray, bucket_index: int, epoch: int) -> IndexArray:
        """Spread the copies of each sample over the micro-batches of the remainder, too."""
        if self.one_bucket_per_step:  # all of it is in one step, where order does not matter
            return entries
        owners = np.searchsorted(self._repeat_ends[bucket_index], entries, side="right")
        counts = np.unique(owners, return_counts=True)[1]
        if len(counts) == len(entries):
            return entries
        size = int(self._global_micro_batch_sizes[bucket_index])
        by_owner = np.sort(entries)  # copies of one sample are adjacent
        return by_owner[shuffle_with_repeats(counts, size, self.seed, Purpose.REMAINDER_SAMPLES, epoch, bucket_index)]

    def _order_micro_batches(self, epoch: int) -> IndexArray:
        """Order an epoch's micro-batches; they are numbered bucket by bucket, blocks first."""
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
        # the keys of blocks depend on nothing else, so that blocks have the same order for every batch layout
        block_keys = draw_random_keys(len(blocks), self.seed, Purpose.BLOCK_ORDER, epoch)
        within = np.arange(self.accumulation_steps)
        # micro-batches missing in the step that the previous epoch left open
        missing = -epoch * self.micro_batches_per_epoch % self.accumulation_steps
        if len(singles) < missing and len(blocks):
            broken = int(np.argmax(block_keys))
            singles = np.concatenate([singles, blocks[broken] + within])
            blocks, block_keys = np.delete(blocks, broken), np.delete(block_keys, broken)
        singles = singles[draw_permutation(len(singles), self.seed, Purpose.SINGLE_MICRO_BATCHES, epoch)]
        groups = (len(singles) - min(missing, len(singles))) // self.accumulation_steps
        head, tail = singles[:missing], singles[missing + groups * self.accumulation_steps :]
        grouped = singles[missing : missing + groups * self.accumulation_steps].reshape(groups, self.accumulation_steps)
        steps = np.concatenate([blocks[:, None] + within, grouped])
        step_keys = np.concatenate([block_keys, draw_random_keys(groups, self.seed, Purpose.GROUP_ORDER, epoch)])
        ordered = steps[np.argsort(step_keys, kind="stable")].ravel()
        arranged: IndexArray = np.concatenate([head, ordered, tail]).astype(np.int64)
        return arranged


@dataclass(frozen=True)
class PlannedStage:
    """The batch plan of the steps from ``first_step`` up to, excluding, ``end_step``."""

    first_step: int
    end_step: int | None
    batch_plan: BatchPlan
    first_bucket_index: int = 0
    first_epoch: int = 0

    @property
    def num_epochs(self) -> int:
        """Epochs the stage reaches into; 0 without an end."""
        if self.end_step is None:
            return 0
        num_micro_batches = (self.end_step - self.first_step) * self.batch_plan.accumulation_steps
        return -(-num_micro_batches // self.batch_plan.micro_batches_per_epoch)


class StagedBatchPlan:
    """Batch plans that follow each other; the last one has no end."""

    def __init__(self, stages: Sequence[tuple[int, int | None, BatchPlan]]):
        planned: list[PlannedStage] = []
        bucket = epoch = 0
        for first, end, plan in stages:
            planned.append(PlannedStage(first, end, plan, bucket, epoch))
            bucket, epoch = bucket + len(plan.buckets), epoch + planned[-1].num_epochs
        self.stages = tuple(planned)
        self.buckets: tuple[Bucket, ...] = tuple(bucket for stage in planned for bucket in stage.batch_plan.buckets)
        start = planned[0].batch_plan
        self.dp_size, self.accumulation_steps, self.seed = start.dp_size, start.accumulation_steps, start.seed
        self._first_steps = [stage.first_step for stage in planned]

    def get_stage(self, step: int) -> PlannedStage:
        """Return the stage of a step."""
        return self.stages[bisect_right(self._first_steps, step) - 1]

    def count_steps_for_epochs(self, epochs: int) -> int:
        """Count the steps after which ``epochs`` epochs are complete, or cut off by the end of a stage."""
        stage = [stage for stage in self.stages if stage.first_epoch < epochs][-1]
        steps = stage.first_step + stage.batch_plan.count_steps_for_epochs(epochs - stage.first_epoch)
        return steps if stage.end_step is None or stage is self.stages[-1] else min(steps, stage.end_step)

    def get_epoch(self, step: int) -> int:
        """Return the epoch in which a step begins."""
        stage = self.get_stage(step)
        return stage.first_epoch + stage.batch_plan.get_epoch(step - stage.first_step)

    def count_completed_epochs(self, step: int) -> int:
        """Count the epochs that are complete, or cut off, after ``step`` steps."""
        stage = self.get_stage(step)
        return stage.first_epoch + stage.batch_plan.count_completed_epochs(step - stage.first_step)

    def get_micro_batch(self, position: int) -> MicroBatch:
        """Return global micro-batch ``position``, counted from the start of the run."""
        stage = self.get_stage(position // self.accumulation_steps)
        batch = stage.batch_plan.get_micro_batch(position - stage.first_step * self.accumulation_steps)
        return replace(
            batch, bucket_index=stage.first_bucket_index + batch.bucket_index, epoch=stage.first_epoch + batch.epoch
        )

    def get_step(self, step: int) -> tuple[MicroBatch, ...]:
        """Return the global micro-batches of an optimizer step."""
        return tuple(
            self.get_micro_batch(step * self.accumulation_steps + number) for number in range(self.accumulation_steps)
        )

    def count_real_samples(self, step: int) -> int:
        """Count the samples of a step over all ranks, without padding."""
        stage = self.get_stage(step)
        return stage.batch_plan.count_real_samples(step - stage.first_step)


AnyBatchPlan = BatchPlan | StagedBatchPlan


def get_planned_stages(batch_plan: AnyBatchPlan) -> tuple[PlannedStage, ...]:
    """Return the stages of a plan; a plain ``BatchPlan`` is one stage."""
    return batch_plan.stages if isinstance(batch_plan, StagedBatchPlan) else (PlannedStage(0, None, batch_plan),)
