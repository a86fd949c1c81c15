"""What a run cannot do here is said at the start: packages, existing files, absurd sizes, a text encoder's layers."""

from importlib.util import find_spec

import pytest
from data_paths import ROOT
from PIL import Image
from problem_lines import format_lines

from library import cli
from library.errors import ConfigError
from library.training.preflight import (
    check_output_files,
    find_installation_problems,
    find_settings_problems,
    load_settings,
)

DEMO = ["--dataset_config", str(ROOT / "dataset_configs" / "demo.toml")]
SD1 = "--pretrained_model_name_or_path random:sd1:tiny"


def find_problems(*flags: str) -> list[str]:
    loaded = load_settings([*DEMO, *flags])
    return format_lines(find_settings_problems(loaded)) + format_lines(find_installation_problems(loaded))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--optimizer_type Nope", "--optimizer_type: no optimizer 'Nope'; known are AdamW"),
        ("--optimizer_type AdmW", "--optimizer_type: no optimizer 'AdmW'; did you mean AdamW"),
        ("--optimizer_type nowhere.Best", "--optimizer_type: nowhere.Best needs the package nowhere"),
        ("--optimizer_type DAdaptation", "; pip install dadaptation"),
        ("--attn_mode flash3", "--attn_mode"),
        (f"{SD1} --clip_skip 99", "--clip_skip: 99; the text encoder has 3 layers, and 1 or 2 are usual"),
        ("--network_dim 1000000", "--network_dim: rank 1000000 is above the size of every layer"),
        ("--network_args conv_dim=1000000", "--network_args: conv_dim: rank 1000000 is above the size of every layer"),
        ("--resolution 1000000", "--resolution: must be at most 32768 pixels, got 1000000"),
        ("--train_batch_size 1000000", "--train_batch_size: must be at most 65536, got 1000000"),
        ("--max_bucket_reso 1000000", "--max_bucket_reso: must be at most 32768, got 1000000"),
        (f"{SD1} --cache_text_encoder_outputs", "--cache_text_encoder_outputs: text encoders are trained"),
    ],
)
def test_what_cannot_run_is_one_line(flags, problem):
    found = find_problems(*flags.split())
    assert any(problem in line for line in found), found


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_missing_package_names_how_to_install_it_and_another_optimizer():
    assert find_problems("--optimizer_type", "AdamW8bit") == [
        "--optimizer_type: AdamW8bit needs the package bitsandbytes, which is not installed; pip install bitsandbytes,"
        " or use --optimizer_type AdamW"
    ]


@pytest.mark.skipif(find_spec("xformers") is not None, reason="xformers is installed")
def test_a_missing_attention_package_has_its_line_and_names_how_to_install_it(tmp_path):
    missing = "attn_mode xformers: not installed; pip install xformers, or use sdpa"
    assert find_problems("--attn_mode", "xformers") == [f"--{missing}"]
    (tmp_path / "run.toml").write_text("seed = 1\nattn_mode = 'xformers'\n")
    assert find_problems("--config_file", str(tmp_path / "run.toml")) == [f"{tmp_path}/run.toml:2: {missing}"]


def test_a_plan_may_be_made_without_the_packages_of_the_run():
    loaded = load_settings([*DEMO, "--optimizer_type", "AdamW8bit", "--attn_mode", "sdpa"])
    assert format_lines(find_settings_problems(loaded)) == []


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_dry_run_plans_the_run_and_warns_of_a_missing_package(capsys):
    assert cli.main([*DEMO, "--optimizer_type", "AdamW8bit", "--dry_run"]) == 0
    output = capsys.readouterr()
    assert "the run: " in output.out and "a run would stop on this machine: --optimizer_type: AdamW8bit" in output.err
    assert cli.main([*DEMO, "--optimizer_type", "AdamW8bit"]) == 2


def test_a_finished_lora_is_not_overwritten_without_being_asked(tmp_path):
    flags = ("--output_dir", str(tmp_path), "--output_name", "mine")
    assert find_problems(*flags) == []
    for name in ("mine", "mine-2"):
        (tmp_path / f"{name}.safetensors").touch()

    assert find_problems(*flags) == [
        f"--output_name: {tmp_path}/mine.safetensors exists, from an earlier run; add --overwrite, or --output_name"
        " mine-3"
    ]
    assert find_problems(*flags, "--overwrite") == []
    assert len(find_problems(*flags, "--auto_resume")) == 1, "there is no checkpoint to resume from"
    (tmp_path / "mine-000001-state").mkdir()
    assert find_problems(*flags, "--auto_resume") == []


