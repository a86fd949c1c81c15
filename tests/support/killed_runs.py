"""Launched runs are killed at random moments and go on; what comes out is compared with the run that nobody killed.

``PYTHONPATH=. python tests/support/killed_runs.py "ZeRO 3" 6`` kills one way of spreading six times; ``relay`` in the place of a name
goes on in another way after each kill.  Half of the kills take the launcher and all its processes at once, the other
half a single process, so that the others have to see for themselves.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rank_processes import free_port
from resumed_runs import figures
from safetensors.torch import load_file
from training_runs import difference, pictures

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
SECONDS_TO_END = 120
SETTINGS = (
    "--pretrained_model_name_or_path",
    "random:flux:tiny",
    "--max_train_steps",
    str(STEPS),
    "--network_dim",
    "2",
    "--learning_rate",
    "1e-2",
    "--optimizer_args",
    "eps=1e-4",
    "--lr_scheduler",
    "cosine",
    "--lr_warmup_steps",
    "3",
    "--shuffle_caption",
    "--flip_aug",
    "--ema_decay",
    "0.9",
    "--seed",
    "3",
    "--save_every_n_steps",
    "7",
    "--save_state",
    "--save_last_n_steps_state",
    "14",
    "--validation_split",
    "0.25",
    "--validate_every_n_steps",
    "10",
    "--auto_resume",
    "--mixed_precision",
    "no",
    "--quiet",
    "--max_data_loader_n_workers",
    "1",
)


@dataclass(frozen=True)
class Way:
    """How a run is launched; four pictures a step."""

    ranks: int
    launcher: tuple[str, ...]
    own: tuple[str, ...] = ()

    def command(self) -> list[str]:
        accelerate, batch = str(Path(sys.executable).parent / "accelerate"), str(4 // self.ranks)
        return [
            accelerate,
            "launch",
            *self.launcher,
            "--num_processes",
            str(self.ranks),
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            str(free_port()),
            str(ROOT / "train_lora.py"),
            *SETTINGS,
            "--train_batch_size",
            batch,
            *self.own,
        ]


FSDP = ("--use_fsdp", "--fsdp_version", "2")
ZERO = ("--use_deepspeed", "--zero_stage")
WAYS: Mapping[str, Way] = {
    "DDP": Way(2, ("--multi_gpu",)),
    "FSDP": Way(2, FSDP),
    "HSDP": Way(4, FSDP, ("--dp_replicate_size", "2")),
    "ZeRO 1": Way(2, (*ZERO, "1")),
    "ZeRO 2": Way(2, (*ZERO, "2")),
    "ZeRO 3": Way(2, (*ZERO, "3")),
    "ZeRO 3 in host memory": Way(2, (*ZERO, "3", "--offload_optimizer_device", "cpu", "--offload_param_device", "cpu")),
}


def start(way: Way, data: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """The run, beginning or going on in ``folder``; what it says is added to a file beside it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "MASTER_"))}
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(
            [*way.command(), "--dataset_config", str(data), "--output_dir", str(folder)],
            start_new_session=True,
            stdout=log,
            stderr=log,
            env=clean | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        )


def kill(run: "subprocess.Popen[bytes]", victims: Sequence[psutil.Process]) -> None:
    """Kill them, and see the others end by themselves."""
    for victim in victims:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass
    run.wait(SECONDS_TO_END)
    left = [each for each in victims if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    psutil.wait_procs(left, timeout=10)


def all_of(run: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]


def ranks_of(run: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The training processes, without their workers."""
    return [child for child in psutil.Process(run.pid).children() if "RANK" in child.environ()]


def steps_of(folder: Path) -> int:
    try:
        return sum("loss/current" in line for line in figures(folder))
    except (OSError, ValueError):
        return 0


def disturbed(ways: Iterator[str], data: Path, folder: Path, kills: int, longest: float, chance: random.Random) -> None:
    """Begin, kill and go on, each time in the next way, until the run is complete."""
    folder.mkdir()
    while kills:
        name, before = next(ways), steps_of(folder)
        run, began = start(WAYS[name], data, folder), time.monotonic()
        limit = chance.uniform(0, longest) if chance.random() < 0.2 else 600
        steps = before + chance.randint(1, STEPS // 5)
        while run.poll() is None and time.monotonic() - began < limit and steps_of(folder) < steps:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.5))
        if run.poll() is not None:
            _must_be_well(run, folder)
            say(f"  it was complete before it could be killed, after {time.monotonic() - began:.1f} s")
            return
        ranks = ranks_of(run)
        alone = bool(ranks) and chance.random() < 0.5
        kill(run, [chance.choice(ranks)] if alone else all_of(run))
        kills -= 1
        states = sorted(path.name for path in folder.glob("*-state"))
        say(
            f"  {name}: killed {'one process' if alone else 'all'} at step {steps_of(folder)};"
            f" {states[-1] if states else 'no state'}, {len(list(folder.glob('.lora*')))} leftovers"
        )
    name = next(ways)
    run = start(WAYS[name], data, folder)
    run.wait(600)
    say(f"  {name}: to the end")
    _must_be_well(run, folder)


def _must_be_well(run: "subprocess.Popen[bytes]", folder: Path) -> None:
    if run.returncode:
        raise AssertionError((folder.parent / f"{folder.name}.log").read_text()[-4000:])


def compare(whole: Path, found: Path) -> tuple[float, bool, bool]:
    """How far adapter and average are apart at most, and whether the state and all figures are the same to the bit."""
    names = ("lora.safetensors", "lora-ema.safetensors")
    apart = max(difference(load_file(whole / name), load_file(found / name)) for name in names)
    one, other = (load_file(folder / "lora-state" / "tensors.safetensors") for folder in (whole, found))
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return apart, same, figures(whole) == figures(found)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(name: str, kills: int, seed: int) -> None:
    chance, work = random.Random(seed), Path(tempfile.mkdtemp(prefix="kills-"))
    data = pictures(work / "data", {(96, 64): 9, (64, 96): 6})
    own = name if name != "relay" else "DDP"
    began, whole = time.monotonic(), work / "whole"
    whole.mkdir()
    run = start(WAYS[own], data, whole)
    run.wait(900)
    _must_be_well(run, whole)
    longest = time.monotonic() - began
    say(f"{name}: {longest:.1f} s undisturbed; {work}")

    def ways() -> Iterator[str]:
        names = [name] if name != "relay" else chance.sample(list(WAYS), len(WAYS))
        while True:
            yield from names

    disturbed(ways(), data, work / "killed", kills, longest, chance)
    apart, same_state, same_figures = compare(whole, work / "killed")
    say(
        f"{name}: apart {apart:.1e}, state {'the same' if same_state else 'differs'},"
        f" figures {'the same' if same_figures else 'differ'}"
    )
    if apart == 0:
        shutil.rmtree(work)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
