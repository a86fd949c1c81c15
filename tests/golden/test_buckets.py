"""Images get the buckets of sd-scripts, and are cropped as planned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.config.schema_data import DataConfig
from library.config.types import Resolution
from library.dataloader.buckets import BucketAssignment, build_bucket_assigner, make_bucket_resolutions
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.schema import DatasetConfig, collect_flag_defaults

GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "data" / "buckets.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> DatasetConfig:
    path = tmp_path_factory.mktemp("set") / "set.toml"
    path.write_text("[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'a'\n", encoding="utf-8")
    return parse_dataset_config(path, collect_flag_defaults(DataConfig(enable_bucket=True))).require_valid()[0]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['resolution']}-{case['bucket_no_upscale']}")
def test_every_golden_image_gets_the_bucket_and_the_size_of_sd_scripts(case: dict, dataset: DatasetConfig):
    limits = {name: case[name] for name in ("min_bucket_reso", "max_bucket_reso") if case[name] is not None}
    dataset = replace(
        dataset,
        resolution=Resolution(*case["resolution"]),
        bucket_no_upscale=case["bucket_no_upscale"],
        bucket_reso_steps=case["bucket_reso_steps"],
        **limits,
    )
    if case.get("predefined"):
        sizes = make_bucket_resolutions(
            dataset.resolution, dataset.min_bucket_reso, dataset.max_bucket_reso, dataset.bucket_reso_steps
        )
        assert sizes == [tuple(size) for size in case["predefined"]]
    assign_bucket = build_bucket_assigner(dataset)
    for width, height, *expected in case["rows"]:
        placement = assign_bucket(width, height)
        assert [*placement.bucket_resolution, *placement.resized_size] == expected, (width, height)
        left, top = placement.crop_left_top
        trim_x, trim_y = (
            resized - bucket
            for resized, bucket in zip(placement.resized_size, placement.bucket_resolution, strict=True)
        )
        assert (left, top) == (trim_x // 2, trim_y // 2) and min(trim_x, trim_y) >= 0


def test_the_planned_crop_is_the_crop_of_the_loaded_image(dataset: DatasetConfig):
    wide = replace(dataset, resolution=Resolution(1024, 1024), max_bucket_reso=2048)
    assert build_bucket_assigner(wide)(1920, 1080) == BucketAssignment((1344, 768), (1365, 768), (10, 0))
    assert build_bucket_assigner(replace(wide, bucket_no_upscale=True))(800, 600) == BucketAssignment(
        (768, 576), (800, 600), (16, 12)
    )


def test_without_buckets_every_image_is_resized_to_cover_the_resolution(dataset: DatasetConfig):
    assign_bucket = build_bucket_assigner(replace(dataset, enable_bucket=False, resolution=Resolution(512, 768)))
    assert assign_bucket(512, 768) == BucketAssignment((512, 768), (512, 768), (0, 0))
    assert assign_bucket(3000, 1000) == BucketAssignment((512, 768), (2304, 768), (896, 0))
    assert assign_bucket(100, 400) == BucketAssignment((512, 768), (512, 2048), (0, 640))


def test_an_image_too_small_for_any_bucket_is_rejected_with_a_fix(dataset: DatasetConfig):
    with pytest.raises(ValueError, match=r"50x60 pixels leave no bucket.*bucket_reso_steps 64"):
        build_bucket_assigner(replace(dataset, bucket_no_upscale=True))(50, 60)


@given(width=st.integers(1, 9000), height=st.integers(1, 9000), upscale=st.booleans(), bucketed=st.booleans())
def test_a_resized_image_covers_its_bucket(width: int, height: int, upscale: bool, bucketed: bool):
    dataset = _dataset(bucketed, not upscale)
    try:
        placement = build_bucket_assigner(dataset)(width, height)
    except ValueError:
        assert bucketed and not upscale and (min(width, height) < 64 or max(width / height, height / width) > 40)
        return
    for bucket, resized, offset in zip(
        placement.bucket_resolution, placement.resized_size, placement.crop_left_top, strict=True
    ):
        assert bucket > 0 and bucket % 64 == 0 and 0 <= offset <= resized - bucket
    if bucketed and not upscale:
        assert placement.resized_size[0] <= width and placement.resized_size[1] <= height


def _dataset(bucketed: bool, no_upscale: bool) -> DatasetConfig:
    return DatasetConfig(
        kind="dreambooth",
        resolution=Resolution(512, 768),
        batch_size=1,
        enable_bucket=bucketed,
        min_bucket_reso=256,
        max_bucket_reso=1024,
        bucket_reso_steps=64,
        bucket_no_upscale=no_upscale,
        bucket_mode="kohya",
        bucket_max_crop=1.0,
        bucket_min_images=1,
        network_multiplier=1.0,
        validation_split=0.0,
        validation_seed=None,
        resize_interpolation=None,
        prior_loss_weight=1.0,
        subsets=(),
        locations={"": "set.toml:1"},
    )
