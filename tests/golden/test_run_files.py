"""Run files of sd-scripts and its GUIs: all are accepted, with the values that sd-scripts' own parsers read.

``data/run_files/expected.json`` says what these parsers make of each file, and how that was found out.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from data_paths import ROOT
from problem_lines import format_lines, format_unused
from rank_processes import run_on_ranks
from safetensors.torch import load_file

from library import cli
from library.config.kohya_compat import GUI_KEYS, KOHYA_OPTIONS, OptionAlias
from library.config.options import flatten_config, iter_options
from library.config.schema import RunConfig
from library.training.preflight import load_settings

FOLDER = ROOT / "tests" / "data" / "run_files"
EXPECTED = json.loads((FOLDER / "expected.json").read_text("utf-8"))["files"]
FOUND = json.loads((FOLDER / "found" / "expected.json").read_text("utf-8"))
"""Further files of notebooks, scripts and GUIs: what has no effect, what is said, or why a file is refused."""
OPTIONS = {option.name: option for option in iter_options(RunConfig)}
UNUSED = {
    "a_sd1.toml": "lowram sample_every_n_epochs sample_sampler",
    "e_sdxl.toml": "",
    "j_sd1.toml": "learning_rate lowram mem_eff_attn persistent_data_loader_workers max_train_steps sample_sampler"
    " save_last_n_steps_state",
    "m_sdxl.toml": "additional_parameters epoch noise_offset_type no_half_vae max_train_steps learning_rate unet_lr"
    " text_encoder_lr wandb_run_name clip_skip keep_tokens",
    "p_sdxl.toml": "learning_rate epoch noise_offset_type lr_scheduler_num_cycles wandb_run_name clip_skip",
    "s_sd1.toml": "learning_rate additional_parameters epoch noise_offset_type lr_scheduler_num_cycles wandb_run_name"
    " max_bucket_reso",
    "t_flux.toml": "model_train_type model_type sdpa lowram persistent_data_loader_workers text_encoder_lr discrete_flow_shift"
    " clip_skip keep_tokens max_bucket_reso",
    "x_sdxl.toml": "learning_rate dynamo_backend epoch no_half_vae noise_offset_type max_train_steps clip_skip max_bucket_reso",
    "y_sd1.toml": "lowram mem_eff_attn persistent_data_loader_workers sample_every_n_epochs sample_sampler dataset_repeats",
}
"""The keys of each file that cannot change its result, apart from xformers, which may be installed."""
TEXT_ENCODERS = {"a": 1, "e": 0, "j": 1, "m": 2, "p": 0, "s": 1, "t": 0, "x": 2, "y": 1}
"""How many text encoders sd-scripts trains with each file."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with images in sd-scripts' layout, and the prompts of a file."""
    shutil.copytree(ROOT / "dataset_configs" / "demo", tmp_path / "images" / "2_lorikeet bird")
    (tmp_path / "prompts.txt").write_text("a bird --w 64 --h 64 --s 2\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bitsandbytes(tmp_path, monkeypatch) -> None:
    """A stand-in: a dry run looks whether the package is installed, and does not import it."""
    (tmp_path / "packages" / "bitsandbytes").mkdir(parents=True)
    (tmp_path / "packages" / "bitsandbytes" / "__init__.py").touch()
    if find_spec("bitsandbytes") is None:
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))


def build_argv(name: str) -> list[str]:
    """e_sdxl.toml leaves the resolution to a dataset file."""
    data = "--dataset_config" if name == "e_sdxl.toml" else "--train_data_dir"
    images = str(ROOT / "dataset_configs" / "demo.toml") if name == "e_sdxl.toml" else "images"
    return [data, images, "--config_file", str(FOLDER / name)]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_file_is_accepted_unchanged(name, folder, bitsandbytes, capsys):
    assert cli.main([*build_argv(name), "--dry_run"]) == 0
    output = capsys.readouterr().out
    assert "the run: " in output
    (trained,) = [line for line in output.splitlines() if line.startswith("training: ")]
    assert trained.count("text encoder") == TEXT_ENCODERS[name.partition("_")[0]]


