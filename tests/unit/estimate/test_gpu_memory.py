"""``--gpu_memory`` of a training run: what is chosen fits, is recorded, and stays the same when the run is resumed."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from library.config.options import flatten_config
from library.distributed.world import World
from library.errors import ConfigError
from library.estimate.memory_option_choice import CHOSEN_OPTIONS, choose_memory_options
from library.training.checkpoint_dir import write_checkpoint
from library.training.preflight import load_settings
from library.training.resume import serialize_settings

ROOT = Path(__file__).parents[3]
MODEL = ("--pretrained_model_name_or_path", "random:flux:tiny", "--network_train_unet_only")
LITTLE, ENOUGH = "1900MB", "24GB"
"""Less and more than the activations of 128 images need with nothing but bf16 and caches."""


@pytest.fixture
def flags(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "1.png")
    text = f"[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = '{folder}'\nnum_repeats = 128\n"
    (tmp_path / "set.toml").write_text(text)
    output = ("--output_dir", str(tmp_path / "out"), "--output_name", "x")
    return [*MODEL, "--dataset_config", str(tmp_path / "set.toml"), *output, "--train_batch_size", "128"]


def choose(flags, *more, world=None):
    """Return what was chosen, by option, and the settings."""
    loaded = load_settings([*flags, *more])
    chosen = choose_memory_options(loaded, world or World())
    before, after = flatten_config(loaded.config), flatten_config(chosen.config)
    return {name: value for name, value in after.items() if value != before[name]}, chosen


def find_problem(flags, *more):
    with pytest.raises(ConfigError) as raised:
        choose(flags, *more)
    (problem,) = raised.value.problems
    return str(problem)


def test_what_is_chosen_is_set_named_in_one_line_and_located(flags, caplog):
    caplog.set_level(logging.INFO)
    options, chosen = choose(flags, "--gpu_memory", LITTLE, "--gradient_accumulation_steps", "1")

    assert options.pop("cache_latents") and options.pop("cache_text_encoder_outputs")
    assert options.pop("mixed_precision") == "bf16" and options["gradient_checkpointing"]
    assert set(options) <= set(CHOSEN_OPTIONS) and chosen.config.model.quantize_base == "none"
    (line,) = [message for message in caplog.messages if message.startswith("gpu_memory")]
    assert line.startswith("gpu_memory 1.85547GB: chose --cache_latents --cache_text_encoder_outputs")
    assert "--gradient_checkpointing" in line and "by an estimate, exact weights)" in line
    assert str(chosen.locations["gradient_checkpointing"]) == "--gpu_memory 1.85547GB"


@pytest.mark.slow
def test_with_enough_memory_only_what_costs_nothing_is_chosen(flags):
    options, _ = choose(flags, "--gpu_memory", ENOUGH)
    assert options == {"cache_latents": True, "cache_text_encoder_outputs": True, "mixed_precision": "bf16"}


@pytest.mark.slow
def test_what_the_user_set_stays(flags):
    words = "--no-cache_latents", "--mixed_precision", "fp16", "--quantize_base", "int8", "--gpu_memory", ENOUGH
    assert choose(flags, *words)[0] == {"cache_text_encoder_outputs": True}


@pytest.mark.slow
def test_latents_of_random_crops_are_not_cached(flags, tmp_path):
    with (tmp_path / "set.toml").open("a") as file:
        file.write("random_crop = true\n")
    options, _ = choose(flags, "--gpu_memory", ENOUGH)
    assert "cache_latents" not in options and options["cache_text_encoder_outputs"]


@pytest.mark.slow
def test_a_batch_is_accumulated_unless_the_dataset_file_sets_it(flags, tmp_path):
    words = "--no-gradient_checkpointing", "--gpu_memory", "1100MB"
    options, _ = choose(flags, *words)
    assert options["train_batch_size"] * options["gradient_accumulation_steps"] == 128
    text = (tmp_path / "set.toml").read_text().replace("resolution = 512", "resolution = 512\nbatch_size = 128")
    (tmp_path / "set.toml").write_text(text)
    problem = find_problem(flags, *words[:-1], "1500MB")
    assert problem.startswith("--no-gradient_checkpointing: with this, the run does not fit into gpu_memory")
    assert "it fits with gradient_checkpointing on (about " in problem


@pytest.mark.slow
def test_too_little_memory_is_one_problem_with_the_memory_that_would_do(flags):
    problem = find_problem(flags, "--gpu_memory", "790MB")
    assert problem.startswith("--gpu_memory: 790MB is too little: the run needs 0.8")
    needed = problem.partition("the run needs ")[2].partition(" GB")[0]
    assert choose(flags, "--gpu_memory", f"{needed}GB")[0]["gradient_checkpointing"], "as much is enough"


@pytest.mark.slow
def test_of_several_processes_each_has_the_whole_model_or_a_shard(flags):
    options, chosen = choose(flags, "--gpu_memory", LITTLE, world=World.build_fake(2))
    assert options.keys() <= {*CHOSEN_OPTIONS} and not chosen.config.deepspeed.deepspeed
    options, _ = choose(flags, "--gpu_memory", ENOUGH, "--pp_size", "2", world=World.build_fake(2))
    assert "fsdp" not in options


def save_checkpoint(flags, *more, split):
    _, chosen = choose(flags, *more)
    settings = {**serialize_settings(chosen.config), "quantize_base": "int8", "blocks_to_swap": 2}
    metadata = {"settings": settings, "split": split, "step": 1, "saved_at": 0.0, "run": 1}
    write_checkpoint(Path(chosen.config.save.output_dir) / "x-state", metadata, {"weight": torch.zeros(1)})


@pytest.mark.slow
def test_a_resumed_run_uses_what_was_chosen_for_it(flags, caplog):
    caplog.set_level(logging.INFO)
    save_checkpoint(flags, "--gpu_memory", ENOUGH, split=[1, 1])
    resumed = [*flags, "--auto_resume"]

    options, _ = choose(resumed, "--gpu_memory", ENOUGH)
    assert (options["quantize_base"], options["blocks_to_swap"]) == ("int8", 2)
    assert caplog.messages[-1].endswith("(as in x-state)")
    options, _ = choose(resumed, "--gpu_memory", ENOUGH, "--blocks_to_swap", "1")
    assert options["quantize_base"] == "int8" and "blocks_to_swap" not in options
    options, _ = choose(resumed, "--gpu_memory", "48GB")
    assert options["quantize_base"] == "int8", "another would change the result"
    assert "blocks_to_swap" not in options, "another memory, another choice"
    assert "quantize_base" not in choose(flags, "--gpu_memory", ENOUGH)[0], "a run from scratch"


@pytest.mark.slow
def test_a_run_records_what_it_chose_and_resumes_with_it(flags, tmp_path):
    flags = [*flags, "--train_batch_size", "2", "--resolution", "64", "--save_state", "--gpu_memory", ENOUGH]
    lines = []
    for steps in ("1", "2"):
        words = [sys.executable, "train_lora.py", *flags, "--auto_resume", "--max_train_steps", steps]
        result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        lines += [line for line in (result.stdout + result.stderr).splitlines() if "gpu_memory 24GB: chose" in line]
    settings = json.loads((tmp_path / "out" / "x.run.json").read_text())["all_settings"]
    assert settings["cache_latents"] and settings["mixed_precision"] == "bf16" and settings["gpu_memory"] == "24GB"
    assert len(lines) == 2 and "exact weights" in lines[0] and "as in x-state" in lines[1]
