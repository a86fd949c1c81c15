"""Crops around the face that a file name gives: the sizes and positions of sd-scripts, drawn from seed and view."""

import random

import numpy as np
import pytest
from PIL import Image
from problem_lines import format_lines, format_unused

from library.config.schema import CacheConfig
from library.config.schema_data import DataConfig
from library.config.types import FaceCropRange
from library.dataloader.batch_plan import BatchPlan
from library.dataloader.buckets import BucketAssignment
from library.dataloader.face_crop import Face, draw_face_crop, parse_face
from library.dataloader.prepare import prepare_data
from library.dataset.dataset_config import load_dataset_config
from library.dataset.validate import find_unused_keys, validate_dataset_config
from library.errors import FileError
from library.training.preflight import load_settings

GOLDEN = [
    # image, crop, face (center and size), range, random_crop, seed, resized size and crop of sd-scripts
    ((640, 480), (256, 256), (320, 200, 80, 100), (2.0, 4.0), False, 10, (541, 406), (145, 42)),
    ((640, 480), (256, 256), (320, 200, 80, 100), (2.0, 4.0), True, 10, (541, 406), (0, 36)),
    ((640, 480), (256, 256), (320, 200, 80, 100), (1.5, 1.5), False, 10, (640, 480), (192, 72)),
    ((640, 480), (256, 256), (320, 200, 80, 100), (1.5, 1.5), True, 10, (640, 480), (384, 27)),
    ((640, 480), (256, 320), (30, 450, 60, 50), (2.0, 4.0), False, 11, (640, 480), (0, 160)),
    ((640, 480), (256, 320), (30, 450, 60, 50), (2.0, 4.0), True, 11, (640, 480), (341, 160)),
    ((640, 480), (256, 320), (30, 450, 60, 50), (1.5, 1.5), False, 11, (640, 480), (0, 160)),
    ((640, 480), (256, 320), (30, 450, 60, 50), (1.5, 1.5), True, 11, (640, 480), (341, 160)),
    ((300, 900), (256, 256), (150, 100, 120, 90), (2.0, 4.0), False, 12, (277, 831), (12, 0)),
    ((300, 900), (256, 256), (150, 100, 120, 90), (2.0, 4.0), True, 12, (277, 831), (0, 439)),
    ((300, 900), (256, 256), (150, 100, 120, 90), (1.5, 1.5), False, 12, (300, 900), (22, 0)),
    ((300, 900), (256, 256), (150, 100, 120, 90), (1.5, 1.5), True, 12, (300, 900), (44, 0)),
    ((1000, 700), (512, 384), (900, 350, 45, 45), (2.0, 4.0), False, 13, (1000, 700), (488, 157)),
    ((1000, 700), (512, 384), (900, 350, 45, 45), (2.0, 4.0), True, 13, (1000, 700), (488, 88)),
    ((1000, 700), (512, 384), (900, 350, 45, 45), (1.5, 1.5), False, 13, (1000, 700), (488, 158)),
    ((1000, 700), (512, 384), (900, 350, 45, 45), (1.5, 1.5), True, 13, (1000, 700), (488, 88)),
    ((512, 512), (256, 256), (256, 256, 30, 30), (2.0, 4.0), False, 14, (512, 512), (128, 128)),
    ((512, 512), (256, 256), (256, 256, 30, 30), (2.0, 4.0), True, 14, (512, 512), (140, 52)),
    ((512, 512), (256, 256), (256, 256, 30, 30), (1.5, 1.5), False, 14, (512, 512), (128, 128)),
    ((512, 512), (256, 256), (256, 256, 30, 30), (1.5, 1.5), True, 14, (512, 512), (140, 52)),
]


@pytest.mark.parametrize("row", GOLDEN)
def test_the_size_and_the_position_are_those_of_sd_scripts(row):
    size, target, (x, y, width, height), bounds, is_random, seed, resized, left_top = row
    start = BucketAssignment.center_crop(target, size)
    face, rng = Face((x, y), max(width, height)), random.Random(seed)
    actual = draw_face_crop(face, size, start, FaceCropRange(*bounds), is_random=is_random, rng=rng)
    assert (actual.resized_size, actual.crop_left_top) == (resized, left_top)


def test_an_image_of_the_size_of_the_crop_stays_and_a_smaller_one_is_enlarged():
    start, face = BucketAssignment.center_crop((64, 64), (64, 64)), Face((30, 30), 20)
    bounds, rng = FaceCropRange(1.0, 2.0), random.Random(1)
    assert draw_face_crop(face, (64, 64), start, bounds, is_random=True, rng=rng) == start
    small = draw_face_crop(face, (32, 64), start, bounds, is_random=False, rng=rng)
    assert small.resized_size == (64, 128) and 0 <= small.crop_left_top[1] <= 64


