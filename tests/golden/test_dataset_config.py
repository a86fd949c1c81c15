"""Dataset files resolve to the values of sd-scripts, and all their mistakes are reported at once with their lines."""

import json
from pathlib import Path

import pytest
from problem_lines import format_lines

from library.config import parse_config
from library.config.schema_data import DataConfig
from library.config.types import FaceCropRange, Resolution
from library.dataset.dataset_config import collect_extra_keys, convert_to_sd_scripts, parse_dataset_config
from library.dataset.schema import collect_flag_defaults
from library.dataset.validate import find_unused_keys, validate_paths, validate_supported_features

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "dataset_configs"


def flags(argv: list[str]) -> dict:
    loaded = parse_config(argv)
    assert [problem for problem in format_lines(loaded.problems) if "--dataset_config: missing" not in problem] == []
    return collect_flag_defaults(loaded.config.data)


def read(tmp_path: Path, text: str, **options):
    path = tmp_path / "set.toml"
    path.write_text(text, encoding="utf-8")
    return parse_dataset_config(path, collect_flag_defaults(DataConfig(**options)))


def problems(tmp_path: Path, text: str, **options) -> list[str]:
    return [problem.replace(f"{tmp_path}/", "") for problem in format_lines(read(tmp_path, text, **options).problems)]


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_every_golden_file_resolves_to_the_values_of_sd_scripts_or_is_rejected_as_there(golden: Path):
    expected = json.loads(golden.read_text(encoding="utf-8"))
    reading = parse_dataset_config(golden.with_suffix(".toml"), flags(expected["cli"]))
    assert (not reading.problems) == expected["ok"], format_lines(reading.problems)
    if expected["ok"]:
        assert convert_to_sd_scripts(reading.datasets) == expected["resolved"]


GOOD = "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'a'\n"


