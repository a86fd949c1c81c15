"""``train_data_dir``, ``reg_data_dir`` and ``in_json``: skipped files are reported, and each mistake with its fix."""

import json
from pathlib import Path

import pytest
from image_listings import encode_image, list_subset, list_subsets, prepare_subsets, strip_folder, write_files
from problem_lines import format_lines, format_unused

from library.config import parse_config
from library.config.schema_data import DataConfig
from library.config.types import Resolution
from library.dataloader.prepare import prepare_data
from library.dataset.dataset_config import load_dataset_config, parse_dataset_config
from library.dataset.kohya_folders import parse_folder_name
from library.dataset.schema import collect_flag_defaults
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError
from library.training.preflight import find_settings_problems

SIZE = {"resolution": Resolution(64, 64)}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with one training folder of sd-scripts."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "train" / "10_mika dog", ["1.png", "2.png"])
    return tmp_path


def find_problems(folder: Path, **options) -> list[str]:
    return strip_folder(folder, format_lines(validate_dataset_config(DataConfig(**{**SIZE, **options}))))


def collect_notes(folder: Path, **options) -> list[str]:
    return strip_folder(folder, prepare_data(DataConfig(**{**SIZE, **options}), 8).manifest.notes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("10_mika dog", (10, "mika dog")), ("3", (3, "")), ("2_a_b_", (2, "a_b_")), ("cat", None), ("_1", None)],
)
def test_a_folder_name_is_split_as_in_sd_scripts(name, expected):
    assert parse_folder_name(name) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train_data_dir": "trian"}, "--train_data_dir: 'trian' not found; . contains train/; did you mean train?"),
        (
            {"train_data_dir": "train/10_mika dog"},
            "--train_data_dir: train/10_mika dog has the images itself; give the folder above it: --train_data_dir"
            " 'train'",
        ),
        (
            {"train_data_dir": "."},
            "--train_data_dir: .: no folder named 'REPEATS_CLASS', such as '10_mika dog'; it contains train/",
        ),
        (
            {"train_data_dir": "train/10_mika dog/1.png"},
            "--train_data_dir: train/10_mika dog/1.png is a file, not a folder",
        ),
        ({"reg_data_dir": "train"}, "--reg_data_dir: no images to train on; give their folder with --train_data_dir"),
        (
            {"train_data_dir": "train", "reg_data_dir": "train"},
            "--reg_data_dir: is the same folder as --train_data_dir; remove one of the two",
        ),
        (
            {"train_data_dir": "train", "resolution": None},
            "--resolution: missing; train_data_dir needs it, such as 512 or 512,768",
        ),
        (
            {"train_data_dir": "train", "enable_bucket": True},
            "--min_bucket_reso: 256 is above the shorter side of resolution 64,64; at most 64",
        ),
        ({"in_json": "meta.json"}, "--in_json: 'meta.json' not found; . contains train/"),
    ],
)
def test_each_mistake_is_reported_with_a_fix(folder, options, expected):
    assert find_problems(folder, **options) == [expected]


def test_all_mistakes_are_reported_at_once(folder):
    assert find_problems(folder, train_data_dir="a", reg_data_dir="b", resolution=None) == [
        "--train_data_dir: 'a' not found; . contains train/",
        "--reg_data_dir: 'b' not found; . contains train/",
        "--resolution: missing; train_data_dir needs it, such as 512 or 512,768",
    ]
    assert find_problems(folder, in_json="a.json", reg_data_dir="train") == [
        "--reg_data_dir: not used with in_json, in sd-scripts neither; remove one of the two",
        "--in_json: 'a.json' not found; . contains train/",
    ]


def test_a_folder_of_images_without_repeats_is_a_mistake(folder):
    write_files(folder / "plain", ["1.png", "2.png"])
    assert find_problems(folder, train_data_dir="plain") == [
        "--train_data_dir: plain: no folder named 'REPEATS_CLASS', such as '10_mika dog', but 2 images; move them into"
        " such a folder"
    ]
    (folder / "set" / "1_a" / "deeper").mkdir(parents=True)
    assert find_problems(folder, train_data_dir="set") == [
        "--train_data_dir: set: no images in 1_a/; subfolders of these are not searched"
    ]


