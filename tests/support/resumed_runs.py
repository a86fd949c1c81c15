"""A run with checkpoints, its folder as a kill leaves it, and its metrics."""

import json
import shutil
from pathlib import Path

import pytest
from rank_processes import run_on_ranks
from training_runs import train, write_images

STEPS = 12


TIMING_METRICS = ("data_wait_seconds", "speed/", "memory/")


SETTINGS = (
    "--max_train_steps",
    str(STEPS),
    *(
        "--network_dim 2 --learning_rate 1e-2 --lr_scheduler cosine --lr_warmup_steps 2 "
        "--gradient_accumulation_steps 2 --shuffle_caption --flip_aug --caption_dropout_rate 0.2 --ema_decay 0.9 "
        "--save_every_n_steps 3 --save_state --seed 3"
    ).split(),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("resume"), {(96, 64): 5, (64, 64): 3})


@pytest.fixture(scope="module")
def uninterrupted_run(dataset, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run, with a checkpoint after every third step."""
    folder = tmp_path_factory.mktemp("whole")
    run_on_ranks(1, train, *build_flags(dataset, folder))
    return folder


def build_flags(dataset: Path, folder: Path, *more: str) -> tuple[str, ...]:
    return ("--dataset_config", str(dataset), "--output_dir", str(folder), *SETTINGS, *more)


def copy_as_killed(run_folder: Path, folder: Path, step: int) -> Path:
    """Copy the run's folder without what was saved after ``step``, as if the run was killed before its next save."""
    shutil.copytree(
        run_folder,
        folder,
        ignore=lambda _, names: [
            name
            for name in names
            if ("-step" in name and int(name.split("-step")[1][:8]) > step)
            or name in ("lora.safetensors", "lora-ema.safetensors", "lora-state", "lora.report.html")
        ],
    )
    return folder


def read_metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "lora.metrics.jsonl").read_text("utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMING_METRICS)} for line in lines]
