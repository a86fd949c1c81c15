"""Every option says what it needs; where that is missing, it is named in one notice and set back, in flags and files.

The cases are generated from the facts of the options, so a new option has its test when it has its field.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from data_paths import ROOT
from option_cases import MUSUBI_IMAGES, OPTIONS, STORED, Case, build_met, build_unmet, choose_value, list_cases
from problem_lines import format_lines, format_unused

from library import cli
from library.config.help import format_help
from library.config.options import flatten_config
from library.config.parser import format_unused_settings
from library.models.model_configs import load_bundled_config
from library.tools.import_config import format_toml
from library.training.preflight import find_settings_problems, load_settings

FORMS = ("flag", "file", "sd-scripts file")


def write_stored_model(folder: Path) -> None:
    """Write the configurations of a model whose transformer is stored in nf4, which is all that settings need."""
    files = {name: dict(content) for name, content in load_bundled_config("flux_tiny").items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    files["transformer/config.json"]["quantization_config"] = settings
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content), "utf-8")


def write_images(folder: Path, case: Case) -> list[str]:
    """Write a dataset file for a case, and return the flags that select it."""
    (folder / "images" / "more").mkdir(parents=True, exist_ok=True)
    if case.model == STORED:
        write_stored_model(folder / STORED)
    if not case.has_dataset_file:
        return ["--resolution", "64", "--pretrained_model_name_or_path", case.model]
    path = folder / "set.toml"
    subsets = "" if case.subset == MUSUBI_IMAGES else "[[datasets.subsets]]\n"
    path.write_text(f"[[datasets]]\nresolution = 64\n{subsets}{case.subset}\n", "utf-8")
    return ["--dataset_config", str(path), "--pretrained_model_name_or_path", case.model]


def build_argv(folder: Path, form: str, settings: dict[str, Any]) -> list[str]:
    """Build the flags, or write the run file, that have these settings."""
    if form == "flag":
        return [word for name, value in settings.items() for word in _format_flag(name, value)]
    path = folder / "run.toml"
    lines = [f"{name} = {format_toml(value)}\n" for name, value in settings.items()]
    if form == "sd-scripts file" and "network_module" not in settings:
        lines.append("network_module = 'networks.lora'\n")
    path.write_text("".join(lines), "utf-8")
    return ["--config_file", str(path)]


def _format_flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def find_name(location: str) -> str:
    return location.rpartition(": ")[2].removeprefix("--").removeprefix("no-")


def test_every_option_says_what_it_needs_or_that_it_always_has_an_effect():
    assert [option.name for option in OPTIONS.values() if option.needs is None] == []
    text = " ".join(format_help("train_lora.py").split())
    assert "(default: 1; needs lr_scheduler polynomial, no lr_scheduler_type)" in text
    assert all(need.describe(option.name) for option in OPTIONS.values() for need in option.needs)


@pytest.mark.parametrize("form", [pytest.param(form, marks=[pytest.mark.slow] * (form != "flag")) for form in FORMS])
@pytest.mark.parametrize(("name", "index"), list_cases())
def test_an_option_without_effect_is_named_and_set_back(name, index, form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option = OPTIONS[name]
    case = build_unmet(option.needs[index], option)
    settings = {name: choose_value(option, option.needs[index])} | case.settings

    loaded = load_settings([*write_images(tmp_path, case), *build_argv(tmp_path, form, settings)])

    named = {find_name(location): reason for location, reason in format_unused(loaded.unused)}
    assert named.get(name), f"{settings} {case.model} {case.subset}"
    assert option.dataset_table or flatten_config(loaded.config)[name] == option.default
    line = format_unused_settings(loaded.unused, loaded.config_file)
    assert "\n" not in line and name in line and named[name] in line
    assert [line for line in format_lines(find_settings_problems(loaded)) if name in line] == []


@pytest.mark.parametrize(("name", "index"), [(name, index) for name, index in list_cases() if index == 0])
def test_an_option_whose_needs_are_met_is_kept(name, index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option, case = OPTIONS[name], Case()
    for need in option.needs:
        case |= build_met(need, option)
    settings = {name: choose_value(option)} | case.settings

    loaded = load_settings([*write_images(tmp_path, case), *build_argv(tmp_path, "flag", settings)])

    named = {find_name(location): reason for location, reason in format_unused(loaded.unused)}
    assert name not in named, f"{settings} {case.model} {case.subset}: {named}"


@pytest.mark.parametrize("form", FORMS)
def test_a_run_with_many_options_without_effect_starts_and_names_them_in_one_line(form, tmp_path, monkeypatch, capsys):
    """All options at once that have no effect on a run of the tiny Stable Diffusion 1 without further settings."""
    monkeypatch.chdir(tmp_path)
    settings = {}
    for name, index in list_cases():
        case = build_unmet(OPTIONS[name].needs[index], OPTIONS[name])
        if case == Case() and name != "resolution":
            settings[name] = choose_value(OPTIONS[name], OPTIONS[name].needs[index])
    data = write_images(tmp_path, Case(subset=f"image_dir = '{ROOT / 'dataset_configs' / 'demo'}'"))

    assert cli.main([*data, "--dry_run", *build_argv(tmp_path, form, settings)]) == 0

    output = capsys.readouterr()
    (line,) = [line for line in (output.out + output.err).splitlines() if "no effect on this run" in line]
    assert len(settings) > 60 and [name for name in settings if name not in line] == []