def test_skipped_folders_and_images_are_reported(folder):
    for name in ("drafts", "0_off"):
        write_files(folder / "train" / name, {"1.png": encode_image(7)})
    write_files(folder / "train", {"loose.png": encode_image(8)})
    (folder / "train" / "5_empty").mkdir()
    assert collect_notes(folder, train_data_dir="train")[:3] == [
        "train: no images in 5_empty/",
        "train: no repeats in the name, not used: 0_off/, drafts/; rename a folder to 'REPEATS_CLASS', such as '10_mika"
        " dog', to use it",
        "train: 1 image outside of folders with repeats, not used: loose.png",
    ]


def test_a_dataset_file_takes_precedence_with_a_notice(folder):
    (folder / "set.toml").write_text("[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'train/10_mika dog'\n")
    (folder / "run.toml").write_text("train_data_dir = 'nowhere'\nin_json = 'x.json'\nresolution = 64\n")
    loaded = parse_config(["--config_file", "run.toml", "--dataset_config", "set.toml"])
    assert format_lines(find_settings_problems(loaded)) == []
    assert loaded.config.data.train_data_dir is loaded.config.data.in_json is None
    assert dict(format_unused(loaded.unused)) == {
        "run.toml:1: train_data_dir": "dataset_config is set",
        "run.toml:2: in_json": "dataset_config is set",
    }


def test_repeats_of_the_command_line_have_no_effect_on_folders_with_repeats(folder):
    flags = ["--train_data_dir", "train", "--resolution", "64", "--dataset_repeats", "5"]
    (unused,) = format_unused(parse_config(flags).unused)
    assert unused[1] == "the names of the folders in train_data_dir set the repeats"
    assert format_unused(parse_config([*flags, "--in_json", "meta.json"]).unused) == ()


def test_an_empty_value_is_none(folder):
    write_files(folder, {"run.toml": "train_data_dir = 'train'\nreg_data_dir = ''\nin_json = ''\nresolution = 64\n"})
    loaded = parse_config(["--config_file", "run.toml"])
    assert format_lines(find_settings_problems(loaded)) == []
    (dataset,) = load_dataset_config(loaded.config.data).require_valid()
    assert [subset.image_dir for subset in dataset.subsets] == ["train/10_mika dog"]


def test_a_metadata_file_lists_images_with_and_without_extension(folder):
    metadata = {"1.png": {"caption": "one"}, "2": {"tags": "two"}}
    write_files(folder, {"meta.json": json.dumps(metadata)})
    ready = prepare_data(
        DataConfig(**SIZE, train_data_dir="train/10_mika dog", in_json="meta.json", dataset_repeats=4), 8
    )
    assert [(sample.caption, sample.repeats) for sample in ready.manifest.samples] == [("one", 4), ("two", 4)]


def test_class_tokens_and_a_set_caption_extension_win_over_txt_files_as_in_sd_scripts(folder):
    write_files(folder / "train" / "10_mika dog", {"1.txt": "one", "2.txt": "two"})
    hint = "there are .txt files for 2 of the images without a caption; use them with"
    ready = prepare_data(DataConfig(**SIZE, train_data_dir="train"), 8)
    assert {sample.caption for sample in ready.manifest.samples} == {"mika dog"}
    assert f"train/10_mika dog: {hint} --caption_extension .txt" in ready.manifest.notes
    for keys, caption, fix in (
        ("class_tokens = 'cls'", "cls", "'.txt'"),
        ("caption_extension = '.caption'", "", "['.caption', '.txt']"),
    ):
        listing = list_subset(folder, f"image_dir = 'train/10_mika dog'\n{keys}")
        assert {item.caption for item in listing.images} == {caption}
        assert f"train/10_mika dog: {hint} caption_extension = {fix}" in listing.notes
    captions = {
        item.caption for item in list_subset(folder, "image_dir = 'train/10_mika dog'\nnum_repeats = 10").images
    }
    assert captions == {"one", "two"}
    data = parse_config(["--train_data_dir", "train", "--resolution", "64", "--caption_extension", ".txt"]).config.data
    assert {sample.caption for sample in prepare_data(data, 8).manifest.samples} == {"one", "two"}