def test_all_mistakes_are_reported_at_once_with_file_line_and_key(tmp_path):
    text = """\
[general]
enable_buckets = true
flip_aug = "true"
image_dir = 'a'

[[datasets]]
batch_size = "4"
keep_tokens = -1
prior_loss_weight = 0.5
train_batch_size = 2
  [[datasets.subsets]]
  resolution = 512
  num_repeats = 0
  caption_dropout_rate = 1.5
  [[datasets.subsets]]
  image_dir = ['a']
  face_crop_aug_range = [1.0]
[extra]
"""
    assert problems(tmp_path, text) == [
        "set.toml:18: extra: unknown table; expected [general] or [[datasets]]",
        "set.toml:2: enable_buckets: unknown key; did you mean enable_bucket?",
        "set.toml:3: flip_aug: expected true or false, got 'true'; write true without quotes",
        "set.toml:4: image_dir: belongs in [[datasets.subsets]], not in [general]",
        "set.toml:7: batch_size: expected an integer, got '4'; write 4 without quotes",
        "set.toml:8: keep_tokens: must be at least 0, got -1",
        "set.toml:9: prior_loss_weight: not a key of dataset files; set it for the run: --prior_loss_weight",
        "set.toml:10: train_batch_size: unknown key; in dataset files it is called batch_size",
        "set.toml:12: resolution: belongs in [general] or [[datasets]], not in [[datasets.subsets]]",
        "set.toml:13: num_repeats: must be at least 1, got 0",
        "set.toml:14: caption_dropout_rate: must be at most 1, got 1.5",
        "set.toml:11: image_dir: missing; set the folder of images: image_dir = 'FOLDER'",
        "set.toml:16: image_dir: expected a string, got ['a']",
        "set.toml:17: face_crop_aug_range: expected two numbers, such as [2.0, 4.0]",
        "set.toml:6: resolution: missing; set it here, in [general] or with --resolution, such as 512 or [512, 768]",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "": "set.toml: no [[datasets]]; add one, and [[datasets.subsets]] with image_dir",
        "datasets = 1": "set.toml:1: datasets: expected an array of tables: [[datasets]]",
        "general = 1\n" + GOOD: "set.toml:1: general: expected the table [general], got 1",
        "[[datasets]]\nresolution = 512": "set.toml:1: no [[datasets.subsets]]; add one with image_dir = 'FOLDER'",
        "[[datasets]]\nresolution = 512\nsubsets = 3": "set.toml:3: subsets: expected an array of"
        " tables: [[datasets.subsets]]",
        GOOD + "is_rge = true": "set.toml:5: is_rge: unknown key; did you mean is_reg?",
        GOOD + "is_reg = true": "set.toml:1: all subsets are regularization images (is_reg); add a subset of images"
        " to train on",
        GOOD + "[[datasets.subsets]]\nimage_dir = './a'": "set.toml:6: image_dir: './a' is already set in set.toml:4;"
        " for more repeats raise num_repeats there",
        GOOD + "[[datasets.subsets]]\nmetadata_file = 'm.json'": "set.toml:1: subsets of different types in one"
        " dataset: neither (set.toml:3), metadata_file (set.toml:5); set metadata_file or conditioning_data_dir in all"
        " of them or in none, or use a [[datasets]] for each type",
        GOOD + "metadata_file = 'm.json'\nclass_tokens = 'x'": "set.toml:6: class_tokens: not supported with"
        " metadata_file; remove one of the two",
        GOOD + "caption_separator = ''": "set.toml:5: caption_separator: must not be empty; the default is ','",
        "general.enable_bucket = true\ngeneral.min_bucket_reso = 640\n" + GOOD: "set.toml:2: min_bucket_reso: 640 is"
        " above the shorter side of resolution 512,512; at most 512",
        "general.enable_bucket = true\n" + GOOD.replace("512", "[512, 1300]"): "set.toml:2: max_bucket_reso: 1024 is"
        " below the longer side of resolution 512,1300; at least 1300",
        "general.enable_bucket = true\ngeneral.min_bucket_reso = 600\ngeneral.max_bucket_reso = 576\n"
        + GOOD: "set.toml:2: min_bucket_reso: min_bucket_reso 600 is above max_bucket_reso 576",
        "general.enable_bucket = true\ngeneral.min_bucket_reso = 32\n" + GOOD: "set.toml:2: min_bucket_reso: 32 is"
        " below bucket_reso_steps 64; at least 64",
        GOOD + "image_directory = 'b'": "set.toml:4: image_dir: a key of sd-scripts' format, but image_directory"
        " (set.toml:5) is one of musubi-tuner's: the file mixes two formats; write all [[datasets]] in one of the two",
        "[[datasets]]\nresolution = 512\nimage_directory = 'a'\nskip_corrupted_cache = true": "set.toml:4:"
        " skip_corrupted_cache: not supported yet: this key of musubi-tuner; remove it",
        "a = = 1": "set.toml:1: not valid TOML: Invalid value",
    }.items(),
)
def test_each_mistake_is_reported_with_a_fix(tmp_path, text: str, expected: str):
    assert problems(tmp_path, text) == [expected]


def test_a_misspelled_subsets_table_is_reported(tmp_path):
    assert problems(tmp_path, GOOD.replace(".subsets", ".subset")) == [
        "set.toml:3: subset: unknown key; did you mean subsets?",
        "set.toml:1: no [[datasets.subsets]]; add one with image_dir = 'FOLDER'",
    ]


def test_integers_and_mixed_arrays_are_accepted_as_numbers(tmp_path):
    text = "general.network_multiplier = 1\ngeneral.face_crop_aug_range = [2, 4.0]\n" + GOOD.replace("512", "'512,768'")
    (dataset,) = read(tmp_path, text + "caption_dropout_rate = 1").require_valid()
    assert dataset.network_multiplier == 1.0 and dataset.resolution == Resolution(512, 768)
    assert dataset.subsets[0].face_crop_aug_range == FaceCropRange(2.0, 4.0)
    assert dataset.subsets[0].caption_dropout_rate == 1.0


