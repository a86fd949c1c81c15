"""Runs that leave out their first steps."""

from pathlib import Path

import pytest
import torch
from problem_lines import format_lines
from safetensors.torch import load_file
from training_runs import train, write_images

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.config.schema_optim import OptimConfig
from library.dataloader.prepare import prepare_data
from library.dataloader.run_plan import RunPlan
from library.errors import ConfigError

SETTINGS = (
    "--network_dim 2 --optimizer_type torch.optim.SGD --learning_rate 0.1 --lr_scheduler cosine --seed 3 "
    "--shuffle_caption --flip_aug --caption_dropout_rate 0.2 --max_train_epochs 3 --save_every_n_epochs 1"
).split()


def build_plan(dataset: Path, **options) -> RunPlan:
    config = TrainConfig(**options)
    return RunPlan.from_config(
        prepare_data(DataConfig(dataset_config=str(dataset)), 8).build_batch_plan(1, config), config, OptimConfig()
    )


def test_initial_epoch_is_the_step_at_which_this_epoch_starts(tmp_path):
    dataset = write_images(tmp_path, {(96, 64): 5})

    assert build_plan(dataset, max_train_steps=20).first_step == 0
    assert build_plan(dataset, max_train_steps=20, initial_epoch=1).first_step == 0
    assert build_plan(dataset, max_train_steps=20, initial_epoch=3).first_step == 10
    assert build_plan(dataset, max_train_steps=20, initial_epoch=3, initial_step=4).first_step == 4
    with pytest.raises(ConfigError) as error:
        build_plan(dataset, max_train_epochs=2, initial_epoch=3)
    (line,) = format_lines(error.value.problems)
    assert "initial_epoch" in line and "leaves out 10 steps, and the run has 10" in line


@pytest.mark.slow
@pytest.mark.parametrize("start", [("--initial_epoch", "2"), ("--initial_step", "5")])
def test_a_run_from_a_file_of_an_epoch_without_the_steps_before_gives_the_adapter_of_the_whole_run(start, tmp_path):
    """The optimizer has no state, so a LoRA file is all that the steps before leave behind."""
    dataset = write_images(tmp_path, {(96, 64): 5})
    flags = ("--dataset_config", str(dataset), *SETTINGS)
    whole = load_file(train(*flags, "--output_dir", str(tmp_path / "whole")))
    weights = tmp_path / "whole" / "lora-000001.safetensors"
    part = train(*flags, "--output_dir", str(tmp_path / "part"), "--network_weights", str(weights), *start)

    torch.testing.assert_close(load_file(part), whole, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "part" / "lora-000002.safetensors").exists()
    assert not (tmp_path / "part" / "lora-000001.safetensors").exists()
