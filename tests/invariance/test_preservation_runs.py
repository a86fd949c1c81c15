"""Runs with output preservation: equal on every layout and after resuming, with cached texts as without."""

import pytest
import torch
from one_result import BOUNDS, REFERENCE, train_layout, write_even_dataset
from problem_lines import format_lines
from rank_processes import run_on_ranks
from resumed_runs import build_flags, copy_as_killed, dataset, read_metrics
from safetensors.torch import load_file
from training_runs import max_relative_difference, train

from library.config import parse_config
from library.config.schema import RunConfig
from library.models.families import FAMILIES
from library.training.preflight import find_settings_problems, load_settings
from library.training.validate_model import validate_preservation

__all__ = ["dataset"]  # a fixture
PRESERVE = (
    "--diff_output_preservation_trigger picture --diff_output_preservation_class thing "
    "--blank_prompt_preservation_multiplier 0.5"
).split()


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("sd3", ("DDP 2 x 2", "FSDP 2 x 1, 2 accumulated", "ZeRO 3, 2 x 2")),
        ("flux", ("TP 2",)),
    ],
)
def test_every_strategy_preserves_the_output_as_one_process_does(model, names, tmp_path):
    data, flags = write_even_dataset(tmp_path), ("--network_train_unet_only", *PRESERVE)
    one = train_layout(REFERENCE, model, data, tmp_path, *flags)
    for name in names:
        assert max_relative_difference(one, train_layout(name, model, data, tmp_path, *flags)) < BOUNDS["no"] / 10, name
    plain = train_layout("4 accumulated", model, data, tmp_path, "--network_train_unet_only")
    assert max_relative_difference(one, plain) > 1e-2


def test_a_resumed_run_is_equal_to_the_bit_and_caches_change_nothing(dataset, tmp_path):
    flags = (*PRESERVE, "--max_train_steps", "6")
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "whole", *flags))
    folder = copy_as_killed(tmp_path / "whole", tmp_path / "cut", 3)
    run_on_ranks(1, train, *build_flags(dataset, folder, *flags, "--auto_resume"))
    cached = ("--cache_text_encoder_outputs", "--output_dir", str(tmp_path / "cached"))
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *flags, *cached))

    whole, resumed, read = (load_file(tmp_path / name / "lora.safetensors") for name in ("whole", "cut", "cached"))
    assert all(torch.equal(whole[key], resumed[key]) and torch.equal(whole[key], read[key]) for key in whole)
    assert read_metrics(folder) == read_metrics(tmp_path / "whole")


def test_swapped_blocks_and_a_multiplier_of_zero_change_nothing(tmp_path):
    data, flags = write_even_dataset(tmp_path), ("--network_train_unet_only",)
    off = ("--diff_output_preservation_multiplier", "0", "--blank_prompt_preservation_multiplier", "0")
    plain = train_layout(REFERENCE, "sd3", data, tmp_path, *flags)
    other = train_layout(REFERENCE, "sd3", data, tmp_path, *flags, *PRESERVE, *off, "--overwrite")
    assert all(torch.equal(plain[key], other[key]) for key in plain)
    preserved = train_layout(REFERENCE, "sd3", data, tmp_path, *flags, *PRESERVE, "--overwrite")
    swapped = ("--blocks_to_swap", "1", "--gradient_checkpointing", "--overwrite")
    other = train_layout(REFERENCE, "sd3", data, tmp_path, *flags, *PRESERVE, *swapped)
    assert max_relative_difference(preserved, other) < 1e-5


CHECKPOINTING = ("--gradient_checkpointing", "--network_train_unet_only")


@pytest.mark.quick
def test_settings_with_which_it_cannot_work_are_named_before_a_model_is_loaded(tmp_path):
    data = str(write_even_dataset(tmp_path))
    model = ("--pretrained_model_name_or_path", "random:sd3:tiny", "--dataset_config", data)
    word = ("--diff_output_preservation_class", "thing")
    for flags, text in (
        (word, "needs the word that it replaces in captions; set diff_output_preservation_trigger"),
        ((*PRESERVE, "--pp_size", "2"), "cannot be combined with pp_size"),
        ((*PRESERVE, "--torch_compile"), "cannot be combined with torch_compile"),
        ((*PRESERVE, "--gpu_memory", "24GB"), "cannot be combined with gpu_memory"),
        ((*PRESERVE, *CHECKPOINTING, "--network_dropout", "0.1"), "would compute blocks again with other texts"),
        ((*PRESERVE, *CHECKPOINTING, "--cp_size", "2"), "would compute blocks again with other texts"),
    ):
        lines = format_lines(find_settings_problems(load_settings([*model, *flags])))
        assert any("diff_output_preservation_class" in line and text in line for line in lines), lines
    assert parse_config([*model, "--blank_prompt_preservation_multiplier", "1"]).problems == []
    assert RunConfig().preservation.active_option is None
    config = parse_config([*model, *PRESERVE, *CHECKPOINTING]).config
    for family, count in (("sd3", 0), ("kandinsky5_image", 1), ("kandinsky5_video", 1)):
        assert len(list(validate_preservation(config, FAMILIES.get(family)(), is_compile_enabled=False))) == count
