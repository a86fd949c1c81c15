"""Symmetric buckets are equal for portrait and landscape images, keep the area, and contain every image."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problem_lines import format_lines

from library.config.schema_data import DataConfig
from library.config.types import Resolution
from library.dataloader.buckets import (
    AREA_TOLERANCE,
    MAX_GAP_IN_PITCHES,
    MIN_DISTANCE_IN_PITCHES,
    BucketAssignment,
    build_bucket_assigner,
    compute_log_aspect_ratio,
    find_nearest_bucket,
    make_landscape_resolutions,
    merge_small_buckets,
)
from library.dataloader.manifest import Sample
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.schema import DatasetConfig, collect_flag_defaults

lengths = st.integers(1, 9000)


def symmetric(resolution=(512, 768), smallest=256, largest=1024, step=64, **settings) -> DatasetConfig:
    values = {
        "kind": "dreambooth",
        "resolution": Resolution(*resolution),
        "batch_size": 1,
        "enable_bucket": True,
        "min_bucket_reso": smallest,
        "max_bucket_reso": largest,
        "bucket_reso_steps": step,
        "bucket_no_upscale": False,
        "bucket_mode": "symmetric",
        "bucket_max_crop": 1.0,
        "bucket_min_images": 1,
        "network_multiplier": 1.0,
        "validation_split": 0.0,
        "validation_seed": None,
        "resize_interpolation": None,
        "prior_loss_weight": 1.0,
        "subsets": (),
        "locations": {"": "set.toml:1"},
    }
    return DatasetConfig(**{**values, **settings})


@st.composite
def limits(draw) -> tuple[int, int, int, int]:
    """Resolution, min_bucket_reso, max_bucket_reso and bucket_reso_steps of a dataset."""
    step = draw(st.sampled_from([8, 16, 32, 64]))
    width, height = draw(st.integers(step, 1400)), draw(st.integers(step, 1400))
    smallest = draw(st.integers(step, min(width, height)))
    return width * height, smallest, draw(st.integers(max(width, height), 2500)), step


def turned(placement: BucketAssignment) -> BucketAssignment:
    return BucketAssignment(
        placement.bucket_resolution[::-1], placement.resized_size[::-1], placement.crop_left_top[::-1]
    )


@given(lengths, lengths, st.sampled_from([64, 32, 8]))
def test_a_transposed_image_gets_the_transposed_bucket(width, height, step):
    place = build_bucket_assigner(symmetric(step=step))
    assert place(height, width) == turned(place(width, height))


@given(limits(), lengths, lengths)
def test_the_bucket_is_the_nearest_by_log_ratio(limit, width, height):
    lying = make_landscape_resolutions(*limit)
    chosen = find_nearest_bucket(width, height, lying)
    distances = [abs(math.log(a / b) - math.log(width / height)) for size in lying for a, b in (size, size[::-1])]
    assert abs(math.log(chosen[0] / chosen[1]) - math.log(width / height)) <= min(distances) + 1e-9


@given(limits())
def test_the_area_is_within_the_tolerance_wherever_the_step_allows(limit):
    area, smallest, largest, step = limit
    lying = make_landscape_resolutions(*limit)
    pitch = 2 * step / math.sqrt(area)
    low, high = smallest - smallest % step, largest + -largest % step
    assert lying == sorted(set(lying), key=compute_log_aspect_ratio) and lying[0][0] == lying[0][1]
    assert all(low <= short <= long <= high and long % step == short % step == 0 for long, short in lying)
    within = [
        (a, b)
        for b in range(low, high + 1, step)
        for a in range(b + step, high + 1, step)
        if abs(a * b / area - 1) <= AREA_TOLERANCE
    ]
    ratios = [compute_log_aspect_ratio(size) for size in lying]
    for index, (long, short) in enumerate(lying[1:], start=1):
        error = abs(long * short / area - 1)
        if error > AREA_TOLERANCE:
            gap = (ratios[index + 1] if index + 1 < len(lying) else math.inf) - ratios[index - 1]
            assert gap > MIN_DISTANCE_IN_PITCHES * 2 * pitch
            lower = ratios[index - 1] + MIN_DISTANCE_IN_PITCHES * pitch
            upper = (ratios[index + 1] if index + 1 < len(lying) else math.inf) - MIN_DISTANCE_IN_PITCHES * pitch
            assert not [pair for pair in within if lower < compute_log_aspect_ratio(pair) < upper], (long, short)
    for lower, upper in pairwise(ratios):
        if upper - lower > MAX_GAP_IN_PITCHES * pitch:
            middle = (lower + MIN_DISTANCE_IN_PITCHES * pitch, upper - MIN_DISTANCE_IN_PITCHES * pitch)
            missed = [pair for pair in within if middle[0] < compute_log_aspect_ratio(pair) < middle[1]]
            assert not [pair for pair in missed if abs(pair[0] * pair[1] / area - 1) < (upper - lower) / 4]


def test_the_buckets_of_common_settings():
    """Computed by hand: the sizes within 2 % of the area, and those that fill the gaps between them."""
    assert make_landscape_resolutions(1024 * 1024, 256, 2048, 64) == [
        (1024, 1024),
        (1088, 960),
        (1152, 896),
        (1280, 832),
        (1344, 768),
        (1472, 704),
        (1664, 640),
        (1792, 576),
        (1920, 576),
        (2048, 512),
    ]
    assert make_landscape_resolutions(512 * 512, 256, 1024, 64) == [
        (512, 512),
        (576, 448),
        (704, 384),
        (832, 320),
        (1024, 256),
    ]
    assert make_landscape_resolutions(512 * 512, 512, 512, 64) == [(512, 512)]


@given(lengths, lengths, st.sampled_from([64, 16]))
def test_an_image_is_scaled_to_just_cover_its_bucket(width, height, step):
    placement = build_bucket_assigner(symmetric(step=step))(width, height)
    excess = [
        resized - bucket for resized, bucket in zip(placement.resized_size, placement.bucket_resolution, strict=True)
    ]
    assert min(excess) == 0
    scale = max(placement.bucket_resolution[0] / width, placement.bucket_resolution[1] / height)
    assert placement.resized_size[0] == pytest.approx(width * scale, abs=0.5001)
    assert placement.resized_size[1] == pytest.approx(height * scale, abs=0.5001)


@given(lengths, lengths, st.sampled_from(["kohya", "symmetric"]))
def test_the_cropped_fraction_is_the_fraction_of_pixels_outside_the_bucket(width, height, mode):
    placement = build_bucket_assigner(symmetric(bucket_mode=mode))(width, height)
    inside = placement.bucket_resolution[0] * placement.bucket_resolution[1]
    assert placement.cropped_fraction == pytest.approx(1 - inside / math.prod(placement.resized_size))
    assert 0 <= placement.cropped_fraction < 1


def test_an_image_that_would_be_cropped_too_much_is_rejected_with_its_fraction():
    place = build_bucket_assigner(symmetric((512, 512), bucket_max_crop=0.25))
    assert place(1365, 256).cropped_fraction == pytest.approx(0.25, abs=1e-3)
    with pytest.raises(
        ValueError, match=r"3000x500 pixels would lose 33.3% .* 1024x256, more than bucket_max_crop 0.2"
    ):
        place(3000, 500)


@given(lengths, lengths, st.sampled_from([64, 128, 256, 512]), st.floats(0.02, 0.9))
def test_the_crop_limit_holds_for_any_bucket_step(width, height, step, most):
    """Coarse steps give few buckets and larger crops, so that more images are rejected."""
    settings = {"resolution": (1024, 1024), "smallest": 512, "largest": 2048, "step": step}
    loss = build_bucket_assigner(symmetric(**settings))(width, height).cropped_fraction
    place = build_bucket_assigner(symmetric(**settings, bucket_max_crop=most))
    if loss <= most:
        assert place(width, height).cropped_fraction == loss
    else:
        message = rf"{width}x{height} pixels would lose {loss:.1%} .* more than bucket_max_crop {most:g}"
        with pytest.raises(ValueError, match=message):
            place(width, height)


def sample(number: int, size: tuple[int, int], dataset: int = 0, repeats: int = 1) -> Sample:
    return Sample(f"{number}", None, size, "", dataset, 0, repeats, 1.0, False, "")


@given(
    st.lists(st.tuples(st.integers(20, 3000), st.integers(20, 3000), st.integers(0, 1)), min_size=1, max_size=40),
    st.integers(1, 9),
    st.sampled_from([0.3, 0.6, 1.0]),
)
def test_merging_keeps_all_images_and_no_mergeable_small_bucket(images, least, max_crop):
    datasets = [symmetric(bucket_min_images=least, bucket_max_crop=max_crop), symmetric((512, 512))]
    samples, single = [], []
    for number, (width, height, dataset) in enumerate(images):
        try:
            single.append(build_bucket_assigner(datasets[dataset])(width, height))
        except ValueError:
            continue
        samples.append(sample(number, (width, height), dataset, repeats=9))
    placements, notes = merge_small_buckets(samples, single, datasets)
    assert len(placements) == len(samples)
    buckets = defaultdict(list)
    for item, before, after in zip(samples, single, placements, strict=True):
        if item.dataset_index == 1:
            assert after == before
            continue
        buckets[after.bucket_resolution].append(item)
        assert after.cropped_fraction <= max_crop
        if after.bucket_resolution != before.bucket_resolution:
            assert [
                bucket - resized for bucket, resized in zip(after.bucket_resolution, after.resized_size, strict=True)
            ].count(0) > 0
            assert any(
                f"bucket {before.bucket_resolution[0]}x{before.bucket_resolution[1]} has" in note for note in notes
            )
        else:
            assert after == before
    small = [bucket for bucket, members in buckets.items() if len(members) < least]
    assert len(buckets) <= 1 or all(
        any(f"bucket {a}x{b} has" in note and "stays" in note for note in notes) for a, b in small
    )
    assert set(buckets) <= {
        placement.bucket_resolution for placement, item in zip(single, samples, strict=True) if not item.dataset_index
    }


def test_small_buckets_merge_into_the_nearest_by_log_ratio_counting_images_without_repeats():
    dataset = symmetric((512, 512), bucket_min_images=2)
    sizes = [(512, 512)] * 3 + [(576, 448)] * 2 + [(704, 384)] + [(256, 1024)]
    samples = [sample(number, size, repeats=5) for number, size in enumerate(sizes)]
    single = [build_bucket_assigner(dataset)(*size) for size in sizes]
    placements, notes = merge_small_buckets(samples, single, [dataset])
    assert Counter(placement.bucket_resolution for placement in placements) == {(512, 512): 4, (576, 448): 3}
    assert placements[5] == BucketAssignment((576, 448), (821, 448), (122, 0))
    assert notes == [
        "dataset 1: bucket 256x1024 has fewer images (1) than bucket_min_images 2; merged into 512x512, where images"
        " lose at most 75.0%",
        "dataset 1: bucket 704x384 has fewer images (1) than bucket_min_images 2; merged into 576x448, where images"
        " lose at most 29.8%",
    ]
    kept, notes = merge_small_buckets(samples, single, [replace(dataset, bucket_max_crop=0.5)])
    assert kept[6] == single[6] and notes[0].endswith("an image would lose 75.0%, more than bucket_max_crop 0.5")

    assert merge_small_buckets(samples, single, [replace(dataset, bucket_mode="kohya")]) == (tuple(single), [])


GOOD = "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'a'\n"


@pytest.mark.parametrize(
    ("general", "flags", "expected"),
    [
        ("bucket_min_images = 3\nenable_bucket = true", {}, []),
        (
            "bucket_mode = 'symmetric'\nbucket_no_upscale = true\nenable_bucket = true",
            {},
            ["set.toml:2: bucket_mode: symmetric buckets all have the same area"],
        ),
        ("bucket_mode = 'square'", {}, ["set.toml:2: bucket_mode: 'square' is not one of kohya, symmetric"]),
        ("bucket_max_crop = 1.5", {}, ["set.toml:2: bucket_max_crop: must be at most 1, got 1.5"]),
        ("enable_bucket = true", {"bucket_mode": "symmetric", "bucket_max_crop": 0.1, "bucket_min_images": 2}, []),
        ("bucket_max_crop = 1", {}, []),
    ],
)
def test_invalid_bucket_settings_are_rejected(tmp_path, general, flags, expected):
    path = tmp_path / "set.toml"
    path.write_text(f"[general]\n{general}\n{GOOD}", encoding="utf-8")
    actual = format_lines(parse_dataset_config(path, collect_flag_defaults(DataConfig(**flags))).problems)
    assert len(actual) == len(expected)
    for problem, start in zip(actual, expected, strict=True):
        assert problem.replace(f"{tmp_path}/", "").startswith(start)


def test_each_dataset_may_have_its_own_bucket_mode(tmp_path):
    path = tmp_path / "set.toml"
    text = "general.enable_bucket = true\n" + GOOD + GOOD.replace("= 512", "= 512\nbucket_mode = 'symmetric'")
    path.write_text(text.replace("'a'", "'b'", 1), encoding="utf-8")
    one, other = parse_dataset_config(path, collect_flag_defaults(DataConfig())).require_valid()
    assert (one.bucket_mode, other.bucket_mode) == ("kohya", "symmetric")
    assert build_bucket_assigner(one)(1500, 1000).bucket_resolution == (640, 384) and build_bucket_assigner(other)(
        1500, 1000
    ).bucket_resolution == (576, 448)