def test_the_value_nearest_to_the_subset_wins_even_when_it_is_false(tmp_path):
    text = "[general]\nflip_aug = true\nnum_repeats = 7\nkeep_tokens = 3\n"
    text += "[[datasets]]\nresolution = 512\nkeep_tokens = 2\n"
    text += "[[datasets.subsets]]\nimage_dir = 'a'\nflip_aug = false\n"
    text += "[[datasets.subsets]]\nimage_dir = 'b'\nkeep_tokens = 0\n"
    (dataset,) = read(tmp_path, text, dataset_repeats=9, random_crop=True, caption_suffix="x").require_valid()
    first, second = dataset.subsets
    assert (first.flip_aug, first.num_repeats, first.keep_tokens, first.random_crop) == (False, 7, 2, True)
    assert (second.flip_aug, second.num_repeats, second.keep_tokens, second.caption_suffix) == (True, 7, 0, "x")
    assert [each.locate("keep_tokens").line for each in (first, second)] == [7, 13]
    assert str(first.locate("random_crop")) == "--random_crop" and first.locate("is_reg").line == 8


def test_a_flat_dataset_of_musubi_tuner_is_a_dataset_with_one_subset(tmp_path):
    text = "[general]\nresolution = [960, 544]\ncaption_extension = '.txt'\nbatch_size = 2\n"
    folders = "[[datasets]]\nimage_directory = 'a'\nnum_repeats = 3\n[[datasets]]\nimage_jsonl_file = 'b.jsonl'\n"
    first, second = read(tmp_path, text + folders).require_valid()
    assert (first.kind, first.batch_size, first.resolution) == ("dreambooth", 2, Resolution(960, 544))
    assert (first.subsets[0].image_dir, first.subsets[0].num_repeats) == ("a", 3)
    assert (second.kind, second.subsets[0].metadata_file, second.subsets[0].image_dir) == (
        "finetuning",
        "b.jsonl",
        None,
    )


def test_missing_folders_are_reported_with_what_exists_instead(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "file").write_text("")
    text = "[[datasets]]\nresolution = 512\n" + "".join(
        f"[[datasets.subsets]]\nimage_dir = '{tmp_path / name}'\n" for name in ("imgaes/deep", "file", "images")
    )
    actual = [
        line.replace(f"{tmp_path}/", "") for line in format_lines(validate_paths(read(tmp_path, text).require_valid()))
    ]
    assert actual == [
        f"set.toml:4: image_dir: '{tmp_path}/imgaes/deep' not found; {tmp_path} contains file, set.toml, images/;"
        " did you mean images?".replace(f"{tmp_path}/", ""),
        "set.toml:6: image_dir: file is a file, not a folder",
    ]


