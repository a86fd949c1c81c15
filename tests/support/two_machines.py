"""Two machines on a good, slow, high-latency and cut network; run by hand: tests/support/two_machines.py [NAME]."""

import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch
from network_namespaces import Launcher, Machines, accelerate_launch, by_flags, launch
from rank_processes import free_port, on_ranks
from safetensors.torch import load_file
from training_runs import pictures, train

SETTINGS = (
    "--pretrained_model_name_or_path random:sd1:tiny --max_train_steps 12 --network_dim 16 --learning_rate 1e-2 "
    "--train_batch_size 2 --mixed_precision no --max_data_loader_n_workers 0 --seed 3"
).split()
SECONDS_UNTIL_IT_TRAINS = 240.0
logger = logging.getLogger("two_machines")


FILE = """\
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


def by_file(folder: Path) -> Launcher:
    """What ``accelerate config`` writes, the same on all machines, with the machine's number as a flag."""

    def launcher(machine: int, address: str, port: int) -> list[str]:
        path = folder / "cluster.yaml"
        path.write_text(FILE.format(address=address, port=port))
        return [*accelerate_launch(), "--config_file", str(path), "--machine_rank", str(machine)]

    return launcher


def by_torchrun(machine: int, address: str, port: int) -> list[str]:
    """Machines that find their numbers themselves."""
    flags = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id 7 --rdzv_endpoint {address}:{port}"
    return [str(Path(sys.executable).parent / "torchrun"), *flags.split()]


def compared(
    work: Path, dataset: Path, name: str, rate: str = "", delay: float = 0.0, launcher: Launcher = by_flags
) -> None:
    """A run on both against one on one machine with two processes."""
    whole = work / "one_machine"
    if not whole.exists():
        on_ranks(2, train, "--dataset_config", str(dataset), *SETTINGS, "--output_dir", str(whole))
    folder = work / name
    folder.mkdir()
    script = ["train_lora.py", "--dataset_config", str(dataset), *SETTINGS, "--output_dir", str(folder)]
    began = time.monotonic()
    with Machines(rate, delay) as machines:
        codes, texts = launch(machines, script, folder, free_port(), launcher, 480)
        sent = [machines.sent(machine) for machine in (0, 1)]
    if codes != [0, 0]:
        logger.info("%s: exit codes %s\n%s", name, codes, "\n".join(texts))
        return
    one, other = load_file(whole / "lora.safetensors"), load_file(folder / "lora.safetensors")
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    told = [line.partition("  ")[2] for line in texts[0].splitlines() if " MB " in line or "machines" in line]
    lines = [json.loads(line) for line in (folder / "lora.metrics.jsonl").read_text("utf-8").splitlines()]
    speed = [line["speed/steps_per_second"] for line in lines if "speed/steps_per_second" in line][-1]
    told.append(f"{speed:.2f} steps in a second")
    logger.info(
        "%s: %.0f s, equal to the bit: %s, bytes sent %s\n  %s",
        name,
        time.monotonic() - began,
        same,
        sent,
        "\n  ".join(told),
    )


def wrong(work: Path, dataset: Path) -> None:
    """Both talk to themselves, over the network that is no network; what they say of it."""
    folder = work / "wrong"
    folder.mkdir()
    script = ["train_lora.py", "--dataset_config", str(dataset), *SETTINGS, "--output_dir", str(folder)]
    began = time.monotonic()
    with Machines() as machines:
        machines.interface = "lo"
        codes, texts = launch(machines, script, folder, free_port(), by_flags, 240)
    logger.info("wrong: exit codes %s after %.0f s", codes, time.monotonic() - began)
    for text in texts:
        at = text.find("cannot connect")
        logger.info("%s", text[max(0, at - 200) : at + 900] if at >= 0 else text[-900:])


def cut(work: Path, dataset: Path) -> None:
    """The cable is cut while both train; when and how both end."""
    folder = work / "cut"
    folder.mkdir()
    script = [
        "train_lora.py",
        "--dataset_config",
        str(dataset),
        *SETTINGS,
        "--max_train_steps",
        "100000",
        "--ddp_timeout",
        "1",
        "--output_dir",
        str(folder),
    ]
    at = []
    with Machines() as machines:

        def during(processes: list) -> None:
            metrics, deadline = folder / "lora.metrics.jsonl", time.monotonic() + SECONDS_UNTIL_IT_TRAINS
            while time.monotonic() < deadline and not (metrics.is_file() and metrics.stat().st_size > 2000):
                time.sleep(0.2)
            machines.cut()
            at.append(time.monotonic())
            for process in processes:
                process.wait(300)
                at.append(time.monotonic())

        codes, texts = launch(machines, script, folder, free_port(), by_flags, 600, during)
    logger.info(
        "cut: exit codes %s after %s s\n%s",
        codes,
        [round(end - at[0]) for end in at[1:]],
        "\n-----\n".join(text[-2500:] for text in texts),
    )
    logger.info("states: %s", [path.name for path in folder.glob("*-state")])


def main(wanted: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        dataset = pictures(work / "data", {(96, 64): 5, (64, 64): 3})
        ways = {
            "plain": lambda: compared(work, dataset, "plain"),
            "file": lambda: compared(work, dataset, "file", launcher=by_file(work)),
            "elastic": lambda: compared(work, dataset, "elastic", launcher=by_torchrun),
            "rate": lambda: compared(work, dataset, "rate", rate="20mbit"),
            "latency": lambda: compared(work, dataset, "latency", delay=0.01),
            "wrong": lambda: wrong(work, dataset),
            "cut": lambda: cut(work, dataset),
        }
        for way in wanted or ways:
            ways[way]()


if __name__ == "__main__":
    main(sys.argv[1:])
