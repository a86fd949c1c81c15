"""Train on two machines over a fast, slow, high-latency and cut network; by hand: tests/support/two_machines.py [NAME]."""

import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch
from network_namespaces import Launcher, Machines, build_flags_command, get_accelerate_command, launch_on_both_machines
from rank_processes import find_free_port, run_on_ranks
from safetensors.torch import load_file
from training_runs import train, write_images

SETTINGS = (
    "--pretrained_model_name_or_path random:sd1:tiny --max_train_steps 12 --network_train_unet_only --network_dim 16 --learning_rate 1e-2 "
    "--train_batch_size 2 --mixed_precision no --max_data_loader_n_workers 0 --seed 3"
).split()
STARTUP_TIMEOUT_SECONDS = 240.0
logger = logging.getLogger("two_machines")


ACCELERATE_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 2
num_processes: 2
machine_rank: 0
main_process_ip: {address}
main_process_port: {port}
rdzv_backend: static
same_network: true
mixed_precision: 'no'
use_cpu: false
"""


def build_config_file_launcher(folder: Path) -> Launcher:
    """Launch with the file that ``accelerate config`` writes, the same on all machines, and the machine rank as a flag."""

    def launcher(machine: int, address: str, port: int) -> list[str]:
        path = folder / "cluster.yaml"
        path.write_text(ACCELERATE_CONFIG.format(address=address, port=port))
        return [*get_accelerate_command(), "--config_file", str(path), "--machine_rank", str(machine)]

    return launcher


def build_torchrun_command(machine: int, address: str, port: int) -> list[str]:
    """Build a torchrun command whose c10d rendezvous assigns the machine ranks."""
    flags = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id 7 --rdzv_endpoint {address}:{port}"
    return [str(Path(sys.executable).parent / "torchrun"), *flags.split()]


def compare_with_one_machine(
    work: Path, dataset: Path, name: str, rate: str = "", delay: float = 0.0, launcher: Launcher = build_flags_command
) -> None:
    """Compare a run on two machines with a run of two processes on one machine."""
    reference_folder = work / "one_machine"
    if not reference_folder.exists():
        run_on_ranks(2, train, "--dataset_config", str(dataset), *SETTINGS, "--output_dir", str(reference_folder))
    folder = work / name
    folder.mkdir()
    script = ["train_lora.py", "--dataset_config", str(dataset), *SETTINGS, "--output_dir", str(folder)]
    start = time.monotonic()
    with Machines(rate, delay) as machines:
        codes, outputs = launch_on_both_machines(machines, script, folder, find_free_port(), launcher, 480)
        sent_bytes = [machines.count_sent_bytes(machine) for machine in (0, 1)]
    if codes != [0, 0]:
        logger.info("%s: exit codes %s\n%s", name, codes, "\n".join(outputs))
        return
    expected, actual = load_file(reference_folder / "lora.safetensors"), load_file(folder / "lora.safetensors")
    is_equal = expected.keys() == actual.keys() and all(torch.equal(expected[key], actual[key]) for key in expected)
    log_lines = [line.partition("  ")[2] for line in outputs[0].splitlines() if " MB " in line or "machines" in line]
    lines = [json.loads(line) for line in (folder / "lora.metrics.jsonl").read_text("utf-8").splitlines()]
    speed = [line["speed/steps_per_second"] for line in lines if "speed/steps_per_second" in line][-1]
    log_lines.append(f"{speed:.2f} steps per second")
    logger.info(
        "%s: %.0f s, bitwise equal: %s, bytes sent %s\n  %s",
        name,
        time.monotonic() - start,
        is_equal,
        sent_bytes,
        "\n  ".join(log_lines),
    )


def train_over_loopback(work: Path, dataset: Path) -> None:
    """Both machines bind gloo to the loopback interface and cannot connect; log their error messages."""
    folder = work / "wrong"
    folder.mkdir()
    script = ["train_lora.py", "--dataset_config", str(dataset), *SETTINGS, "--output_dir", str(folder)]
    start = time.monotonic()
    with Machines() as machines:
        machines.interface = "lo"
        codes, outputs = launch_on_both_machines(machines, script, folder, find_free_port(), build_flags_command, 240)
    logger.info("wrong: exit codes %s after %.0f s", codes, time.monotonic() - start)
    for text in outputs:
        at = text.find("cannot connect")
        logger.info("%s", text[max(0, at - 200) : at + 900] if at >= 0 else text[-900:])


def disconnect_while_training(work: Path, dataset: Path) -> None:
    """Take the link down while both machines train; log when and how both exit."""
    folder = work / "cut"
    folder.mkdir()
    script = [
        "train_lora.py",
        "--dataset_config",
        str(dataset),
        *SETTINGS,
        *"--max_train_steps 100000 --ddp_timeout 1".split(),
        "--output_dir",
        str(folder),
    ]
    times = []
    with Machines() as machines:

        def during(processes: list) -> None:
            metrics, deadline = folder / "lora.metrics.jsonl", time.monotonic() + STARTUP_TIMEOUT_SECONDS
            while time.monotonic() < deadline and not (metrics.is_file() and metrics.stat().st_size > 2000):
                time.sleep(0.2)
            machines.disconnect()
            times.append(time.monotonic())
            for process in processes:
                process.wait(300)
                times.append(time.monotonic())

        codes, outputs = launch_on_both_machines(
            machines, script, folder, find_free_port(), build_flags_command, 600, during
        )
    logger.info(
        "cut: exit codes %s after %s s\n%s",
        codes,
        [round(end - times[0]) for end in times[1:]],
        "\n-----\n".join(text[-2500:] for text in outputs),
    )
    logger.info("states: %s", [path.name for path in folder.glob("*-state")])


def main(names: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as temporary_folder:
        work = Path(temporary_folder)
        dataset = write_images(work / "data", {(96, 64): 5, (64, 64): 3})
        cases = {
            "plain": lambda: compare_with_one_machine(work, dataset, "plain"),
            "file": lambda: compare_with_one_machine(work, dataset, "file", launcher=build_config_file_launcher(work)),
            "elastic": lambda: compare_with_one_machine(work, dataset, "elastic", launcher=build_torchrun_command),
            "rate": lambda: compare_with_one_machine(work, dataset, "rate", rate="20mbit"),
            "latency": lambda: compare_with_one_machine(work, dataset, "latency", delay=0.01),
            "wrong": lambda: train_over_loopback(work, dataset),
            "cut": lambda: disconnect_while_training(work, dataset),
        }
        for case_name in names or cases:
            cases[case_name]()


if __name__ == "__main__":
    main(sys.argv[1:])