def test_a_relative_folder_is_resolved_from_the_working_directory_and_then_from_the_file(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    (home / "a").mkdir(parents=True)
    work.mkdir()
    monkeypatch.chdir(work)
    (dataset,) = read(home, GOOD).require_valid()
    assert dataset.subsets[0].resolve_image_dir() == home / "a"
    (work / "a").mkdir()
    assert dataset.subsets[0].resolve_image_dir() == Path("a")


def test_unsupported_features_are_rejected_by_name(tmp_path):
    text = """\
[general]
color_aug = true
[[datasets]]
resolution = 512
network_multiplier = 0.0
face_crop_aug_range = [2.0, 4.0]
  [[datasets.subsets]]
  image_dir = 'a'
  cache_info = true
  alpha_mask = true
  custom_attributes = { a = 1 }
[[datasets]]
resolution = 512
color_aug = false
  [[datasets.subsets]]
  image_dir = 'a'
  conditioning_data_dir = 'masks'
"""
    actual = [
        line.replace(f"{tmp_path}/", "")
        for line in format_lines(validate_supported_features(read(tmp_path, text).require_valid()))
    ]
    assert actual == ["set.toml:5: network_multiplier: 0 trains nothing"]
    assert format_lines(validate_supported_features(read(tmp_path, GOOD).require_valid())) == []


def test_custom_attributes_with_an_effect_in_sd_scripts_are_rejected_and_others_are_noted(tmp_path):
    def subset(attributes: str) -> tuple:
        return read(tmp_path, GOOD + f"custom_attributes = {{ {attributes} }}").require_valid()

    location = f"{tmp_path}/set.toml:5: custom_attributes: "
    assert format_lines(validate_supported_features(subset("diff_output_preservation = true"))) == [
        f"{location}diff_output_preservation: not supported yet: the loss against the output of the base model"
    ]
    assert format_lines(validate_supported_features(subset("diff_output_preservaton = true"))) == [
        f"{location}diff_output_preservaton: unknown attribute; did you mean diff_output_preservation?"
    ]
    assert format_lines(validate_supported_features(subset("mood = 'calm', diff_output_preservation = false"))) == []
    assert list(find_unused_keys(subset("mood = 'calm', hour = 3"))) == [
        f"{location}hour, mood: not used, training reads no such attributes"
    ]
    assert (
        list(find_unused_keys(subset(""))) == [] == list(find_unused_keys(subset("diff_output_preservation = false")))
    )


JSON = """{
  "general": {"enable_bucket": true, "caption_extension": [".caption", ".txt"]},
  "datasets": [
    {"resolution": [512, 768], "weight": 2,
     "subsets": [
       {"image_dir": "a", "num_repeats": 3},
       {"image_dir": "b", "keep_tokens": 1}]}]
}"""


def test_a_dataset_file_in_json_equals_the_same_file_in_toml(tmp_path):
    (tmp_path / "set.json").write_text(JSON, encoding="utf-8-sig")
    text = "[general]\nenable_bucket = true\ncaption_extension = ['.caption', '.txt']\n"
    text += "[[datasets]]\nresolution = [512, 768]\nweight = 2\n[[datasets.subsets]]\nimage_dir = 'a'\n"
    text += "num_repeats = 3\n[[datasets.subsets]]\nimage_dir = 'b'\nkeep_tokens = 1\n"
    reading = parse_dataset_config(tmp_path / "set.json", collect_flag_defaults(DataConfig()))
    assert reading.require_valid() == read(tmp_path, text).require_valid()
    place = reading.datasets[0].subsets[1].locate("keep_tokens")
    assert str(place) == f"{tmp_path}/set.json: datasets[0].subsets[1]: keep_tokens"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            '"num_repeats": 3',
            '"num_repeats": "3"',
            ": datasets[0].subsets[0]: num_repeats: expected an integer, got '3'; write 3",
        ),
        (
            '"num_repeats": 3',
            '"num_repeats": null',
            ": datasets[0].subsets[0]: num_repeats: expected an integer, got null",
        ),
        (
            '"keep_tokens"',
            '"keep_token"',
            ": datasets[0].subsets[1]: keep_token: unknown key; did you mean keep_tokens?",
        ),
        ('"weight": 2', '"wait": 2', ": datasets[0]: wait: unknown key"),
        ('"enable_bucket"', '"enable_buckets"', ": general: enable_buckets: unknown key; did you mean enable_bucket?"),
        ('"general"', '"generel"', ": generel: unknown table; expected [general] or [[datasets]]"),
        (
            '{"image_dir": "b", "keep_tokens": 1}',
            '"b"',
            ": datasets[0]: subsets: expected an array of tables: [[datasets.subsets]]",
        ),
        ('"num_repeats": 3', '"image_dir": "c"', ": datasets[0].subsets[0]: image_dir: duplicate key"),
        ('"weight": 2', '"resolution": 64, "resolution": 65', ": datasets[0]: resolution: duplicate key"),
        ('"datasets": [', '"datasets": [], "datasets": [', ": datasets: duplicate key"),
        ('"weight": 2', '"weight": NaN', ": not valid JSON: NaN is not a JSON number"),
        ("}]}]", "}]}", ":8: not valid JSON: Expecting ',' delimiter (column 1)"),
        (JSON, "[1]", ": expected an object {...}"),
        (JSON, "", ":1: not valid JSON: Expecting value (column 1)"),
        (JSON, "[" * 100_000, ": nested too deeply"),
        ('"image_dir": "a"', '"image_dir": "caf\udce9"', ": not UTF-8 at byte 186"),
    ],
)
def test_a_mistake_in_json_is_reported_with_its_line_or_its_key_path(tmp_path, old: str, new: str, expected: str):
    assert old in JSON
    (tmp_path / "set.json").write_text(JSON.replace(old, new), encoding="utf-8", errors="surrogateescape")
    (problem,) = format_lines(parse_dataset_config(tmp_path / "set.json", collect_flag_defaults(DataConfig())).problems)
    assert problem.startswith(f"{tmp_path}/set.json{expected}")


