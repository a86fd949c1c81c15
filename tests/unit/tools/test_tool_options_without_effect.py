"""Options of tools that have no effect beside others are named in a notice, and are no error."""

import shlex

import pytest
import torch
from data_paths import ROOT
from safetensors.torch import save_file

from library.cli import run_tool
from library.config import parse_config
from library.config.options import flatten_config, iter_options
from library.tools import caption, plan
from library.tools.lora import COMMANDS, options

CASES = [
    (options.MergeArguments, "--model base --to comfy --rank 4 --energy 0.9 --method svd", "to rank energy method"),
    (options.MergeArguments, "--model base --math float64", ""),
    (options.MergeArguments, "--math float64", "math"),
    (options.MergeArguments, "--weights 1 2 --denoiser_weights 1 2 --text_encoder_weights 1 2", "weights"),
    (options.MergeArguments, "--weights 1 2 --denoiser_weights 1 2", ""),
    (options.ResizeArguments, "--conv_rank 2", "conv_rank"),
    (options.ResizeArguments, "--conv_rank 2 --sv_fro 0.9", ""),
    (options.ExtractArguments, "--rank 4 --factor 4", "factor"),
    (options.ExtractArguments, "--type lokr --factor 4", ""),
    (options.MetadataArguments, "--set title=a --json", "json"),
    (options.MetadataArguments, "--overwrite", "overwrite"),
    (options.MetadataArguments, "--set title=a --output b --overwrite", ""),
    (plan._Arguments, "--preview_limit 3 --link_speed 9 --gpu_tflops 7", "preview_limit link_speed gpu_tflops"),
    (plan._Arguments, "--resolve_only --json --world_size 2", "world_size"),
    (caption._Arguments, "--api_timeout 5", "api_timeout"),
    (caption._Arguments, "--api_timeout 5 --api_base http://a/v1", ""),
]


@pytest.mark.parametrize(("arguments", "flags", "unused"), CASES)
def test_an_option_without_effect_is_named_and_set_back(arguments, flags, unused):
    parsed = parse_config(flags.split(), arguments)
    assert parsed.problems == []
    assert {place.flag.removeprefix("--") for place, _ in parsed.unused} == set(unused.split())
    values, defaults = flatten_config(parsed.config), flatten_config(arguments())
    assert {name for name in unused.split() if values[name] != defaults[name]} == set()


@pytest.mark.parametrize("command", ["lora metadata FILE --overwrite", "plan --resolve_only --json --world_size 2"])
def test_the_notice_of_a_tool_is_a_warning_like_that_of_a_run(command, tmp_path, monkeypatch, capsys):
    save_file({"a": torch.zeros(1)}, tmp_path / "FILE")
    monkeypatch.chdir(tmp_path)
    data = ["--dataset_config", str(ROOT / "dataset_configs" / "demo.toml")] if "plan" in command else []

    assert run_tool([*command.split(), *data]) == 0

    name = command.split()[-2 if "plan" in command else -1]
    assert f"warning: no effect on this run: {name} (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("resize a --rank 0 --output b.safetensors", ["--rank: must be at least 1, got 0", "a: no such file"]),
        ("resize a --energy 5 --output b.safetensors", ["--energy: must be at most 1, got 5.0", "a: no such file"]),
        (
            "merge a b --rank x --method svd --output b.safetensors",
            ["--rank: expected an integer, got 'x'", "a: no such file", "b: no such file"],
        ),
        ("inspect ''", ["'': the name is empty; give the .safetensors file"]),
        (
            "scale a --blocks MID=0 --output=",
            ["a: no such file", "--output: the name is empty; give the file to write"],
        ),
        (
            "extract '' a --rank 1 --output b.safetensors",
            ["'': the name is empty; give a diffusers folder or a .safetensors file", "a: no such file or folder"],
        ),
        (
            "merge a --model= --output=",
            [
                "a: no such file",
                "--model: the name is empty; give a diffusers folder or a .safetensors file",
                "--output: the name is empty; give the file to write",
            ],
        ),
    ],
)
def test_a_wrong_argument_is_one_problem(words, lines, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert run_tool(["lora", *shlex.split(words)]) == 2

    _, *problems = capsys.readouterr().err.splitlines()
    assert [problem.strip().partition(" (looked")[0] for problem in problems] == lines


def test_every_need_of_an_option_of_a_tool_names_an_option_of_the_tool():
    """A name that is misspelled would be met for ever."""
    for arguments in [command[2] for command in COMMANDS.values()]:
        names = {option.name for option in iter_options(arguments)} | {"model"}
        for option in iter_options(arguments):
            assert {name for need in option.needs or () for name in need.names} <= names, option.name
