"""Shared by tests: launched runs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_processes import free_port
from resumed_runs import figures
from tiny_pipelines import get_tiny_sd1_folder
from training_runs import pictures

ROOT = Path(__file__).resolve().parents[2]


STEPS = 30


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    dataset = pictures(tmp_path_factory.mktemp("signals"), {(64, 64): 4})
    return [
        "--dataset_config",
        str(dataset),
        "--pretrained_model_name_or_path",
        get_tiny_sd1_folder(),
        "--max_train_steps",
        str(STEPS),
        "--network_dim",
        "2",
        "--learning_rate",
        "1e-2",
        "--lr_scheduler",
        "cosine",
        "--train_batch_size",
        "2",
        "--mixed_precision",
        "no",
        "--max_data_loader_n_workers",
        "0",
    ]


def launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        str(free_port()),
    ]


def started(
    ranks: int, settings: list[str], folder: Path, *more: str, under: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [*under, *launcher(ranks), "train_lora.py", *settings, "--output_dir", str(folder), *more],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )


def when_it_trains(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "lora.metrics.jsonl").is_file() and len(figures(folder)) > 2:
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[0])


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=240)
    return process.returncode, text
