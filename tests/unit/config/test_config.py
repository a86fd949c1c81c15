"""Configuration: defaults < run TOML < flags; all problems are reported at once, with location and fix."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from data_paths import DATA, ROOT
from problem_lines import format_lines, format_unused

from library.config import RunConfig, parse_config
from library.config.help import format_config_as_toml, format_help, format_options_page
from library.config.kohya_compat import (
    KOHYA_OPTIONS,
    NoEffectOption,
    OptionAlias,
    OtherScriptOption,
    SecretOption,
    UnsupportedOption,
)
from library.config.options import flatten_config, iter_options
from library.config.types import Resolution, StepsOrRatio
from library.errors import ConfigError
from library.training.preflight import find_settings_problems

KOHYA = json.loads((Path(__file__).resolve().parents[2] / "data" / "kohya_options.json").read_text())


def write_run_file(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = write_run_file(tmp_path, "[anything]\nnetwork_dim = 8\nlearning_rate = 1\n")

    loaded = parse_config([*DATA, "--config_file", path, "--network_dim", "16"])

    assert loaded.require_valid().adapter.network_dim == 16
    assert loaded.config.optim.learning_rate == 1.0
    assert loaded.config.train.seed == 42
    assert str(loaded.locations["network_dim"]) == "--network_dim"
    assert str(loaded.locations["learning_rate"]) == f"{path}:3: learning_rate"


def test_all_problems_are_reported_with_one_line_each(tmp_path):
    path = write_run_file(
        tmp_path,
        f"""\
[model]
network_dimm = 8