def test_a_json_file_that_does_not_exist_is_reported(tmp_path):
    (problem,) = format_lines(parse_dataset_config(tmp_path / "set.json", collect_flag_defaults(DataConfig())).problems)
    assert problem == f"{tmp_path}/set.json: no such file (looked in {tmp_path})"


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        GOOD + "parquet = 'b'": "5: parquet: image_dir is set too, and a subset has one source; use a"
        " [[datasets.subsets]] for each",
        GOOD.replace("image_dir = 'a'", "webdataset = ['b']\nimage_column = 'x'"): "5: image_column: not supported"
        " with webdataset; remove it",
        "general.include = 'x'\n" + GOOD.replace("image_dir", "parquet"): "1: include: not supported with parquet;"
        " remove it",
        GOOD.replace("image_dir", "metadata_file") + "recursive = true": "5: recursive: not supported with"
        " metadata_file; remove it",
        GOOD.replace("image_dir", "parquet") + "caption_extension = '.txt'": "5: caption_extension: not supported"
        " with parquet; remove one of the two",
        GOOD + "caption_extension = []": "5: caption_extension: is empty; set at least one value, or remove it",
        GOOD + "include = ['a', '']": "5: include: is empty; set at least one value, or remove it",
        GOOD + "exclude = '[z-a]'": "5: exclude: '[z-a]' is not a valid pattern: bad character range z-a",
        GOOD + "include = 'a{1..99999999}'": "5: include: {1..99999999} expands to more than 1000000 names",
        GOOD + "recursive = 'yes'": "5: recursive: expected true or false, got 'yes'",
        GOOD + "recursif = true": "5: recursif: unknown key; did you mean recursive?",
        GOOD + "weight = 2": "5: weight: belongs in [general] or [[datasets]], not in [[datasets.subsets]]",
        GOOD.replace("512", "512\nweight = 0"): "3: weight: 0 would exclude the dataset; set a"
        " positive weight, such as 0.5",
        GOOD.replace("512", "512\nweight = -1"): "3: weight: -1 would exclude the dataset; set a"
        " positive weight, such as 0.5",
        GOOD.replace("512", "512\nweight = 2") + GOOD: "6: weight: missing here, but set in {file}:3; set it for"
        " all [[datasets]] or for none",
        "[[datasets]]\nresolution = 512\nimage_directory = 3": "3: image_directory: expected a string, got 3",
        "[[datasets]]\nresolution = 512\nvideo_directory = 'v'\nimage_directory = 'a'": "3: video_directory: "
        "image_directory is set too, and a dataset has one source; use a [[datasets]] for each",
        "[[datasets]]\nresolution = 512\nimage_directory = 'a'\ntarget_frames = [1]": "4: target_frames: only for"
        " videos, and this dataset has images; remove it",
        "[[datasets]]\nresolution = 512\nvideo_directory = 'a'\ntarget_frames = [0]": "4: target_frames: must be at"
        " least 1, got 0",
        "[[datasets]]\nresolution = 512\nvideo_directory = 'a'\nframe_extraction = 'tail'": "4: frame_extraction: "
        "'tail' is not one of head, chunk, slide, uniform, full",
        "[[datasets]]\nresolution = 512\nimage_directory = 'a'\nskip_corrupted_cache = true": "4: skip_corrupted_cache:"
        " not supported yet: this key of musubi-tuner; remove it",
    }.items(),
)
def test_each_mistake_in_our_own_keys_is_reported_with_a_fix(tmp_path, text: str, expected: str):
    file = f"{tmp_path}/set.toml"
    assert format_lines(read(tmp_path, text).problems) == [f"{file}:{expected.replace('{file}', file)}"]


