"""The batch plan shows every sample exactly as often as planned, however the work is spread."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from bucket_strategies import bucket_lists, layouts, seeds
from hypothesis import example, given
from hypothesis import strategies as st

from library.data.batch_plan import BatchPlan, Bucket, MicroBatch
from library.data.repeats import shuffle_with_repeats

pytestmark = pytest.mark.quick


def copies_in(plan: BatchPlan, epoch: int) -> Counter:
    first = epoch * plan.micro_batches_per_epoch
    seen: Counter = Counter()
    for position in range(first, first + plan.micro_batches_per_epoch):
        batch = plan.get_micro_batch(position)
        assert batch.epoch == epoch
        seen.update(
            (s, c) for s, c, real in zip(batch.sample_indices, batch.repeat_indices, batch.is_real, strict=True) if real
        )
    return seen


@given(bucket_lists(), layouts, seeds, st.booleans(), st.integers(0, 4))
def test_every_copy_of_every_sample_is_seen_exactly_once_in_each_epoch(buckets, layout, seed, whole, epoch):
    plan = BatchPlan(buckets, *layout, seed, one_bucket_per_step=whole)
    planned = {
        (sample, copy)
        for bucket in buckets
        for sample, repeats in zip(bucket.sample_indices, bucket.repeats, strict=True)
        for copy in range(repeats)
    }
    assert copies_in(plan, epoch) == Counter(planned)
    assert plan.samples_per_epoch == len(planned)


@given(bucket_lists(), layouts, seeds, st.booleans())
def test_a_micro_batch_holds_one_bucket_and_the_same_number_on_every_rank(buckets, layout, seed, whole):
    ranks, accumulation = layout
    plan = BatchPlan(buckets, ranks, accumulation, seed, one_bucket_per_step=whole)
    for step in range(plan.count_steps_for_epochs(2)):
        shares = [plan.get_rank_step(step, rank) for rank in range(ranks)]
        assert {len(share) for share in shares} == {accumulation}
        for parts in zip(*shares, strict=True):
            assert len({part.bucket_index for part in parts}) == 1
            bucket = buckets[parts[0].bucket_index]
            assert all(len(part.sample_indices) == bucket.batch_size for part in parts)
            assert all(set(part.sample_indices) <= set(bucket.sample_indices) for part in parts)
        together = [place for share in shares for part in share for place in part.global_positions]
        assert sorted(together) == list(range(len(together)))
        assert plan.count_real_samples(step) == sum(sum(part.is_real) for share in shares for part in share)
        if whole:
            assert len({part.bucket_index for part in shares[0]}) == 1


@given(bucket_lists(), layouts, seeds, st.booleans())
def test_padding_is_exactly_what_is_needed(buckets, layout, seed, whole):
    ranks, accumulation = layout
    plan = BatchPlan(buckets, ranks, accumulation, seed, one_bucket_per_step=whole)
    padding = [0] * len(buckets)
    for position in range(plan.micro_batches_per_epoch):
        batch = plan.get_micro_batch(position)
        padding[batch.bucket_index] += batch.is_real.count(False)
        assert list(batch.is_real) == sorted(batch.is_real, reverse=True)
    for index, bucket in enumerate(buckets):
        unit = bucket.batch_size * ranks * (accumulation if whole else 1)
        assert padding[index] == -sum(bucket.repeats) % unit == plan.count_padding(index)
    assert sum(map(plan.count_micro_batches, range(len(buckets)))) == plan.micro_batches_per_epoch


@given(bucket_lists(), layouts, seeds)
def test_a_plan_built_anew_gives_the_same_at_any_position(buckets, layout, seed):
    running, resumed = BatchPlan(buckets, *layout, seed), BatchPlan(buckets, *layout, seed)
    positions = range(3 * running.micro_batches_per_epoch)
    seen = [running.get_micro_batch(position) for position in positions]
    assert [resumed.get_micro_batch(position) for position in reversed(positions)] == seen[::-1]


@given(bucket_lists(same_batch=1), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4), seeds)
def test_the_number_of_ranks_changes_nothing_when_the_global_batch_is_the_same(buckets, ranks, accumulation, seed):
    def at(ranks: int) -> BatchPlan:
        return BatchPlan([replaced(bucket, 12 // ranks) for bucket in buckets], ranks, accumulation, seed)

    alone, spread_out = at(1), at(ranks)
    for step in range(alone.count_steps_for_epochs(2)):
        shares = [spread_out.get_rank_step(step, rank) for rank in range(ranks)]
        assert sorted(row for share in shares for part in share for row in rows_of(part)) == rows(alone, step)


def replaced(bucket: Bucket, batch_size: int) -> Bucket:
    return Bucket(bucket.resolution, bucket.sample_indices, bucket.repeats, batch_size, bucket.dataset_index_in_file)


def rows_of(part: MicroBatch) -> list[tuple]:
    return list(zip(part.global_positions, part.sample_indices, part.repeat_indices, part.is_real, strict=True))


def rows(plan: BatchPlan, step: int) -> list[tuple]:
    return [row for part in plan.get_step(step) for row in rows_of(part)]


SPLITS = [(1, 1, 12), (12, 1, 1), (1, 12, 1), (2, 3, 2), (3, 1, 4), (4, 3, 1)]


@given(bucket_lists(same_batch=1), st.sampled_from(SPLITS), seeds)
def test_with_one_bucket_per_step_every_split_makes_the_same_steps(buckets, split, seed):
    plans = []
    for batch, ranks, accumulation in ((12, 1, 1), split):
        parts = [replaced(bucket, batch) for bucket in buckets]
        plans.append(BatchPlan(parts, ranks, accumulation, seed, one_bucket_per_step=True))
    one, other = plans
    assert one.steps_per_epoch == other.steps_per_epoch
    for step in range(2 * one.steps_per_epoch):
        assert rows(one, step) == rows(other, step)


@pytest.mark.parametrize("split", SPLITS)
def test_when_every_bucket_fills_its_steps_every_split_makes_the_same_steps(split):
    batch, ranks, accumulation = split
    buckets = [Bucket((64, 64), range(24), [2] * 24, 12), Bucket((64, 128), range(24, 36), [3] * 12, 12)]
    one = BatchPlan(buckets, 1, 1, seed=5)
    other = BatchPlan([replaced(bucket, batch) for bucket in one.buckets], ranks, accumulation, seed=5)
    assert one.steps_per_epoch == other.steps_per_epoch == 7
    for step in range(21):
        assert rows(one, step) == rows(other, step)


@given(bucket_lists(same_batch=1), st.sampled_from(SPLITS), seeds)
def test_blocks_hold_the_same_samples_in_the_same_order_for_every_split(buckets, split, seed):
    def blocks(batch: int, ranks: int, accumulation: int) -> list[list[tuple]]:
        plan = BatchPlan([replaced(bucket, batch) for bucket in buckets], ranks, accumulation, seed)
        found = []
        for step in range(plan.micro_batches_per_epoch // accumulation):
            parts = plan.get_step(step)
            if all(all(part.is_real) and part.bucket_index == parts[0].bucket_index for part in parts):
                found.append(rows(plan, step))
        return found

    full = {bucket_index: sum(bucket.repeats) // 12 for bucket_index, bucket in enumerate(buckets)}
    one, other = blocks(12, 1, 1), blocks(*split)
    assert len(one) == sum(full.values())
    assert [block for block in other if block in one] == one  # pooled steps of one bucket may come in between


@given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.integers(1, 12), seeds)
@example([4] * 5, 4, 1)
@example([10, 10, 10, 10], 4, 3)
@example([3, 3, 1, 1], 3, 7)
@example([3, 3, 2, 2, 2], 5, 7)
def test_two_copies_share_a_chunk_only_where_there_is_no_other_way(repeats, chunk, seed):
    owners = np.repeat(np.arange(len(repeats)), repeats)
    dealt = shuffle_with_repeats(np.asarray(repeats), chunk, seed, "test")
    assert sorted(dealt.tolist()) == list(range(len(owners)))
    whole, rest = divmod(len(owners), chunk)
    needing_all = sum(count > whole for count in repeats)
    if max(repeats) > whole + (rest > 0) or needing_all > rest:  # some must meet
        return
    for start in range(0, len(owners), chunk):
        members = owners[dealt[start : start + chunk]].tolist()
        assert len(set(members)) == len(members)


@given(bucket_lists(), layouts, seeds)
def test_blocks_are_whole_steps_but_for_one_an_epoch_that_completes_an_open_step(buckets, layout, seed):
    ranks, accumulation = layout
    plan = BatchPlan(buckets, *layout, seed)
    blocks = sum(sum(bucket.repeats) // (bucket.batch_size * ranks * accumulation) for bucket in buckets)
    singles = plan.micro_batches_per_epoch - blocks * accumulation
    whole = Counter(
        plan.get_epoch(step)
        for step in range(plan.count_steps_for_epochs(accumulation))
        if _is_block(plan.get_step(step))
    )
    for epoch in range(accumulation):
        is_open = -epoch * plan.micro_batches_per_epoch % accumulation > singles
        assert whole[epoch] >= blocks - is_open


def _is_block(parts: tuple[MicroBatch, ...]) -> bool:
    return len({(part.bucket_index, part.epoch) for part in parts}) == 1 and all(all(part.is_real) for part in parts)


def test_samples_meet_in_all_combinations_over_the_epochs():
    plan = BatchPlan([Bucket((64, 64), range(6), [2] * 6, 3)], 1, 1, seed=1)
    pairs = Counter(
        frozenset(pair)
        for step in range(400)
        for batch in plan.get_step(step)
        for pair in pairwise(batch.sample_indices)
    )
    assert len(pairs) == 15
    assert max(pairs.values()) < 2 * min(pairs.values())


def test_epochs_and_seeds_differ():
    def epoch(seed: int, number: int) -> list:
        plan = BatchPlan([Bucket((64, 64), range(50), [1] * 50, 4)], 1, 1, seed)
        return [
            plan.get_micro_batch(number * plan.micro_batches_per_epoch + k).sample_indices
            for k in range(plan.micro_batches_per_epoch)
        ]

    assert epoch(1, 0) != epoch(1, 1) != epoch(2, 1)


def test_the_plan_never_changes():
    """These numbers are the data order of every run made so far; a resumed run depends on them."""
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


def test_an_epoch_shorter_than_a_step_is_begun_again_within_it():
    plan = BatchPlan([Bucket((64, 64), [3], [1], 1)], 1, 4, seed=0)
    assert [part.epoch for part in plan.get_step(1)] == [4, 5, 6, 7]


def test_a_plan_without_samples_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        BatchPlan([], 1, 1, 0)
