"""Dataset files in musubi-tuner's format: their defaults, captions and control images, and files that mix formats."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from image_listings import get_captions, list_subsets, strip_folder, write_files
from PIL import Image
from problem_lines import format_lines, format_unused

from library.config.schema_data import DataConfig
from library.config.types import Resolution
from library.dataloader.buckets import BucketAssignment, assign_controls, build_bucket_assigner
from library.dataloader.caption_processing import process_caption
from library.dataloader.dataset_metadata import build_dataset_metadata
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.schema import collect_flag_defaults
from library.dataset.validate import validate_paths, validate_resolution_multiple
from library.errors import ConfigError
from library.randomness import random
from library.training.preflight import load_settings

HEAD = "[[datasets]]\nimage_directory = 'a'\ncaption_extension = '.txt'\n"


def read(folder: Path, text: str, **options):
    path = folder / "set.toml"
    path.write_text(text, encoding="utf-8")
    return parse_dataset_config(path, collect_flag_defaults(DataConfig(**options)))


def problems(folder: Path, text: str) -> list[str]:
    return strip_folder(folder, format_lines(read(folder, text).problems))


def prepare(folder: Path, text: str, size_multiple: int = 16, **options) -> PreparedData:
    (folder / "set.toml").write_text(text, encoding="utf-8")
    return prepare_data(DataConfig(dataset_config=str(folder / "set.toml"), **options), size_multiple)


def write_image(path: Path, size: tuple[int, int], caption: str | None = "a bird") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 60, 30)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


MIXED = "a key of sd-scripts' format, but image_directory ({}) is one of musubi-tuner's: the file mixes two formats; "


@pytest.mark.parametrize(
    ("text", "place", "musubi_place", "fix"),
    [
        (
            "general.min_bucket_reso = 256\n" + HEAD,
            "set.toml:1: min_bucket_reso",
            "set.toml:3",
            "remove it: musubi-tuner's buckets follow from resolution alone",
        ),
        (
            HEAD + "keep_tokens = 1",
            "set.toml:4: keep_tokens",
            "set.toml:2",
            "remove it, or set it for the run: --keep_tokens",
        ),
        (HEAD + "image_dir = 'b'", "set.toml:4: image_dir", "set.toml:2", "write all [[datasets]] in one of the two"),
        (
            HEAD + "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'b'\nflip_aug = true",
            "set.toml:6: image_dir",
            "set.toml:2",
            "write all [[datasets]] in one of the two",
        ),
        (
            "[[datasets]]\n[[datasets.subsets]]\nimage_directory = 'b'",
            "set.toml:2: subsets",
            "set.toml:3",
            "write all [[datasets]] in one of the two",
        ),
    ],
)
def test_a_file_that_mixes_both_formats_is_an_error_that_names_both_keys(tmp_path, text, place, musubi_place, fix):
    assert problems(tmp_path, text) == [f"{place}: {MIXED.format(musubi_place)}{fix}"]


def test_the_lines_of_mixed_keys_are_reported_beside_the_other_mistakes(tmp_path):
    actual = problems(tmp_path, HEAD + "flip_aug = true\nbatch_size = 'two'\nbucket_mode = 'symmetric'")
    assert [line.split(": ")[:2] for line in actual] == [
        ["set.toml:4", "flip_aug"],
        ["set.toml:6", "bucket_mode"],
        ["set.toml:5", "batch_size"],
    ]
    assert "a key of this program's buckets" in actual[1]


def test_an_unknown_key_is_told_which_keys_the_format_has(tmp_path):
    (problem,) = problems(tmp_path, HEAD + "foo = 1")
    allowed = problem.partition("allowed in [[datasets]]: ")[2].split(", ")
    assert {"image_directory", "num_repeats", "control_resolution"} <= {*allowed}
    assert not {"flip_aug", "min_bucket_reso", "subsets"} & {*allowed}


def test_a_dataset_without_settings_has_the_defaults_of_musubi_tuner(tmp_path):
    parsed = read(tmp_path, HEAD)
    (dataset,) = parsed.require_valid()
    assert (dataset.resolution, dataset.enable_bucket, dataset.batch_size) == (Resolution(960, 544), False, 1)
    assert strip_folder(tmp_path, parsed.notices) == [
        "set.toml:1: resolution: not set; musubi-tuner's is 960,544",
        "set.toml: in musubi-tuner's format, with its sizes, buckets and captions",
    ]
    (dataset,) = read(tmp_path, HEAD, resolution=Resolution(512, 512)).require_valid()
    assert dataset.resolution == Resolution(512, 512)


def test_keys_of_images_that_are_missing_or_set_twice_are_named_as_they_are_there(tmp_path):
    assert problems(tmp_path, HEAD + "[[datasets]]\ncache_directory = 'c'\n") == [
        "set.toml:4: image_directory: missing; set the folder of images: image_directory = 'FOLDER'; or"
        " image_jsonl_file, video_directory, video_jsonl_file"
    ]
    assert problems(tmp_path, HEAD + "image_jsonl_file = 'c.jsonl'\n") == [
        "set.toml:4: image_jsonl_file: image_directory is set too, and a dataset has one source; use a [[datasets]]"
        " for each"
    ]
    (line,) = format_lines(validate_paths(read(tmp_path, HEAD).require_valid()))
    assert strip_folder(tmp_path, [line])[0].startswith("set.toml:2: image_directory: 'a' not found")


def test_cache_directories_are_one_notice(tmp_path):
    parsed = read(tmp_path, HEAD + "cache_directory = 'c'\n" + HEAD.replace("'a'", "'b'") + "cache_directory = 'd'\n")
    parsed.require_valid()
    notices = [line for line in strip_folder(tmp_path, parsed.notices) if "cache_directory" in line]
    assert notices == [
        "set.toml:4: cache_directory: this program keeps its own caches there; those that musubi-tuner made are not"
        " needed, and not read"
    ]


def test_options_of_sd_scripts_buckets_have_no_effect_on_a_file_of_musubi_tuner(tmp_path):
    (tmp_path / "set.toml").write_text(HEAD + "enable_bucket = true\nresolution = 1328\n", encoding="utf-8")
    flags = ["--min_bucket_reso", "512", "--max_bucket_reso", "512", "--bucket_reso_steps", "32"]
    argv = ["--dataset_config", str(tmp_path / "set.toml"), *flags, "--bucket_mode", "symmetric"]
    unused = dict(format_unused(load_settings([*argv, "--pretrained_model_name_or_path", "random:sd1:tiny"]).unused))
    reason = "the dataset file is in musubi-tuner's format, whose buckets follow from resolution alone"
    assert unused == dict.fromkeys(("--bucket_mode", *flags[::2]), reason)


def test_captions_keep_their_lines_and_images_without_one_are_left_out(tmp_path):
    write_files(tmp_path / "a", ["1.png", "2.png", "3.png"])
    write_files(tmp_path / "a", {"1.txt": "one\r\n\r\n two \n", "3.txt": "", "4.txt": "stray"})
    (listing,) = list_subsets(tmp_path, head=HEAD)
    assert get_captions(listing) == {"1.png": "one\n\n two", "3.png": ""}
    (subset,) = read(tmp_path, HEAD).require_valid()[0].subsets
    arguments = {"epoch": 0, "step": 0, "total_steps": 1}
    assert process_caption("one\n\ntwo", subset, random.Random(0), **arguments) == "one\n\ntwo"
    kohya = replace(subset, uses_musubi_captions=False)
    assert process_caption("one\n\ntwo", kohya, random.Random(0), **arguments) == "one"
    assert "a: 1 image without a caption file (.txt) left out, as in musubi-tuner: 2.png" in strip_folder(
        tmp_path, listing.notes
    )
    (listing,) = list_subsets(tmp_path, head=HEAD.replace(".txt", ".cap"))
    (problem,) = strip_folder(tmp_path, format_lines(listing.problems))
    assert problem.startswith("set.toml:2: image_directory: 3 images without a caption file (.cap) in")


def test_a_jsonl_file_has_captions_and_control_images_and_no_control_directory(tmp_path):
    rows = [{"image_path": "a/1.png", "caption": " one\ntwo ", "tags": "none", "control_path": "c/1.png"}]
    for name in "ac":
        write_image(tmp_path / name / "1.png", (64, 64), None)
    (tmp_path / "s.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")
    text = "[[datasets]]\nimage_jsonl_file = 's.jsonl'\nresolution = 64\ncontrol_directory = 'nowhere'\n"
    manifest = prepare(tmp_path, text).manifest
    ((caption, controls),) = [(sample.caption, sample.controls) for sample in manifest.samples]
    assert caption == " one\ntwo " and [control.image.name for control in controls] == ["1.png"]
    assert any("control_directory: no effect: image_jsonl_file lists the control images" in n for n in manifest.notes)


CONTROL_SIZES = {
    "": ((1248, 832), (1248, 936)),
    "control_resolution = [512, 512]": ((592, 432), (592, 444)),
    "no_resize_control = true": ((992, 736), (992, 744)),
    "no_resize_control = true\ncontrol_resolution = 1024": ((992, 736), (992, 744)),
    "no_resize_control = true\ncontrol_resolution = 256": ((288, 224), (299, 224)),
}
"""The bucket and the resized size of a control image of 1000 by 750 pixels beside a picture of 1500 by 1000."""


@pytest.mark.parametrize(("keys", "expected"), CONTROL_SIZES.items())
def test_control_images_have_the_sizes_of_musubi_tuner(tmp_path, keys, expected):
    write_image(tmp_path / "a" / "1.png", (1500, 1000))
    write_image(tmp_path / "c" / "1.png", (1000, 750), None)
    head = f"{HEAD}control_directory = 'c'\nresolution = 1024\nenable_bucket = true\n"
    prepared = prepare(tmp_path, f"{head}{keys}\n")
    ((sample,), (assignment,)) = prepared.manifest.samples, prepared.assignments
    (control,) = assign_controls(sample, assignment, prepared.manifest.datasets[0])
    assert control == BucketAssignment.center_crop(*expected)


def test_buckets_are_in_steps_that_the_model_can_train(tmp_path):
    write_image(tmp_path / "a" / "1.png", (1000, 700))
    text = HEAD + "resolution = 512\nenable_bucket = true\n"
    sizes = {step: prepare(tmp_path, text, step).buckets[0].resolution for step in (8, 16, 32, 64)}
    assert sizes == {8: (592, 432), 16: (592, 432), 32: (608, 416), 64: (576, 448)}
    metadata = build_dataset_metadata(*_get_samples(prepare(tmp_path, text)), 1)
    assert "ss_bucket_no_upscale" in metadata and "ss_max_bucket_reso" not in metadata


def _get_samples(prepared: PreparedData):
    return prepared.manifest, prepared.assignments


def test_a_resolution_without_room_for_buckets_is_an_error_and_so_is_a_picture(tmp_path):
    small = HEAD + "resolution = [16, 40]\nenable_bucket = true\n"
    assert problems(tmp_path, small) == [
        "set.toml:4: resolution: 16,40 is too small for buckets in steps of 16: it needs the area of 32x32"
    ]
    datasets = read(tmp_path, small.replace("[16, 40]", "48")).require_valid()
    assert validate_resolution_multiple(datasets, 16) == []
    (line,) = format_lines(validate_resolution_multiple(datasets, 32, "HiDream-O1"))
    assert line.endswith(
        ": resolution: 48,48 is too small for buckets in steps of 32: it needs the area of 64x64 (HiDream-O1)"
    )
    write_image(tmp_path / "a" / "1.png", (300, 12))
    with pytest.raises(ConfigError, match="300x12 pixels leave no bucket with bucket_no_upscale"):
        prepare(tmp_path, small.replace("[16, 40]", "64") + "bucket_no_upscale = true\n")


def test_a_resolution_schedule_has_buckets_of_each_area(tmp_path):
    text = HEAD + "enable_bucket = true\nresolution_schedule = '512:10,1024'\n"
    write_image(tmp_path / "a" / "1.png", (1500, 1000))
    assert [bucket.resolution for bucket in prepare(tmp_path, text).buckets] == [(624, 416), (1248, 832)]
    (dataset,) = read(tmp_path, HEAD + "resolution = 1024\nenable_bucket = true").require_valid()
    assert build_bucket_assigner(dataset)(1500, 1000).resized_size == (1248, 832)
