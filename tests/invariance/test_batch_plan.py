"""The batch plan contains every sample exactly as often as planned, for any number of ranks and micro-batches."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from bucket_strategies import bucket_lists, layouts, seeds
from hypothesis import example, given
from hypothesis import strategies as st

from library.dataloader.batch_plan import BatchPlan, Bucket, MicroBatch
from library.dataloader.repeats import shuffle_with_repeats

pytestmark = pytest.mark.quick


def count_repeats(plan: BatchPlan, epoch: int) -> Counter:
    first = epoch * plan.micro_batches_per_epoch
    counts: Counter = Counter()
    for position in range(first, first + plan.micro_batches_per_epoch):
        batch = plan.get_micro_batch(position)
        assert batch.epoch == epoch
        counts.update(
            (s, c)
            for s, c, is_real in zip(batch.sample_indices, batch.repeat_indices, batch.is_real, strict=True)
            if is_real
        )
    return counts


@given(bucket_lists(), layouts, seeds, st.booleans(), st.integers(0, 4))
def test_every_repeat_of_every_sample_occurs_exactly_once_in_each_epoch(
    buckets, layout, seed, one_bucket_per_step, epoch
):
    plan = BatchPlan(buckets, *layout, seed, one_bucket_per_step=one_bucket_per_step)
    planned = {
        (sample, copy)
        for bucket in buckets
        for sample, repeats in zip(bucket.sample_indices, bucket.repeats, strict=True)
        for copy in range(repeats)
    }
    assert count_repeats(plan, epoch) == Counter(planned)
    assert plan.samples_per_epoch == len(planned)


@given(bucket_lists(), layouts, seeds, st.booleans())
def test_a_micro_batch_has_one_bucket_and_the_same_size_on_every_rank(buckets, layout, seed, one_bucket_per_step):
    ranks, accumulation = layout
    plan = BatchPlan(buckets, ranks, accumulation, seed, one_bucket_per_step=one_bucket_per_step)
    for step in range(plan.count_steps_for_epochs(2)):
        rank_steps = [plan.get_rank_step(step, rank) for rank in range(ranks)]
        assert {len(rank_step) for rank_step in rank_steps} == {accumulation}
        for micro_batches in zip(*rank_steps, strict=True):
            assert len({micro_batch.bucket_index for micro_batch in micro_batches}) == 1
            bucket = buckets[micro_batches[0].bucket_index]
            assert all(len(micro_batch.sample_indices) == bucket.batch_size for micro_batch in micro_batches)
            assert all(set(micro_batch.sample_indices) <= set(bucket.sample_indices) for micro_batch in micro_batches)
        positions = [
            position
            for rank_step in rank_steps
            for micro_batch in rank_step
            for position in micro_batch.global_positions
        ]
        assert sorted(positions) == list(range(len(positions)))
        assert plan.count_real_samples(step) == sum(
            sum(micro_batch.is_real) for rank_step in rank_steps for micro_batch in rank_step
        )
        if one_bucket_per_step:
            assert len({micro_batch.bucket_index for micro_batch in rank_steps[0]}) == 1


@given(bucket_lists(), layouts, seeds, st.booleans())
def test_each_bucket_is_padded_to_a_multiple_of_its_global_batch(buckets, layout, seed, one_bucket_per_step):
    ranks, accumulation = layout
    plan = BatchPlan(buckets, ranks, accumulation, seed, one_bucket_per_step=one_bucket_per_step)
    padding = [0] * len(buckets)
    for position in range(plan.micro_batches_per_epoch):
        batch = plan.get_micro_batch(position)
        padding[batch.bucket_index] += batch.is_real.count(False)
        assert list(batch.is_real) == sorted(batch.is_real, reverse=True)
    for index, bucket in enumerate(buckets):
        unit = bucket.batch_size * ranks * (accumulation if one_bucket_per_step else 1)
        assert padding[index] == -sum(bucket.repeats) % unit == plan.count_padding(index)
    assert sum(map(plan.count_micro_batches, range(len(buckets)))) == plan.micro_batches_per_epoch


@given(bucket_lists(), layouts, seeds)
def test_a_rebuilt_plan_is_equal_at_any_position(buckets, layout, seed):
    plan, rebuilt = BatchPlan(buckets, *layout, seed), BatchPlan(buckets, *layout, seed)
    positions = range(3 * plan.micro_batches_per_epoch)
    expected = [plan.get_micro_batch(position) for position in positions]
    assert [rebuilt.get_micro_batch(position) for position in reversed(positions)] == expected[::-1]


@given(bucket_lists(same_batch=1), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4), seeds)
def test_the_plan_is_equal_for_any_number_of_ranks_with_the_same_global_batch(buckets, ranks, accumulation, seed):
    def build_plan(ranks: int) -> BatchPlan:
        return BatchPlan([replace_batch_size(bucket, 12 // ranks) for bucket in buckets], ranks, accumulation, seed)

    one_rank, many_ranks = build_plan(1), build_plan(ranks)
    for step in range(one_rank.count_steps_for_epochs(2)):
        rank_steps = [many_ranks.get_rank_step(step, rank) for rank in range(ranks)]
        assert sorted(
            row for rank_step in rank_steps for micro_batch in rank_step for row in list_samples(micro_batch)
        ) == list_step_samples(one_rank, step)


def replace_batch_size(bucket: Bucket, batch_size: int) -> Bucket:
    return Bucket(bucket.resolution, bucket.sample_indices, bucket.repeats, batch_size, bucket.dataset_index_in_file)


def list_samples(micro_batch: MicroBatch) -> list[tuple]:
    return list(
        zip(
            micro_batch.global_positions,
            micro_batch.sample_indices,
            micro_batch.repeat_indices,
            micro_batch.is_real,
            strict=True,
        )
    )


def list_step_samples(plan: BatchPlan, step: int) -> list[tuple]:
    return [row for micro_batch in plan.get_step(step) for row in list_samples(micro_batch)]


SPLITS = [(1, 1, 12), (12, 1, 1), (1, 12, 1), (2, 3, 2), (3, 1, 4), (4, 3, 1)]


@given(bucket_lists(same_batch=1), st.sampled_from(SPLITS), seeds)
def test_with_one_bucket_per_step_every_split_has_the_same_steps(buckets, split, seed):
    plans = []
    for batch, ranks, accumulation in ((12, 1, 1), split):
        parts = [replace_batch_size(bucket, batch) for bucket in buckets]
        plans.append(BatchPlan(parts, ranks, accumulation, seed, one_bucket_per_step=True))
    one, other = plans
    assert one.steps_per_epoch == other.steps_per_epoch
    for step in range(2 * one.steps_per_epoch):
        assert list_step_samples(one, step) == list_step_samples(other, step)


@pytest.mark.parametrize("split", SPLITS)
def test_with_full_buckets_every_split_has_the_same_steps(split):
    batch, ranks, accumulation = split
    buckets = [Bucket((64, 64), range(24), [2] * 24, 12), Bucket((64, 128), range(24, 36), [3] * 12, 12)]
    one = BatchPlan(buckets, 1, 1, seed=5)
    other = BatchPlan([replace_batch_size(bucket, batch) for bucket in one.buckets], ranks, accumulation, seed=5)
    assert one.steps_per_epoch == other.steps_per_epoch == 7
    for step in range(21):
        assert list_step_samples(one, step) == list_step_samples(other, step)


@given(bucket_lists(same_batch=1), st.sampled_from(SPLITS), seeds)
def test_full_steps_have_the_same_samples_in_the_same_order_for_every_split(buckets, split, seed):
    def list_full_steps(batch: int, ranks: int, accumulation: int) -> list[list[tuple]]:
        plan = BatchPlan([replace_batch_size(bucket, batch) for bucket in buckets], ranks, accumulation, seed)
        full_steps = []
        for step in range(plan.micro_batches_per_epoch // accumulation):
            micro_batches = plan.get_step(step)
            if all(
                all(micro_batch.is_real) and micro_batch.bucket_index == micro_batches[0].bucket_index
                for micro_batch in micro_batches
            ):
                full_steps.append(list_step_samples(plan, step))
        return full_steps

    counts = {bucket_index: sum(bucket.repeats) // 12 for bucket_index, bucket in enumerate(buckets)}
    one, other = list_full_steps(12, 1, 1), list_full_steps(*split)
    assert len(one) == sum(counts.values())
    assert [block for block in other if block in one] == one  # pooled steps of one bucket may come in between


@given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.integers(1, 12), seeds)
@example([4] * 5, 4, 1)
@example([10, 10, 10, 10], 4, 3)
@example([3, 3, 1, 1], 3, 7)
@example([3, 3, 2, 2, 2], 5, 7)
def test_repeats_of_a_sample_are_in_different_chunks_if_possible(repeats, chunk, seed):
    owners = np.repeat(np.arange(len(repeats)), repeats)
    order = shuffle_with_repeats(np.asarray(repeats), chunk, seed, "test")
    assert sorted(order.tolist()) == list(range(len(owners)))
    one_bucket_per_step, remainder = divmod(len(owners), chunk)
    in_every_chunk = sum(count > one_bucket_per_step for count in repeats)
    if (
        max(repeats) > one_bucket_per_step + (remainder > 0) or in_every_chunk > remainder
    ):  # some repeats must share a chunk
        return
    for start in range(0, len(owners), chunk):
        members = owners[order[start : start + chunk]].tolist()
        assert len(set(members)) == len(members)


@given(bucket_lists(), layouts, seeds)
def test_full_blocks_are_complete_steps_except_one_per_epoch(buckets, layout, seed):
    ranks, accumulation = layout
    plan = BatchPlan(buckets, *layout, seed)
    blocks = sum(sum(bucket.repeats) // (bucket.batch_size * ranks * accumulation) for bucket in buckets)
    single_micro_batches = plan.micro_batches_per_epoch - blocks * accumulation
    block_counts = Counter(
        plan.get_epoch(step)
        for step in range(plan.count_steps_for_epochs(accumulation))
        if _is_block(plan.get_step(step))
    )
    for epoch in range(accumulation):
        is_open = -epoch * plan.micro_batches_per_epoch % accumulation > single_micro_batches
        assert block_counts[epoch] >= blocks - is_open


def _is_block(parts: tuple[MicroBatch, ...]) -> bool:
    return len({(part.bucket_index, part.epoch) for part in parts}) == 1 and all(all(part.is_real) for part in parts)


def test_all_pairs_of_samples_share_batches_over_the_epochs():
    plan = BatchPlan([Bucket((64, 64), range(6), [2] * 6, 3)], 1, 1, seed=1)
    pairs = Counter(
        frozenset(pair)
        for step in range(400)
        for batch in plan.get_step(step)
        for pair in pairwise(batch.sample_indices)
    )
    assert len(pairs) == 15
    assert max(pairs.values()) < 2 * min(pairs.values())


def test_the_order_differs_between_epochs_and_seeds():
    def epoch(seed: int, number: int) -> list:
        plan = BatchPlan([Bucket((64, 64), range(50), [1] * 50, 4)], 1, 1, seed)
        return [
            plan.get_micro_batch(number * plan.micro_batches_per_epoch + k).sample_indices
            for k in range(plan.micro_batches_per_epoch)
        ]

    assert epoch(1, 0) != epoch(1, 1) != epoch(2, 1)


def test_the_data_order_equals_the_golden_order():
    """The order of all released versions; resuming depends on it."""
    plan = BatchPlan(
        [Bucket((64, 64), range(7), [1, 2, 1, 1, 3, 1, 1], 2), Bucket((64, 128), range(7, 12), [1] * 5, 2)],
        1,
        2,
        seed=42,
    )
    assert [plan.get_micro_batch(position).sample_indices for position in range(16)] == GOLDEN_ORDER


GOLDEN_ORDER = [
    (9, 11),
    (7, 8),
    (3, 4),
    (1, 2),
    (5, 4),
    (0, 1),
    (10, 9),
    (4, 6),
    (11, 9),
    (8, 10),
    (7, 11),
    (2, 4),
    (6, 4),
    (1, 3),
    (5, 4),
    (1, 0),
]


def test_steps_and_epochs_are_counted_across_open_steps():
    plan = BatchPlan([Bucket((64, 64), range(5), [1] * 5, 2)], 1, 2, seed=0)
    assert (
        plan.micro_batches_per_epoch,
        plan.steps_per_epoch,
        plan.count_steps_for_epochs(2),
        plan.samples_per_epoch,
    ) == (
        3,
        2,
        3,
        5,
    )
    assert [plan.get_epoch(step) for step in range(4)] == [0, 0, 1, 2]
    assert sum(plan.count_real_samples(step) for step in range(3)) == 10
    assert sum(part.is_real.count(False) for step in range(3) for part in plan.get_step(step)) == 2


def test_a_step_longer_than_an_epoch_has_several_epochs():
    plan = BatchPlan([Bucket((64, 64), [3], [1], 1)], 1, 4, seed=0)
    assert [part.epoch for part in plan.get_step(1)] == [4, 5, 6, 7]


def test_a_plan_without_samples_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        BatchPlan([], 1, 1, 0)