[learning]
learning_rate = "fast"
mixed_precision = 'bf61'
full_fp16 = true
lr_warmup_steps = 10
dataset_config = '{DATA[1]}'
""",
    )

    assert format_lines(parse_config(["--config_file", path]).problems) == [
        f"{path}:2: network_dimm: unknown option; did you mean network_dim?",
        f"{path}:5: learning_rate: expected a number, got 'fast'",
        f"{path}:6: mixed_precision: 'bf61' is not one of no, fp16, bf16, fp8",
        f"{path}:7: full_fp16: not supported: fp16 gradients and Adam moments underflow; use full_bf16",
        f"{path}:8: lr_warmup_steps: lr_scheduler constant has no warmup; use lr_scheduler constant_with_warmup",
    ]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--network_dimm", "3"], "--network_dimm: unknown option; did you mean --network_dim?"),
        (["--network-dim", "3"], "--network-dim: unknown option; did you mean --network_dim?"),
        (["--network_dim"], "--network_dim: expects a value (INTEGER)"),
        (["--network_dim", "3", "4"], "--network_dim: expects one value, got 2 (INTEGER)"),
        (["--network_dim", "3.5"], "--network_dim: expected an integer, got '3.5'"),
        (["--network_dim", "0"], "--network_dim: must be at least 1, got 0"),
        (["--caption_dropout_rate", "1.5"], "--caption_dropout_rate: must be at most 1, got 1.5"),
        (["--learning_rate", "nan"], "--learning_rate: expected a finite number, got nan"),
        (
            ["--enable_bucket", "true"],
            "--enable_bucket: takes no value, got 'true'; use --enable_bucket or --no-enable_bucket",
        ),
        (["--optimizer_args"], "--optimizer_args: expects at least one value (TEXT)"),
        (["--resolution", "5x5"], "--resolution: expected a size in pixels, such as 512 or 512,768 (width,height)"),
        (
            ["--lr_warmup_steps", "1.5"],
            "--lr_warmup_steps: expected steps (100), a ratio of the run below 1 (0.1), or a percentage ('10%')",
        ),
        (["-x"], "-x: unexpected argument; options start with --"),
        (["--no-network_dim", "3"], "--no-network_dim: unknown option; did you mean --network_dim?"),
        (["--config_file"], "--config_file: expects a path"),
        (["--log_with", "tensorboard"], "--log_with: tensorboard needs logging_dir"),
        (
            ["--lr_scheduler", "cosine_with_restarts", "--lr_scheduler_num_cycles", "0"],
            "--lr_scheduler_num_cycles: 0 cycles keep the learning rate constant; write 1 or more, or use lr_scheduler"
            " constant",
        ),
        (["--max_train_steps", "0"], "--max_train_steps: 0 trains nothing; write 1 or more, or set max_train_epochs"),
        (
            ["--mixed_precision", "BF16"],
            "--mixed_precision: 'BF16' is not one of no, fp16, bf16, fp8; write bf16",
        ),
        (["--learning_rate", "0"], "--learning_rate: 0 trains nothing; set a learning rate such as 1e-4"),
        (["--output_name", "a/b"], "--output_name: 'a/b' is not a file name; folders belong in output_dir"),
        (["--wandb_api_key", "k", "l"], "--wandb_api_key: expects one value"),
    ],
)
def test_a_problem_of_a_flag_is_reported(argv, problem):
    assert format_lines(parse_config([*DATA, *argv]).problems) == [problem]


def test_keys_of_a_run_file_of_sd_scripts_are_read_as_there(tmp_path):
    """Its argparse ignores what it does not know, and the last section wins; a typing error is still an error."""
    lines = ["network_module = 'networks.lora'", "keep_tokens = 3", "[x]", "keep_tokens = 1", "batch_size = 4"]
    lines += ["network_dimm = 8", "sample_sampler = 'dpmpp_2m'", "max_train_epochs = 0", "max_token_length = 255"]
    lines += ["save_precision = 'fp32'", "[x.deeper]", "network_alpha = 3", "[[prompt.subset]]", "prompt = 'a cat'"]
    path = write_run_file(tmp_path, "\n".join(lines))

    parsed = parse_config([*DATA, "--config_file", path])

    assert format_lines(parsed.problems) == [f"{path}:6: network_dimm: unknown option; did you mean network_dim?"]
    assert dict(format_unused(parsed.unused)) == {
        f"{path}:2: keep_tokens": "line 4 sets it again",
        f"{path}:5: batch_size": "unknown key; the option is train_batch_size",
        f"{path}:7: sample_sampler": "no sampler 'dpmpp_2m'; previews use ddim",
        f"{path}:8: max_train_epochs": "0 is not set; max_train_steps counts",
        f"{path}:11: deeper": "unknown key",
        f"{path}:13: subset": "unknown key",
    }
    assert "max_token_length: 255 means 225" in " ".join(parsed.notices)
    config = parsed.config
    assert (config.data.keep_tokens, config.model.max_token_length, config.save.save_precision) == (1, 225, "float")


def test_zeros_of_notebooks_have_no_effect_where_another_option_counts(tmp_path):
    lines = ["lr_scheduler = 'cosine'", "lr_scheduler_num_cycles = 0", "lr_scheduler_power = 0", "ddp_timeout = 0"]
    path = write_run_file(tmp_path, "\n".join([*lines, "max_train_steps = 0", "max_train_epochs = 3"]))

    parsed = parse_config([*DATA, "--config_file", path])

    assert format_lines(parsed.problems) == []
    names = {location.rpartition(": ")[2] for location, _ in format_unused(parsed.unused)}
    assert names == {"lr_scheduler_num_cycles", "lr_scheduler_power", "max_train_steps"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("enable_bucket = 2", "enable_bucket: expected true or false, got 2"),
        ("network_dim = 4.5", "network_dim: expected an integer, got 4.5"),
        ("network_dim = true", "network_dim: expected an integer, got true"),
        ("output_name = 3", "output_name: expected a string, got 3"),
        ("optimizer_args = [1]", "optimizer_args: expected a string, got 1"),
        ("[x]\nnetwork_dim = {a = 1}", "network_dim: expected a value, got a table"),
        ("a = 1\n[x]\na = 2", "a: duplicate key, first set in line 1"),
        ("a = 1\n[x]\na = 1\na = 2", "a: duplicate key, first set in line 3"),
        ("config_file = 'b'", "config_file: only allowed on the command line"),
    ],
)
def test_a_problem_of_the_run_toml_is_reported_with_its_line(tmp_path, line, problem):
    path = write_run_file(tmp_path, line)
    number = line.count("\n") + 1

    problems = format_lines(parse_config([*DATA, "--config_file", path]).problems)

    assert f"{path}:{number}: {problem}" in problems


@pytest.mark.parametrize(
    ("lines", "flags", "reason"),
    [
        (
            ["learning_rate = 'fast'"],
            "--learning_rate 1e-5",
            "expected a number, got 'fast'; --learning_rate replaces it",
        ),
        (["network_dim = 0"], "--network_dim 4", "must be at least 1, got 0; --network_dim replaces it"),
        (["[x]", "seed = {a = 1}"], "--seed 3", "expected a value, got a table; --seed replaces it"),
        (["seed = 1", "[x]", "seed = 2"], "--seed 3", "duplicate key, first set in line 1; --seed replaces it"),
        (
            ["use_8bit_adam = 'maybe'"],
            "--optimizer_type Lion",
            "expected true or false; --optimizer_type replaces it",
        ),
        (["ddp_timeout = 'long'"], "--ddp_timeout 0", "expected an integer, got 'long'; --ddp_timeout replaces it"),
    ],
)
def test_a_valid_flag_replaces_a_wrong_value_of_the_file(lines, flags, reason, tmp_path):
    path = write_run_file(tmp_path, "\n".join(lines))

    parsed = parse_config([*DATA, "--config_file", path, *flags.split()])

    place = f"{path}:{len(lines)}: {lines[-1].split()[0]}"
    assert (format_lines(parsed.problems), parsed.invalid_options) == ([], frozenset())
    assert format_unused(parsed.unused) == ((place, reason),)
    plain = parse_config([*DATA, *flags.split()])
    assert (parsed.config, parsed.explicit) == (plain.config, plain.explicit)


def test_a_wrong_value_of_the_file_stays_an_error_beside_a_wrong_flag_or_another_option(tmp_path):
    path = write_run_file(tmp_path, "network_dim = 0\nlearning_rte = 1e-4")
    problem = f"{path}:1: network_dim: must be at least 1, got 0"
    typo = f"{path}:2: learning_rte: unknown option; did you mean learning_rate?"

    def list_problems(flags):
        return format_lines(parse_config([*DATA, "--config_file", path, *flags.split()]).problems)

    assert list_problems("--network_alpha 4 --learning_rate 1e-5") == [problem, typo]
    assert list_problems("--network_dim -1") == [problem, typo, "--network_dim: must be at least 1, got -1"]


def test_a_dataset_toml_given_as_config_file_is_recognized(tmp_path):
    path = write_run_file(tmp_path, "[[datasets]]\nresolution = 512\n")

    assert format_lines(parse_config([*DATA, "--config_file", path]).problems) == [
        f"{path}:1: datasets: expected a value, got a table; this looks like a dataset TOML: give it with "
        "--dataset_config"
    ]


def test_a_missing_or_invalid_toml_is_reported_in_one_line(tmp_path):
    missing = tmp_path / "none.toml"
    broken = write_run_file(tmp_path, "a = 1\nb = = 2\n")

    assert format_lines(parse_config([*DATA, "--config_file", str(missing)]).problems) == [
        f"{missing}: no such file (looked in {tmp_path})"
    ]
    assert format_lines(parse_config([*DATA, "--config_file", broken]).problems) == [
        f"{broken}:2: not valid TOML: Invalid value"
    ]


def test_an_unreadable_run_toml_leads_to_no_further_problems(tmp_path):
    """Its options are unknown, so that none of them is missing; those of flags are checked."""
    broken = write_run_file(tmp_path, "resolution = 64\nb = = 2\n")
    (tmp_path / "1_a").mkdir()
    (tmp_path / "1_a" / "1.png").touch()
    reason = f"{broken}:2: not valid TOML: Invalid value"

    for flags in ([], ["--train_data_dir", str(tmp_path)]):
        assert format_lines(find_settings_problems(parse_config(["--config_file", broken, *flags]))) == [reason]
    problems = format_lines(find_settings_problems(parse_config(["--config_file", broken, "--learning_rate", "0"])))
    assert problems == [reason, "--learning_rate: 0 trains nothing; set a learning rate such as 1e-4"]


def test_config_file_needs_no_extension_as_in_sd_scripts(tmp_path):
    path = write_run_file(tmp_path, "network_dim = 8\n")

    assert parse_config([*DATA, "--config_file", path.removesuffix(".toml")]).require_valid().adapter.network_dim == 8


def test_the_last_of_several_equal_flags_counts_as_in_argparse():
    assert parse_config([*DATA, "--network_dim", "2", "--network_dim=3"]).require_valid().adapter.network_dim == 3


def test_a_switch_in_the_file_can_be_turned_off_by_a_flag(tmp_path):
    path = write_run_file(tmp_path, "enable_bucket = true\n")

    assert parse_config([*DATA, "--config_file", path]).require_valid().data.enable_bucket
    assert not parse_config([*DATA, "--config_file", path, "--no-enable_bucket"]).require_valid().data.enable_bucket


def test_negative_numbers_are_values_and_not_options():
    assert format_lines(parse_config([*DATA, "--learning_rate", "-1"]).problems) == [
        "--learning_rate: must be at least 0, got -1.0"
    ]


def test_every_option_of_sd_scripts_is_supported_an_alias_or_refused_with_a_reason():
    names = {option.name for option in iter_options(RunConfig)} | {"config_file", "output_config"}
    everything = [*KOHYA["train_network"], *KOHYA["family_additions"], *KOHYA["full_finetuning_only"]]

    assert len(KOHYA["train_network"]) == 193
    assert [name for name in everything if name not in names and name not in KOHYA_OPTIONS] == []
    assert [name for name in KOHYA_OPTIONS if name in names] == []
    verdicts = KOHYA_OPTIONS.values()
    assert all(
        isinstance(verdict, (OptionAlias, NoEffectOption, SecretOption, UnsupportedOption)) for verdict in verdicts
    )
    assert all(len(verdict.reason) > 10 for verdict in verdicts if not isinstance(verdict, (OptionAlias, SecretOption)))


@pytest.mark.parametrize(
    "name", [name for name, verdict in KOHYA_OPTIONS.items() if isinstance(verdict, UnsupportedOption)]
)
def test_a_refused_option_is_always_reported(name, tmp_path):
    verdict = KOHYA_OPTIONS[name]
    switch, value = f"--{name}", write_run_file(tmp_path, f"{name} = 'surely not harmless'\n")
    flagged = format_lines(parse_config([*DATA, switch]).problems)
    assert flagged == [f"{switch}: {verdict.reason}"]
    parsed, line = parse_config([*DATA, "--config_file", value]), f"{value}:1: {name}"
    if isinstance(verdict, OtherScriptOption):  # sd-scripts does not read it from a run file either
        assert (format_lines(parsed.problems), format_unused(parsed.unused)) == ([], ((line, verdict.reason),))
    else:
        assert format_lines(parsed.problems) == [f"{line}: {verdict.reason}"]


def test_an_unsupported_option_is_accepted_at_the_value_that_always_applies(tmp_path):
    path = write_run_file(
        tmp_path, "cache_latents = false\nsdpa = true\nloss_type = 'l2'\nmin_timestep = 0\nnoise_offset = 0.0"
    )

    assert format_lines(parse_config([*DATA, "--config_file", path]).problems) == []
    assert (
        format_lines(parse_config([*DATA, "--max_timestep", "1000", "--save_model_as", "safetensors"]).problems) == []
    )


def test_aliases_set_the_option_they_stand_for(tmp_path):
    path = write_run_file(tmp_path, "caption_extention = '.txt'\n")

    config = parse_config([*DATA, "--config_file", path]).require_valid()

    assert config.data.caption_extension == (".txt",)
    assert {
        name: verdict.option
        for name, verdict in KOHYA_OPTIONS.items()
        if isinstance(verdict, OptionAlias) and verdict.value is None
    } == {
        "prompts_file": "slider_prompts",
        "leco_denoise_guidance_scale": "denoise_guidance_scale",
        "caption_extention": "caption_extension",
        "weights": "embedding_weights",
        "training_shift": "discrete_flow_shift",
        "qwen3": "text_encoder",
        "gemma2": "text_encoder",
        "lr_restart_cycles": "lr_scheduler_num_cycles",
    }


def test_the_configuration_and_its_groups_are_frozen():
    config = RunConfig()
    for group in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            getattr(config, group.name).anything = 1


def test_option_names_are_unique():
    names = [option.name for option in iter_options(RunConfig)]

    assert len(names) == len(set(names))


def test_every_default_is_a_valid_value():
    for option in iter_options(RunConfig):
        if option.default is None:
            assert option.is_optional, option.name
        elif not isinstance(option.default, (StepsOrRatio, Resolution)):
            plain = list(option.default) if option.is_list else option.default
            assert option.parse_toml_value(plain) == option.default, option.name


def test_output_config_round_trips_all_settings(tmp_path):
    argv = [
        *DATA,
        *(
            "--resolution 512,768 --lr_warmup_steps 10% --lr_scheduler cosine --enable_bucket "
            "--optimizer_args weight_decay=0.1 betas=0.9,0.99"
        ).split(),
        "--caption_prefix",
        'a "quoted" [text]',
        *"--seed 7 --network_alpha 2.5 --mixed_precision bf16".split(),
    ]
    config = parse_config(argv).require_valid()
    path = write_run_file(tmp_path, format_config_as_toml(config))

    assert parse_config(["--config_file", path]).require_valid() == config


def test_output_config_writes_the_file_and_starts_nothing(tmp_path):
    path = tmp_path / "mine.toml"
    command = [sys.executable, "train_lora.py", "--config_file", str(path), "--output_config", "--network_dim", "9"]

    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)

    assert first.returncode == 0, first.stderr
    assert path.read_text() == '[adapter]\nnetwork_dim = 9\n\n[noise]\nobjective_defaults = "own"\n'
    assert second.returncode == 2 and "already exists; it is not overwritten" in second.stderr


def test_docs_options_md_is_up_to_date():
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == format_options_page() + "\n", (
        "run: python -m library options > docs/options.md"
    )


def test_help_names_every_option():
    text = format_help("train")

    assert [option.name for option in iter_options(RunConfig) if f"--{option.name}" not in text] == []


def test_flatten_config_is_the_inverse_of_build_config():
    config = parse_config([*DATA, "--network_dim", "9"]).require_valid()

    assert flatten_config(config)["network_dim"] == 9
    assert len(flatten_config(config)) == len(list(iter_options(RunConfig)))


@pytest.mark.parametrize(("text", "steps"), [("0", 0), (100, 100), ("100", 100), (0.1, 20), ("10%", 20), ("0%", 0)])
def test_steps_can_be_a_number_or_a_ratio_of_the_run(text, steps):
    assert StepsOrRatio.parse(text).to_steps(200) == steps


@pytest.mark.parametrize("text", [-1, "-5%", "150%", 1.5, True, None, [1], "many", "inf"])
def test_invalid_steps_are_refused(text):
    with pytest.raises(ValueError, match="expected steps"):
        StepsOrRatio.parse(text)


@pytest.mark.parametrize(("text", "size"), [(512, (512, 512)), ("512,768", (512, 768)), ([640, 384], (640, 384))])
def test_a_resolution_is_width_and_height(text, size):
    assert (Resolution.parse(text).width, Resolution.parse(text).height) == size


def test_all_problems_of_a_run_are_in_one_exception():
    with pytest.raises(ConfigError) as caught:
        parse_config([*DATA, "--a", "1", "--b", "2"]).require_valid()

    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("name", KOHYA["train_network"])
def test_defaults_of_sd_scripts_can_be_set_explicitly(name, tmp_path):
    value = KOHYA["train_network"][name]
    if value is None or name in ("config_file", "output_config"):
        return
    written = json.dumps(value)
    with_tracker = f"logging_dir = '{tmp_path}'\n" if name.startswith("log_") else ""
    path = write_run_file(tmp_path, f"{with_tracker}{name} = {written}\n")

    problems = format_lines(parse_config([*DATA, "--config_file", path]).problems)

    assert problems == []


def test_falsy_values_disable_an_option_as_in_sd_scripts(tmp_path):
    path = write_run_file(
        tmp_path, "debug_dataset = 0\ninitial_epoch = 0\nresume = false\nvae = ''\nlog_with = false\n"
    )

    assert format_lines(parse_config([*DATA, "--config_file", path]).problems) == []


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--config_file="], "--config_file: '' is not a file; give the run TOML"),
        (["--config_file", "."], "--config_file: '.' is not a file; give the run TOML"),
        (["--config_file", "/"], "--config_file: '/' is not a file; give the run TOML"),
        (["--output_config=false"], "--output_config: takes no value, got 'false'"),
        (["--learning_rate", "inf"], "--learning_rate: expected a finite number, got inf"),
        (
            ["--lr_warmup_steps", "nan%"],
            "--lr_warmup_steps: expected steps (100), a ratio of the run below 1 (0.1), or a percentage ('10%')",
        ),
        (["--log_with", "all"], "--log_with: all needs logging_dir"),
        (
            ["--min_bucket_reso", "900", "--max_bucket_reso", "600"],
            "--min_bucket_reso: min_bucket_reso 900 is above max_bucket_reso 600",
        ),
        (["--output_name", "a.safetensors"], "--output_name: remove .safetensors; the extension is added"),
        (
            ["--lr_scheduler_type", "StepLR", "--lr_warmup_steps", "3"],
            "--lr_warmup_steps: no effect with lr_scheduler_type; remove one of them",
        ),
        (
            ["--lr_scheduler", "cosine_with_min_lr"],
            "--lr_scheduler: cosine_with_min_lr needs lr_scheduler_min_lr_ratio, such as 0.1",
        ),
        (
            ["--optimizer_type", "adafactor", "--network_args", "down_lr_weight=cosine"],
            "--network_args: down_lr_weight: Adafactor sets one learning rate for all blocks; remove it, or add"
            " relative_step=False to optimizer_args",
        ),
        (
            ["--lr_scheduler", "adafactor"],
            "--lr_scheduler: adafactor is for optimizer_type Adafactor with relative_step; use lr_scheduler constant",
        ),
        *(
            (
                [f"--{name}", "s3://bucket/runs"],
                f"--{name}: s3://bucket/runs is a URL; files are written to folders only, such as one that mounts the"
                " bucket",
            )
            for name in ("output_dir", "logging_dir", "cache_dir", "remote_cache_dir")
        ),
        (
            ["--dataset_config", str(ROOT)],
            f"--dataset_config: {ROOT} is a folder; give the dataset TOML that points to it, or --train_data_dir",
        ),
    ],
)
def test_more_problems_of_flags_are_reported(argv, problem):
    assert format_lines(parse_config([*DATA, *argv]).problems) == [problem]


def test_arguments_of_an_unused_tracker_are_reported(tmp_path):
    path = tmp_path / "tracker.toml"
    path.write_text("[tensorbord]\nflush_secs = 3\n")
    argv = [*DATA, "--logging_dir", str(tmp_path), "--log_tracker_config", str(path)]

    assert format_lines(parse_config(argv).problems) == [
        f"--log_tracker_config: {path}:1: tensorbord: not the tracker in use (tensorboard)"
    ]
    path.write_text("tensorboard = 3\n")
    assert format_lines(parse_config(argv).problems) == [
        f"--log_tracker_config: {path}:1: tensorboard: expected a table, [tensorboard]"
    ]
    path.write_text("[tensorboard]\nflush_secs = 3\n")
    assert format_lines(parse_config(argv).problems) == []


@pytest.mark.parametrize("text", ['C:\\xyz "quoted"\nnext line', "\\x41", "tab\tand \x7f", "漢字 🦜", "'''", '"""'])
def test_any_string_survives_a_round_trip_through_toml(text, tmp_path):
    config = parse_config(
        [
            *DATA,
            f"--training_comment={text}",
            *"--lr_warmup_steps 1234567 --lr_scheduler linear --max_train_steps 2000000".split(),
        ]
    ).require_valid()
    path = write_run_file(tmp_path, format_config_as_toml(config))

    assert parse_config(["--config_file", path]).require_valid() == config