@pytest.mark.parametrize("name", FOUND)
def test_a_found_run_file_is_accepted_or_refused_with_its_reasons(name, folder, bitsandbytes, capsys):
    """Unknown keys, which sd-scripts ignores, are named; what it cannot train or would train differently is refused."""
    path, expected = FOLDER / "found" / name, FOUND[name]
    text = path.read_text("utf-8")
    argv = ["--config_file", str(path)]
    argv += [] if '\ntrain_data_dir = "i' in text else ["--train_data_dir", "images"]
    argv += [] if "\nresolution" in text else ["--resolution", "64"]

    code, output = cli.main([*argv, "--dry_run"]), capsys.readouterr()

    problems = [line.strip().replace(str(path), name) for line in output.err.splitlines() if line.startswith("  ")]
    assert (code, problems) == (2 if "problems" in expected else 0, expected.get("problems", []))
    if code:
        return
    loaded = load_settings(argv)
    unused = [location.removeprefix(f"{path}:").split(": ")[-1] for location, _ in format_unused(loaded.unused)]
    (trained,) = [line for line in output.out.splitlines() if line.startswith("training: ")]
    assert " ".join(key for key in unused if key != "xformers") == expected["no_effect"]
    assert trained.count("text encoder") == expected["text_encoders"]
    assert [notice.replace(str(path), name) for notice in loaded.notices] == expected["notices"]


@pytest.mark.parametrize("name", EXPECTED)
def test_settings_are_those_that_the_parser_of_sd_scripts_reads(name, folder):
    loaded = load_settings(build_argv(name))
    values, prefix = flatten_config(loaded.config), f"{FOLDER / name}:"
    unused = {location.removeprefix(prefix).split(": ")[-1] for location, _ in format_unused(loaded.unused)}

    assert unused - {"xformers"} == set(UNUSED[name].split())
    assert set(EXPECTED[name]["ignored"]) <= {*GUI_KEYS, *KOHYA_OPTIONS}
    for key, value in EXPECTED[name]["values"].items():
        if key in unused:
            assert key not in values or OPTIONS[key].dataset_table or values[key] == OPTIONS[key].default, key
        elif isinstance(alias := KOHYA_OPTIONS.get(key), OptionAlias):
            assert value in (False, None) or key in ("xformers", "fp8_base"), f"{key} stands for {alias.option}"
        elif key not in OPTIONS:
            assert KOHYA_OPTIONS[key].accepts(value), key
        elif OPTIONS[key].is_unset_by(value) or value is None:
            assert values[key] == OPTIONS[key].default, key
        else:
            assert values[key] == _expect(name, key, OPTIONS[key].parse_lenient_toml_value(value)), key


def _expect(name: str, key: str, value: object) -> object:
    """The exceptions: text_encoder_lr = 0 trains no text encoder, and buckets are multiples of what a model needs."""
    if name == "p_sdxl.toml" and key == "text_encoder_lr":
        return ()
    return 16 if key == "bucket_reso_steps" and value == 1 else value


@pytest.mark.parametrize("name", ["m_sdxl", "p_sdxl", "s_sd1", "t_flux", "x_sdxl"])
@pytest.mark.slow
def test_a_run_file_trains(name, folder):
    """At a size and a number of steps for tests; two optimizers need a package and a GPU."""
    flags = "--resolution 64 --min_bucket_reso 32 --bucket_reso_steps 16 --mixed_precision no --max_train_epochs 1"
    flags += " --lr_warmup_steps 4" if name in ("p_sdxl", "t_flux") else ""
    other_optimizer = ("--optimizer_type", "AdamW") if name == "t_flux" else ()
    run_on_ranks(1, train_run_file, name, *build_argv(f"{name}.toml"), *flags.split(), *other_optimizer)

    keys = load_file(folder / "output" / "run" / "run.safetensors").keys()
    assert len({key.split("_")[1] for key in keys if key.startswith("lora_te")}) == TEXT_ENCODERS[name[0]]
    assert any("lora_unet" in key or key.startswith("transformer.") for key in keys)


def train_run_file(name: str, *argv: str) -> None:
    """Train as ``train_lora.py`` does, which drops the options without effect on the model."""
    from library.training.run import run_training

    loaded = load_settings([*argv, "--quiet", "--max_data_loader_n_workers", "0", "--no-full_bf16"])
    assert format_lines(loaded.problems) == [], name
    run_training(loaded.config, loaded.locations)