def test_faces_are_read_from_the_last_four_parts_of_a_name():
    assert parse_face("mika_1_320_180_90_100.png") == Face((320, 180), 100)
    assert parse_face("mika_320_180_90.png") is None and parse_face("a_0_0_0_0.png") is None
    with pytest.raises(ValueError):
        parse_face("a_girl_in_the_rain.png")


@pytest.fixture
def folder(tmp_path):
    """A picture with a white face, and one without a face in its name."""
    (tmp_path / "p").mkdir()
    pixels = np.zeros((200, 400, 3), np.uint8)
    pixels[80:120, 280:320] = 255
    Image.fromarray(pixels).save(tmp_path / "p" / "mika_300_100_40_40.png")
    Image.fromarray(pixels).save(tmp_path / "p" / "mika.png")
    return tmp_path


def write(folder, head="", keys="face_crop_aug_range = [2.0, 4.0]"):
    text = f"[[datasets]]\nresolution = 64\nbatch_size = 1\n{head}\n[[datasets.subsets]]\nimage_dir = 'p'\n{keys}\n"
    (folder / "set.toml").write_text(text + "class_tokens = 'x'\n")
    return str(folder / "set.toml")


def read_epochs(path, seed=0, epochs=4):
    prepared = prepare_data(DataConfig(dataset_config=path), 8)
    loader = prepared.build_image_loader(BatchPlan(prepared.buckets, 1, 1, seed), 0, total_steps=9, pin_memory=False)
    return [loader.dataset[position] for position in range(2 * epochs)]


def test_the_face_is_in_each_crop_and_another_crop_is_drawn_in_each_epoch(folder):
    batches = read_epochs(write(folder))
    faces = [batch for batch in batches if batch.sample_keys[0].endswith("_40.png")]
    crops = {batch.pixels.numpy().tobytes() for batch in faces}
    assert len(crops) == len(faces) == 4
    for batch in faces:
        white = (batch.pixels[0, 0] > 127).float().mean().item()
        assert 0.05 < white < 0.3
        assert batch.size_conditioning[0].tolist() == [64, 64, 0, 0, 64, 64]
    others = {batch.pixels.numpy().tobytes() for batch in batches if batch.sample_keys[0].endswith("mika.png")}
    assert len(others) == 1, "no face in the name: the center"
    again = read_epochs(write(folder))
    assert all((one.pixels == other.pixels).all() for one, other in zip(batches, again, strict=True))


def test_faces_and_cached_latents_contradict_each_other(folder):
    config = DataConfig(dataset_config=write(folder))
    (line,) = format_lines(validate_dataset_config(config, CacheConfig(cache_latents=True)))
    assert "face_crop_aug_range: cannot be used with cache_latents, because images are cropped at random" in line


def test_buckets_leave_faces_out_as_in_sd_scripts_with_a_notice(folder):
    path = write(folder, "enable_bucket = true\nmin_bucket_reso = 32\nbucket_reso_steps = 8")
    datasets = load_dataset_config(DataConfig(dataset_config=path)).datasets
    (note,) = find_unused_keys(datasets)
    assert "face_crop_aug_range: not used, because enable_bucket is set, whose crops sd-scripts takes instead" in note
    assert validate_dataset_config(DataConfig(dataset_config=path), CacheConfig(cache_latents=True)) == []
    flags = load_settings(["--train_data_dir", str(folder), "--enable_bucket", "--face_crop_aug_range", "2.0,4.0"])
    assert "enable_bucket is set" in dict(format_unused(flags.unused))["--face_crop_aug_range"]
    batches = read_epochs(path, epochs=3)
    assert len({batch.pixels.numpy().tobytes() for batch in batches}) == 1


def test_names_that_give_no_numbers_are_one_problem(folder):
    (folder / "p" / "mika.png").rename(folder / "p" / "a_girl_in_the_rain.png")
    with pytest.raises(FileError) as caught:
        prepare_data(DataConfig(dataset_config=write(folder)), 8)
    (line,) = format_lines(caught.value.problems)
    assert "face_crop_aug_range: file names do not end in the face's center" in line and "a_girl_in_the_rain" in line


@pytest.mark.parametrize("value", ["2.0", "4.0,2.0", "0,1", "x,y"])
def test_a_range_is_two_numbers_in_order(value):
    with pytest.raises(ValueError, match="expected two numbers"):
        FaceCropRange.parse(value)