def test_a_folder_name_with_repeats_gets_a_hint_in_a_dataset_file(folder):
    image_dir = "image_dir = 'train/10_mika dog'"
    write_files(folder / "2023_holiday", ["1.png"])

    def collect_hints(*subsets: str) -> list[str]:
        listing, *_ = list_subsets(folder, *subsets)
        return [line for line in strip_folder(folder, listing.notes) if "sets nothing" in line or "set nothing" in line]

    start = "set.toml:4: image_dir: the folder name '10_mika dog' sets nothing in a dataset file; set"
    end = "or give --train_data_dir 'train' instead of the file"
    assert collect_hints(image_dir) == [f"{start} num_repeats = 10 and class_tokens = 'mika dog', {end}"]
    assert collect_hints(f"{image_dir}\nnum_repeats = 1") == [f"{start} class_tokens = 'mika dog', {end}"]
    assert collect_hints(f"{image_dir}\nclass_tokens = 'x'") == [f"{start} num_repeats = 10, {end}"]
    assert collect_hints(f"{image_dir}\nclass_tokens = 'x'\nnum_repeats = 4") == []
    (reg_hint,) = collect_hints(f"{image_dir}\nis_reg = true", "image_dir = '2023_holiday'")
    assert "--reg_data_dir 'train' instead" in reg_hint
    assert collect_hints("image_dir = 'train'\nrecursive = true") == [
        "set.toml:4: image_dir: folder names set nothing in a dataset file: 10_mika dog/; give --train_data_dir 'train'"
        " instead of the file, or a subset with num_repeats and class_tokens for each"
    ]
    assert collect_hints("image_dir = '2023_holiday'") == []
    assert strip_folder(folder, format_lines(list_subset(folder, "image_dir = 'train'").problems)) == [
        "set.toml:4: image_dir: no images; train contains 2 images in 10_mika dog/; give --train_data_dir 'train'"
        " instead of the dataset file, or a subset with num_repeats and class_tokens for each subfolder"
    ]


def test_captions_without_an_image_are_counted_with_examples(folder):
    texts = {f"{number}.txt": "x" for number in range(1, 7)}
    write_files(folder / "a", ["1.png", "2_1_2_3_4.png"])
    write_files(folder / "a", {**texts, "3.caption": "x"})
    keys = "image_dir = 'a'\ncaption_extension = "
    note = "without an image, not used:"
    assert f"a: 4 caption files {note} 3.txt, 4.txt, 5.txt, ..." in list_subset(folder, f"{keys}'.txt'").notes
    assert f"a: 1 caption file {note} 3.caption" in list_subset(folder, f"{keys}'.caption'").notes
    assert not any(note in line for line in list_subset(folder, f"{keys}''").notes)
    excluded = list_subset(folder, "image_dir = 'a'\ncaption_extension = '.txt'\nexclude = '1.png'")
    assert f"a: 4 caption files {note} 3.txt, 4.txt, 5.txt, ..." in excluded.notes


def test_too_many_repeats_are_reported_before_images_are_listed(folder):
    path = folder / "set.toml"
    path.write_text(
        "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'train'\nnum_repeats = 1000000000\n"
    )
    end = "1000000000 is too large; the length of the run is set by --max_train_steps or --max_train_epochs"
    assert find_problems(folder, dataset_config=str(path)) == [f"set.toml:5: num_repeats: {end}"]
    (folder / "train" / "10_mika dog").rename(folder / "train" / "1000000000_x")
    assert find_problems(folder, train_data_dir="train") == [f"train/1000000000_x: num_repeats: {end}"]
    assert format_lines(parse_dataset_config(path, collect_flag_defaults(DataConfig())).problems) == []


def test_an_epoch_of_too_many_samples_is_reported_before_it_is_planned(folder):
    with pytest.raises(ConfigError) as caught:
        prepare_subsets(folder, "image_dir = 'train/10_mika dog'\nnum_repeats = 60000000")
    assert strip_folder(folder, format_lines(caught.value.problems)) == [
        "set.toml:5: num_repeats: an epoch would have 1.2e+08 images with repeats, more than 100000000; lower it; the"
        " length of the run is set by --max_train_steps or --max_train_epochs"
    ]
