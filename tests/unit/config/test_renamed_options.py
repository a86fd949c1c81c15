"""Options and values that were renamed are accepted under their old names, with a notice."""

import json
import subprocess
import sys

import pytest
from data_paths import DATA, ROOT
from problem_lines import format_lines

from library.config import parse_config
from library.config.kohya_compat import RENAMED_OPTIONS, RENAMED_VALUES, upgrade_settings
from library.config.options import iter_options
from library.config.schema import RunConfig
from library.config.schema_data import DataConfig
from library.dataloader.prepare import prepare_data
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.schema import collect_flag_defaults
from library.training.resume import find_changes, serialize_settings

OPTIONS = {option.name: option for option in iter_options(RunConfig)}
OLD_SETTINGS = [
    ("base_storage", "nf4", "quantize_base", "nf4"),
    ("base_storage", "float", "quantize_base", "none"),
    ("quantize_base", "float", "quantize_base", "none"),
    ("on_oom", "ladder", "on_oom", "recover"),
    ("max_bad_steps", "3", "max_nan_steps", 3),
    ("bucket_min_pictures", "2", "bucket_min_images", 2),
    ("gradient_checkpointing_budget", "0.5", "activation_memory_budget", 0.5),
    ("compile_shapes", "static", "compile_dynamic", "false"),
    ("compile_shapes", "dynamic", "compile_dynamic", "true"),
    ("compile_shapes", "auto", "compile_dynamic", "auto"),
    ("on_bad_data", "skip", "on_invalid_images", "skip"),
    ("max_bad_samples", "7", "max_invalid_images", 7),
]
REQUIRED = ["--gradient_checkpointing", "--torch_compile", "--auto_resume"]


def get_value(parsed, name):
    return getattr(getattr(parsed.config, OPTIONS[name].group), name)


def format_notice(location, old, value, new, new_value):
    values = (f" {value}", f" {new_value}") if value in RENAMED_VALUES.get(new, {}) else ("", "")
    renamed = f"{location}{values[0]}: renamed to {new}{values[1]}"
    return f"{renamed}; the old name will be removed in the next release"


def test_every_renamed_option_maps_to_an_existing_option():
    assert set(RENAMED_OPTIONS.values()) <= set(OPTIONS) and set(RENAMED_VALUES) <= set(OPTIONS)
    assert not set(RENAMED_OPTIONS) & set(OPTIONS)
    for name, values in RENAMED_VALUES.items():
        assert set(values.values()) <= set(OPTIONS[name].value_type) and not set(values) & set(OPTIONS[name].value_type)


@pytest.mark.parametrize(("old", "value", "new", "new_value"), OLD_SETTINGS)
def test_an_old_flag_sets_the_renamed_option_with_a_notice(old, value, new, new_value):
    parsed = parse_config([*DATA, *REQUIRED, f"--{old}", value])
    assert format_lines(parsed.problems) == [] and get_value(parsed, new) == new_value
    assert str(parsed.locations[new]) == f"--{old}"
    assert parsed.notices == [format_notice(f"--{old}", old, value, new, new_value)]


@pytest.mark.parametrize(("old", "value", "new", "new_value"), OLD_SETTINGS)
def test_an_old_key_of_the_run_toml_sets_the_renamed_option_with_a_notice(old, value, new, new_value, tmp_path):
    path = tmp_path / "run.toml"
    text = value if value[0].isdigit() else f"'{value}'"
    path.write_text(f"[any]\n{old} = {text}\n")
    parsed = parse_config([*DATA, *REQUIRED, "--config_file", str(path)])
    assert format_lines(parsed.problems) == [] and get_value(parsed, new) == new_value
    assert parsed.notices == [format_notice(f"{path}:2: {old}", old, value, new, new_value)]


def test_an_old_switch_is_a_switch_in_flags_and_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("resume_anyway = true\n")
    for words, is_on in (
        (["--resume_anyway"], True),
        (["--config_file", str(path)], True),
        (["--config_file", str(path), "--no-resume_anyway"], False),
        (["--config_file", str(path), "--no-force_resume"], False),
    ):
        parsed = parse_config([*DATA, "--auto_resume", *words])
        assert format_lines(parsed.problems) == [] and parsed.config.state.force_resume == is_on
        assert all("renamed to force_resume" in notice for notice in parsed.notices) and parsed.notices
    (problem,) = format_lines(parse_config([*DATA, "--auto_resume", "--resume_anyway", "yes"]).problems)
    assert problem == "--resume_anyway: takes no value, got 'yes'; use --force_resume or --no-force_resume"


def test_a_flag_wins_over_the_old_name_in_the_run_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("max_bad_steps = 3\n")
    assert parse_config([*DATA, "--config_file", str(path), "--max_nan_steps", "5"]).config.train.max_nan_steps == 5


