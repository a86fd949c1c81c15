"""Processes that SLURM or MPI starts without a launcher train together, as under torchrun."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--max_train_steps", "2", "--network_dim", "2", "--optimizer_type", "SGD", "--learning_rate", "1")
LAUNCHER_VARIABLES = tuple("RANK WORLD_SIZE LOCAL_ MASTER_ SLURM_ OMPI_ PMI ACCELERATE_ TORCHELASTIC".split())


def build_slurm_variables(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }


def build_mpi_variables(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }


def run_processes(command: list[str], variables: list[Mapping[str, str]]) -> list[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    inherited |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**inherited, **rank}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in variables
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


@pytest.fixture(scope="module")
def dataset_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    for index in range(4):
        Image.new("RGB", (64, 64), (60 * index, 100, 200)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"color {index}")
    config = folder / "dataset.toml"
    config.write_text(
        f"[general]\ncaption_extension = '.txt'\n[[datasets]]\nresolution = 64\nbatch_size = 1\n"
        f"[[datasets.subsets]]\nimage_dir = '{folder}'\n"
    )
    return str(config)


@pytest.fixture(scope="module")
def torchrun_weights(dataset_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = ["--dataset_config", dataset_config, *OPTIONS, "--output_dir", str(folder)]
    run_processes([*torchrun, "train_lora.py", *options], [{}])
    return load_file(folder / "lora.safetensors")


@pytest.mark.parametrize("build_variables", [build_slurm_variables, build_mpi_variables])
def test_tasks_without_a_launcher_train_the_lora_of_torchrun(
    build_variables, tmp_path, dataset_config, torchrun_weights
):
    options = ["--dataset_config", dataset_config, *OPTIONS]
    command = [sys.executable, "train_lora.py", *options, "--output_dir", str(tmp_path)]
    outputs = run_processes(command, [build_variables(rank) for rank in range(2)])

    assert "2 processes on 1 machine" in outputs[0] and outputs[1] == ""
    assert re.search(r"gradient all-reduce: [\d.]+ MB per step, about [\d.]+ ms$", outputs[0], re.MULTILINE)
    weights = load_file(tmp_path / "lora.safetensors")
    assert weights.keys() == torchrun_weights.keys()
    assert all(weights[name].equal(torchrun_weights[name]) for name in weights)


CLUSTERS = {
    "srun": (["srun", "--ntasks", "2"], ["sinfo", "--noheader", "--states", "idle"], "idle"),
    "mpirun": (
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
        ["mpirun", "--version"],
        "Open MPI",
    ),
}
"""The start of the command; a command whose output contains a word where it can run."""


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_real_cluster_trains_the_lora_of_torchrun(name, tmp_path, dataset_config, torchrun_weights):
    command, probe, word = CLUSTERS[name]
    if shutil.which(name) is None or word not in subprocess.run(probe, capture_output=True, text=True).stdout:
        pytest.skip(f"needs {name}")
    options = ["--dataset_config", dataset_config, *OPTIONS, "--output_dir", str(tmp_path)]
    (output,) = run_processes([*command, sys.executable, "train_lora.py", *options], [{}])

    assert output.count("2 processes on 1 machine") == output.count("LoRA file: ") == 1, output
    weights = load_file(tmp_path / "lora.safetensors")
    assert weights.keys() == torchrun_weights.keys()
    assert all(weights[key].equal(torchrun_weights[key]) for key in weights)


@pytest.mark.quick
@pytest.mark.parametrize("build_variables", [build_slurm_variables, build_mpi_variables])
def test_the_dry_run_plans_the_processes_of_the_step_and_is_printed_once(build_variables, dataset_config):
    command = [sys.executable, "train_lora.py", "--dataset_config", dataset_config, *OPTIONS, "--dry_run"]
    first, second = run_processes(command, [build_variables(rank) for rank in range(2)])

    assert "batch 1 x 2 processes" in first and second == ""
