"""Dataset weights are fractions of an epoch, and fractional repeats are exact over the epochs."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_listings import make_config, prepare_subsets, write_files

from library.config.schema import TrainConfig
from library.dataloader.batch_plan import BatchPlan, Bucket
from library.dataloader.prepare import prepare_data
from library.dataloader.repeats import apply_dataset_weights, build_bucket_repeats, compute_weight_factors
from library.dataset.validate import MAX_SAMPLES_PER_EPOCH
from library.errors import ConfigError

REPEATS = st.sampled_from([1, 2, 3, 1.5, 2.25, 1.1, 7 / 3, 1 + 1e-3])


def shown(plan: BatchPlan, epoch: int) -> Counter:
    """Count how often each sample is trained in an epoch."""
    actual: Counter = Counter()
    for position in range(epoch * plan.micro_batches_per_epoch, (epoch + 1) * plan.micro_batches_per_epoch):
        batch = plan.get_micro_batch(position)
        assert batch.epoch == epoch
        actual.update(sample for sample, real in zip(batch.sample_indices, batch.is_real, strict=True) if real)
    return actual


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.lists(REPEATS, min_size=1, max_size=7), st.integers(0, 1)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 9),
)
def test_fractional_repeats_are_exact_over_epochs_of_equal_length(buckets, batch, ranks, accumulation, seed):
    made, number = [], 0
    for repeats, dataset in buckets:
        samples = range(number, number := number + len(repeats))
        made.append(Bucket((64, 64), samples, repeats, batch, dataset))
    plan = BatchPlan(made, ranks, accumulation, seed)
    expected = {
        sample: times for bucket in made for sample, times in zip(bucket.sample_indices, bucket.repeats, strict=True)
    }
    epochs = [shown(plan, epoch) for epoch in range(4)]
    for epoch in epochs:
        assert epoch.total() == plan.samples_per_epoch == sum(map(plan.count_samples, range(len(made))))
        assert all(math.floor(times) <= epoch[sample] <= math.ceil(times) for sample, times in expected.items())
        for index, bucket in enumerate(made):
            assert sum(epoch[sample] for sample in bucket.sample_indices) == plan.count_samples(index)
    for dataset in (0, 1):
        exact = sum(times for bucket in made if bucket.dataset_index_in_file == dataset for times in bucket.repeats)
        total = sum(
            plan.count_samples(index) for index, bucket in enumerate(made) if bucket.dataset_index_in_file == dataset
        )
        assert abs(total - exact) <= 0.5 + 1e-6
    second = BatchPlan(made, ranks + 1, accumulation, seed)  # samples do not depend on the number of ranks
    assert [shown(second, epoch) for epoch in range(4)] == epochs
    fresh = BatchPlan(made, ranks, accumulation, seed)
    assert [fresh.get_micro_batch(position) for position in range(7, 12)] == [
        plan.get_micro_batch(at) for at in range(7, 12)
    ]


@given(st.integers(2, 9), st.sampled_from([1.5, 1.25, 2.2, 1.9]), st.integers(0, 5))
def test_every_sample_of_a_bucket_gets_extra_repeats_equally_often(count, repeats, seed):
    (turns,) = build_bucket_repeats([[repeats] * count], [0])
    (group,) = turns.groups
    totals = np.zeros(count, int)
    for epoch in range(count):
        np.add.at(totals, turns.get_positions(epoch, seed, 0), turns.repeats)
    assert set(totals) == {count * math.floor(repeats) + group.num_extra}
    assert group.num_extra == math.floor(count * (repeats % 1) + 0.5)


def test_integer_repeats_do_not_change_the_plan():
    turns = build_bucket_repeats([[1, 2, 3.0], [4]], [0, 1])
    assert [item.repeats.tolist() for item in turns] == [[1, 2, 3], [4]] and not any(item.groups for item in turns)


def two_datasets(folder, first: str, second: str, sizes=(12, 3), subset: str = "") -> list[str]:
    for name, size in zip("ab", sizes, strict=True):
        write_files(folder / name, [f"{number}.png" for number in range(size)])
    heads = [
        f"[[datasets]]\nresolution = 64\n{weight}\n[[datasets.subsets]]\nimage_dir = '{name}'\n{subset}\n"
        for weight, name in ((first, "a"), (second, "b"))
    ]
    return ["".join(heads)]


@pytest.mark.parametrize(
    ("weights", "repeats", "expected"),
    [
        ((1, 1), 1, (12, 12)),
        ((3, 1), 1, (12, 4)),
        ((0.9, 0.1), 1, (27, 3)),
        ((1, 1), 2, (24, 24)),
        ((4, 1), 1, (12, 3)),
        ((2, 3), 1, (12, 18)),
        ((7, 2), 1, (12, 3)),
    ],
)
def test_each_dataset_gets_its_weight_of_an_epoch_and_repeats_are_never_reduced(tmp_path, weights, repeats, expected):
    head = two_datasets(tmp_path, *(f"weight = {weight}" for weight in weights), subset=f"num_repeats = {repeats}")
    ready = prepare_subsets(tmp_path, head=head[0])
    plan = ready.build_batch_plan(1, TrainConfig())
    totals = [
        sum(
            plan.count_samples(index)
            for index, bucket in enumerate(plan.buckets)
            if bucket.dataset_index_in_file == number
        )
        for number in range(2)
    ]
    assert tuple(totals) == expected
    for epoch in range(2):
        counts = shown(plan, epoch)
        assert min(counts.values()) >= repeats and counts.total() == sum(expected)
    assert sum(ready.images_per_epoch) == round(sum(sample.repeats for sample in ready.manifest.samples))


def test_the_plan_reports_the_effect_of_dataset_weights(tmp_path):
    ready = prepare_subsets(tmp_path, head=two_datasets(tmp_path, "weight = 3", "weight = 2")[0])
    assert ready.manifest.notes[-2:] == (
        "dataset 1: weight 3 is 60.0% of an epoch: repeats are multiplied by 1",
        "dataset 2: weight 2 is 40.0% of an epoch: repeats are multiplied by 2.667",
    )
    plan = ready.build_batch_plan(1, TrainConfig())
    text = ready.format_summary(plan, 5)
    assert "12 images x 1 repeat = 12 per epoch" in text and "3 images x 2.667 repeats = 8 per epoch" in text
    records = ready.to_json(plan)
    assert [record["other_keys"] for record in records] == [{"weight": 3.0}, {"weight": 2.0}]
    assert records[0]["samples"][0]["repeats"] == 1 and records[1]["samples"][0]["repeats"] == pytest.approx(8 / 3)
    assert [sum(bucket["samples"] for bucket in record["buckets"]) for record in records] == [12, 8]


def test_weights_change_the_fingerprint_and_without_them_nothing_changes(tmp_path):
    def fingerprint(first: str, second: str) -> str:
        return prepare_subsets(tmp_path, head=two_datasets(tmp_path, first, second)[0]).manifest.compute_fingerprint()

    plain = fingerprint("", "")
    assert fingerprint("weight = 4", "weight = 1") == plain  # as large as they are
    assert fingerprint("weight = 1", "weight = 1") != plain


def test_regularization_images_count_towards_the_dataset_weight(tmp_path):
    write_files(tmp_path, ["a/1.png", "a/2.png", "r/1.png", "b/1.png"])
    head = (
        "[general]\nweight = 1\n[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'a'\n"
        "[[datasets.subsets]]\nimage_dir = 'r'\nis_reg = true\n[[datasets]]\nresolution = 64\n"
        "[[datasets.subsets]]\nimage_dir = 'b'\n"
    )
    ready = prepare_subsets(tmp_path, head=head)
    assert [(sample.key, sample.repeats) for sample in ready.manifest.samples] == [
        ("a/1.png", 1),
        ("a/2.png", 1),
        ("r/1.png", 2),
        ("b/1.png", 4),
    ]


def test_extreme_dataset_weights_are_rejected(tmp_path):
    head = two_datasets(tmp_path, "weight = 1", f"weight = {MAX_SAMPLES_PER_EPOCH}")[0]
    with pytest.raises(ConfigError, match=r"set.toml:9: weight: an epoch would have 1.2e\+09 images with repeats"):
        prepare_data(make_config(tmp_path, head=head), 8)


def test_datasets_without_images_are_ignored_by_weights(tmp_path):
    ready = prepare_subsets(tmp_path, head=two_datasets(tmp_path, "weight = 1", "weight = 1")[0])
    samples, datasets = ready.manifest.samples[:12], ready.manifest.datasets
    samples, notes = apply_dataset_weights(samples, datasets, compute_weight_factors(samples, datasets))
    assert {sample.repeats for sample in samples} == {1} and len(notes) == 1