def test_files_between_that_the_run_would_write_are_not_overwritten_either(tmp_path):
    flags = ("--output_dir", str(tmp_path), *"--output_name my.lora --max_train_steps 400 --ema_decay 0.9".split())
    numbers = ("-000002", "-000003", "-000004-ema", "-step00000200", "-step00000300", "-step00000400", "-2", "")
    paths = {number: tmp_path / f"my.lora{number}.safetensors" for number in numbers}
    for path in (*paths.values(), tmp_path / "myxlora.safetensors"):
        path.touch()
    written = {
        "--save_every_n_epochs 2": ["", "-000002", "-000004-ema"],
        "--save_every_n_epochs 2 --max_train_epochs 4": ["", "-000002"],
        "--save_every_n_steps 100": ["", "-step00000200", "-step00000300"],
        "--save_n_epoch_ratio 4": ["", "-000002", "-000003", "-000004-ema"],
    }
    for words, expected in written.items():
        (problem,) = find_problems(*flags, *words.split())
        assert problem == (
            f"--output_name: {paths['']} and {len(expected) - 1} more files, such as {paths[expected[1]].name}, exist from"
            " an earlier run; add --overwrite, or --output_name my.lora-3"
        )
    paths[""].unlink()
    assert len(find_problems(*flags, "--save_every_n_epochs", "2")) == 1
    assert find_problems(*flags, "--save_every_n_epochs", "5") == []
    assert find_problems(*flags, "--save_every_n_epochs", "2", "--auto_resume") == [], "killed before a checkpoint"


def test_of_several_processes_only_the_main_one_decides_about_existing_files(monkeypatch, tmp_path):
    flags = ("--output_dir", str(tmp_path), "--output_name", "mine")
    (tmp_path / "mine.safetensors").touch()
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert find_problems(*flags) == []
    assert len(find_problems(*flags, "--dry_run")) == 1
    config = load_settings([*DEMO, *flags]).config
    with pytest.raises(ConfigError, match=r"mine.safetensors exists, from an earlier run"):
        check_output_files(config.save, config.state, config.train, has_ema=False)


def test_an_upload_needs_a_token_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("library.training.hub_upload.get_token", lambda: None)
    assert find_problems("--huggingface_repo_id", "me/mine") == [
        "--huggingface_repo_id: no token for the hub; run `hf auth login` or set HF_TOKEN"
    ]


def test_what_is_found_after_the_image_scan_is_reported(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("max_train_epochs = 1\nlr_scheduler = 'cosine'\nlr_warmup_steps = 999\n")

    assert cli.main([*DEMO, "--config_file", str(path), "--output_dir", str(tmp_path), "--dry_run"]) == 0
    warning = "lr_warmup_steps 999: the run has 10 steps, so the learning rate never reaches its peak"
    assert warning in capsys.readouterr().err, "sd-scripts cuts the warmup off as well"
    path.write_text("max_train_epochs = 1\nresolution_schedule = '32:50,64'\n")
    assert cli.main([*DEMO, "--config_file", str(path), "--output_dir", str(tmp_path), "--dry_run"]) == 2
    assert f"  {path}:1: max_train_epochs 1, which is 8 steps: the last stage starts at" in capsys.readouterr().err


def test_a_problem_with_bucket_steps_that_the_model_changed_says_why(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "pretrained_model_name_or_path = 'random:sd1:tiny'\nenable_bucket = true\nbucket_reso_steps = 1\n"
        "resolution = 512\nmin_bucket_reso = 8\n"
    )
    (tmp_path / "1_a").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "1_a" / "1.png")

    loaded = load_settings(["--train_data_dir", str(tmp_path), "--config_file", str(path)])

    problems = [each for each in format_lines(find_settings_problems(loaded)) if "min_bucket_reso" in each]
    assert problems == [
        f"{path}:5: min_bucket_reso: 8 is below bucket_reso_steps 16; at least 16 ({path}:3: bucket_reso_steps: 1 is"
        " finer than the model can train; buckets are multiples of 16)"
    ]


def test_every_problem_of_a_run_file_has_its_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "pretrained_model_name_or_path = 'random:sd1:tiny'\nclip_skip = 99\nattn_mode = 'xformers'\n"
        "optimizer_type = 'Nope'\noutput_name = 'mine'\nlr_warmup_steps = 9\n"
        f"output_dir = '{tmp_path}'\nbucket_reso_steps = 24\nenable_bucket = true\n"
    )
    (tmp_path / "1_a").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "1_a" / "1.png")
    (tmp_path / "mine.safetensors").touch()

    loaded = load_settings(["--train_data_dir", str(tmp_path), "--resolution", "512", "--config_file", str(path)])
    problems = format_lines(find_settings_problems(loaded)) + format_lines(find_installation_problems(loaded))

    lines = [problem.removeprefix(f"{path}:").partition(":")[0] for problem in problems]
    assert lines[:2] == ["6", "4"] and {*lines} - {"3"} == {"2", "4", "5", "6", "8"}
    assert not [problem for problem in problems if problem.startswith("--")]