def test_both_names_in_one_run_toml_are_a_duplicate_key(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("max_bad_steps = 3\nmax_nan_steps = 4\n")
    assert format_lines(parse_config([*DATA, "--config_file", str(path)]).problems) == [
        f"{path}:2: max_nan_steps: duplicate key, first set in line 1"
    ]


def test_current_names_give_no_notice(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("compile_dynamic = true\ntorch_compile = true\nquantize_base = 'none'\n")
    parsed = parse_config([*DATA, "--config_file", str(path), "--on_oom", "recover"])
    assert (format_lines(parsed.problems), parsed.notices) == (
        [],
        [],
    ) and parsed.config.distributed.compile_dynamic == "true"


def test_an_invalid_value_of_an_old_name_is_a_problem_of_the_option():
    (problem,) = format_lines(parse_config([*DATA, "--base_storage", "int3"]).problems)
    assert problem == "--base_storage: 'int3' is not one of none, fp8, int8, nf4"


def test_the_notice_is_printed_once_and_training_is_planned():
    words = ["--dataset_config", "dataset_configs/demo.toml", "--max_bad_steps", "3", "--dry_run"]
    result = subprocess.run([sys.executable, "train_lora.py", *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("--max_bad_steps: renamed to max_nan_steps") == 1


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_an_old_key_of_the_dataset_file_sets_the_renamed_field_with_a_notice(suffix, tmp_path):
    path = tmp_path / f"set.{suffix}"
    folder = str(ROOT / "dataset_configs" / "demo")
    keys = {"resolution": 256, "enable_bucket": True, "bucket_mode": "symmetric", "bucket_min_pictures": 2}
    if suffix == "json":
        path.write_text(json.dumps({"datasets": [{**keys, "subsets": [{"image_dir": folder}]}]}))
        location = f"{path}: datasets[0]"
    else:
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in keys.items())
        path.write_text(f"[[datasets]]\n{lines}\n[[datasets.subsets]]\nimage_dir = '{folder}'\n")
        location = f"{path}:5"
    notice = format_notice(f"{location}: bucket_min_pictures", "bucket_min_pictures", 2, "bucket_min_images", 2)

    parsed = parse_dataset_config(path, collect_flag_defaults(DataConfig()))
    assert format_lines(parsed.problems) == [] and parsed.notices == (notice,)
    assert parsed.datasets[0].bucket_min_images == 2
    prepared = prepare_data(DataConfig(dataset_config=str(path), caption_extension=(".txt",)), 8, str(tmp_path))
    assert prepared.manifest.notes.count(notice) == 1


def test_both_names_in_one_dataset_table_are_a_duplicate_key(tmp_path):
    path = tmp_path / "set.toml"
    path.write_text(
        "[[datasets]]\nresolution = 256\nenable_bucket = true\nbucket_mode = 'symmetric'\nbucket_min_images = 2\n"
        "bucket_min_pictures = 3\n[[datasets.subsets]]\nimage_dir = 'a'\n"
    )
    assert format_lines(parse_dataset_config(path, collect_flag_defaults(DataConfig())).problems) == [
        f"{path}:6: bucket_min_pictures: duplicate key: the former name of bucket_min_images, set at {path}:5"
    ]


def test_old_names_in_checkpoints_are_compared_by_current_names():
    config = parse_config([*DATA, "--quantize_base", "nf4", "--bucket_min_images", "2"]).config
    current = {"settings": serialize_settings(config), "model": "", "data": "", "batch": []}
    former = {new: old for old, new in RENAMED_OPTIONS.items()}
    saved = {former.get(name, name): value for name, value in current["settings"].items()}
    saved |= {"on_oom": "fail", "compile_shapes": "auto", "caption_extension": "('.caption',)"}
    assert "base_storage" in saved and "quantize_base" not in saved
    assert list(find_changes({**current, "settings": saved}, current)) == []
    (change,) = find_changes({**current, "settings": saved | {"base_storage": "float"}}, current)
    assert (change.name, change.old, change.new, change.changes_result) == ("quantize_base", "none", "nf4", True)


def test_former_values_of_saved_settings_are_upgraded():
    saved = {"base_storage": "float", "on_oom": "ladder", "compile_shapes": "static", "seed": 3}
    assert upgrade_settings(saved) == {
        "quantize_base": "none",
        "on_oom": "recover",
        "compile_dynamic": "false",
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [
        ("demo", "2561e16e54bc65846fe2bfea3840a40e"),
        ("symmetric", "967dba531c9b57e1a3ff80631bb161a0"),
    ],
)
def test_data_fingerprints_in_checkpoints_of_the_last_release_are_still_computed(name, fingerprint, tmp_path):
    config = DataConfig(dataset_config=str(ROOT / "dataset_configs" / f"{name}.toml"))
    assert prepare_data(config, 8, str(tmp_path)).manifest.compute_former_fingerprint() == fingerprint


def test_a_run_of_the_last_release_on_a_file_of_musubi_tuner_is_not_resumed_with_its_other_buckets(tmp_path):
    config = DataConfig(dataset_config=str(ROOT / "dataset_configs" / "musubi.toml"))
    manifest = prepare_data(config, 8, str(tmp_path)).manifest
    assert manifest.compute_former_fingerprint() != "449524691d7b2b93634be88dab0d24ca"