def test_a_toml_key_with_escapes_is_unescaped(tmp_path):
    path = write_run_file(tmp_path, '"network\\u005fdim" = 0\n')

    assert format_lines(parse_config([*DATA, "--config_file", path]).problems) == [
        f"{path}:1: network_dim: must be at least 1, got 0"
    ]


def test_output_config_reports_an_unwritable_path(tmp_path):
    command = [sys.executable, "train_lora.py", "--output_config", "--config_file", str(tmp_path / "no" / "x.toml")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)

    assert result.returncode == 2 and "cannot be written: No such file or directory" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_section_can_have_the_name_of_an_option(tmp_path):
    """``deepspeed`` is a section and an option."""
    config = parse_config(["--dataset_config", __file__, "--deepspeed", "--zero_stage", "3"]).config
    (tmp_path / "run.toml").write_text(format_config_as_toml(config), "utf-8")
    second = parse_config(["--config_file", str(tmp_path / "run.toml")])
    assert format_lines(second.problems) == [] and second.config == config


def test_arguments_without_name_or_value_and_seeds_that_torch_cannot_take_are_reported_before_training():
    parsed = parse_config([*"--optimizer_args a b= =c betas=0.9,0.99".split(), "--seed", str(2**63)])
    found = [line.partition(":")[0] for line in format_lines(parsed.problems) if "--dataset_config" not in line]
    assert found == ["--seed", "--optimizer_args 'a'", "--optimizer_args 'b='", "--optimizer_args '=c'"]
