"""Training runs launched as separate processes, which tests signal, kill or wait for."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_processes import find_free_port
from resumed_runs import read_metrics
from tiny_pipelines import get_tiny_sd1_folder
from training_runs import write_images

ROOT = Path(__file__).resolve().parents[2]


STEPS = 30


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    dataset = write_images(tmp_path_factory.mktemp("signals"), {(64, 64): 4})
    return [
        "--dataset_config",
        str(dataset),
        "--pretrained_model_name_or_path",
        get_tiny_sd1_folder(),
        "--max_train_steps",
        str(STEPS),
        *(
            "--network_train_unet_only --network_dim 2 --learning_rate 1e-2 --lr_scheduler cosine --train_batch_size 2 "
            "--mixed_precision no --max_data_loader_n_workers 0"
        ).split(),
    ]


def build_launcher_command(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        str(find_free_port()),
    ]


def start_run(
    ranks: int, settings: list[str], folder: Path, *options: str, wrapper: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [*wrapper, *build_launcher_command(ranks), "train_lora.py", *settings, "--output_dir", str(folder), *options],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )


def wait_until_training(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "lora.metrics.jsonl").is_file() and len(read_metrics(folder)) > 2:
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[0])


def wait_for_exit(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    return process.returncode, output