def test_our_own_keys_above_the_subsets_need_to_apply_to_only_one_of_them(tmp_path):
    text = "general.exclude = 'x'\ngeneral.recursive = true\n" + GOOD + "[[datasets.subsets]]\nparquet = 'b'\n"
    (dataset,) = read(tmp_path, text).require_valid()
    assert [subset.recursive for subset in dataset.subsets] == [True, True] and dataset.kind == "dreambooth"


def test_our_own_keys_are_listed_apart_from_those_of_sd_scripts(tmp_path):
    text = "general.recursive = true\n" + GOOD.replace("512", "512\nweight = 2") + "include = '*.png'\n"
    (plain,), (dataset,) = read(tmp_path, GOOD).require_valid(), read(tmp_path, text).require_valid()
    assert convert_to_sd_scripts([plain]) == convert_to_sd_scripts([dataset]) and collect_extra_keys(plain) == {}
    assert collect_extra_keys(dataset) == {"weight": 2.0, "subsets": [{"recursive": True, "include": ["*.png"]}]}


def test_several_caption_extensions_can_be_set_in_the_file_or_by_flag(tmp_path):
    (dataset,) = read(tmp_path, GOOD + "caption_extension = ['cap', '.txt']").require_valid()
    assert dataset.subsets[0].normalized_caption_extensions == (".cap", ".txt")
    assert convert_to_sd_scripts([dataset])[0]["subsets"][0]["caption_extension"] == ["cap", ".txt"]
    path = tmp_path / "set.toml"
    path.write_text(GOOD, encoding="utf-8")
    (dataset,) = parse_dataset_config(path, flags(["--caption_extension", ".caption", ".txt"])).require_valid()
    assert dataset.subsets[0].normalized_caption_extensions == (".caption", ".txt")
    (dataset,) = parse_dataset_config(path, flags(["--caption_extention", "txt"])).require_valid()
    assert convert_to_sd_scripts([dataset])[0]["subsets"][0]["caption_extension"] == "txt"


def test_every_image_key_of_musubi_tuner_is_known(tmp_path):
    """Its image schema; the keys at the end are rejected by name."""
    text = """\
[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 2
enable_bucket = true
bucket_no_upscale = false
num_repeats = 2
[[datasets]]
image_directory = "a"
resolution = 512
batch_size = 3
num_repeats = 4
enable_bucket = false
bucket_no_upscale = true
caption_extension = ".cap"
"""
    (dataset,) = read(tmp_path, text).require_valid()
    (subset,) = dataset.subsets
    assert (dataset.batch_size, dataset.enable_bucket, dataset.bucket_no_upscale) == (3, False, True)
    assert (subset.num_repeats, subset.normalized_caption_extensions) == (4, (".cap",))
    frames = ("fp_latent_window_size", "fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post")
    values = dict(zip(frames, ("1", "[0]", "1", "true"), strict=True))
    one_frame = "".join(f"{name} = {value}\n" for name, value in values.items())
    reading = read(tmp_path, f"{text}{one_frame}multiple_target = false\n")
    assert reading.require_valid()[0].subsets == (subset,)
    assert [notice.split(": ")[1:3] for notice in reading.notices[:-1]] == [[name, "no effect"] for name in frames]
    unsupported = ("skip_corrupted_cache",)
    actual = format_lines(read(tmp_path, text + "".join(f"{name} = true\n" for name in unsupported)).problems)
    assert [line.split(": ")[1:3] for line in actual] == [[name, "not supported yet"] for name in unsupported]
