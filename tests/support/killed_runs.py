"""Kill launched runs at random moments, resume them, and compare the result with an uninterrupted run.

``PYTHONPATH=. python tests/support/killed_runs.py "ZeRO 3" 6`` kills a ZeRO 3 run six times; with ``relay`` instead of a
name, each resume uses another strategy, with ``full relay`` another of those of ``--train full``.  Half of the kills
hit the launcher and all its processes at once, the other half one training process, so that the other ranks have to
detect the failure.
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
from typing import Any

import psutil
import torch
from rank_processes import find_free_port
from resumed_runs import read_metrics
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
SECONDS_TO_END = 120
SETTINGS = (
    "--pretrained_model_name_or_path",
    "random:flux:tiny",
    "--max_train_steps",
    str(STEPS),
    *(
        "--network_train_unet_only --network_dim 2 --learning_rate 1e-2 --optimizer_args eps=1e-4 "
        "--lr_scheduler cosine --lr_warmup_steps 3 --shuffle_caption --flip_aug --ema_decay 0.9 --seed 3 "
        "--save_every_n_steps 7 --save_state --save_last_n_steps_state 14 --validation_split 0.25 "
        "--validate_every_n_steps 10 --auto_resume --mixed_precision no --quiet --max_data_loader_n_workers 1"
    ).split(),
)


@dataclass(frozen=True)
class LaunchCase:
    """How a run is launched; four images per step."""

    ranks: int
    launcher: tuple[str, ...]
    options: tuple[str, ...] = ()

    def build_command(self) -> list[str]:
        accelerate, batch = str(Path(sys.executable).parent / "accelerate"), str(4 // self.ranks)
        return [
            accelerate,
            "launch",
            *self.launcher,
            "--num_processes",
            str(self.ranks),
            *"--num_machines 1 --mixed_precision no --dynamo_backend no".split(),
            "--main_process_port",
            str(find_free_port()),
            str(ROOT / "train_lora.py"),
            *SETTINGS,
            "--train_batch_size",
            batch,
            *self.options,
        ]


FULL = ("--train", "full", "--learning_rate", "1e-3")
FSDP = ("--use_fsdp", "--fsdp_version", "2")
ZERO = ("--use_deepspeed", "--zero_stage")
LAUNCH_CASES: Mapping[str, LaunchCase] = {
    "DDP": LaunchCase(2, ("--multi_gpu",)),
    "FSDP": LaunchCase(2, FSDP),
    "HSDP": LaunchCase(4, FSDP, ("--dp_replicate_size", "2")),
    "ZeRO 1": LaunchCase(2, (*ZERO, "1")),
    "ZeRO 2": LaunchCase(2, (*ZERO, "2")),
    "ZeRO 3": LaunchCase(2, (*ZERO, "3")),
    "ZeRO 3 in host memory": LaunchCase(
        2, (*ZERO, "3", "--offload_optimizer_device", "cpu", "--offload_param_device", "cpu")
    ),
    "full": LaunchCase(1, (), FULL),
    "full, FSDP": LaunchCase(2, FSDP, FULL),
    "full, ZeRO 3": LaunchCase(2, (*ZERO, "3"), FULL),
}


def start_run(case: LaunchCase, data: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """Start or resume the run in ``folder``; its output is appended to a log file beside the folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "MASTER_"))}
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(
            [*case.build_command(), "--dataset_config", str(data), "--output_dir", str(folder)],
            start_new_session=True,
            stdout=log,
            stderr=log,
            env=environment | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        )


def kill_processes(run: "subprocess.Popen[bytes]", victims: Sequence[psutil.Process]) -> None:
    """Kill these processes, and wait until the others exit by themselves."""
    for victim in victims:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass
    run.wait(SECONDS_TO_END)
    running = [process for process in victims if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    psutil.wait_procs(running, timeout=10)


def train_and_kill(victims: tuple[int, ...], killed_at: int, *build_flags: str) -> None:
    """Train, and kill these ranks between the backward pass and the optimizer step after ``killed_at`` steps.

    The checkpoint before that step is written first, which on a slow machine takes longer than a step.
    """
    from library.training import nan_and_oom_handling
    from library.training.checkpoint import SaveCheckpoint

    should_step = nan_and_oom_handling.NanGuard.should_step

    def kill_or_check(guard, run, batches, metrics) -> bool:
        if run.state.step == killed_at and run.strategy.comm.rank in victims:
            for callback in run.callbacks:
                if isinstance(callback, SaveCheckpoint):
                    callback._join_writer()
            os.kill(os.getpid(), signal.SIGKILL)
        return should_step(guard, run, batches, metrics)

    nan_and_oom_handling.NanGuard.should_step = kill_or_check
    train(*build_flags)


def list_processes(run: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]


def list_rank_processes(run: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The training processes, without their workers."""
    return [child for child in psutil.Process(run.pid).children() if "RANK" in child.environ()]


def count_logged_steps(folder: Path) -> int:
    try:
        return sum("loss/current" in line for line in read_metrics(folder))
    except (OSError, ValueError):
        return 0


def train_with_kills(
    names: Iterator[str], data: Path, folder: Path, kills: int, max_seconds: float, random_state: random.Random
) -> None:
    """Start, kill and resume, each time with the next launch case, until the run is complete."""
    folder.mkdir()
    while kills:
        name, steps_before = next(names), count_logged_steps(folder)
        run, start = start_run(LAUNCH_CASES[name], data, folder), time.monotonic()
        limit = random_state.uniform(0, max_seconds) if random_state.random() < 0.2 else 600
        most = (STEPS - steps_before) // (kills + 1)  # so that all kills hit the run before it is complete
        steps = steps_before + random_state.randint(1, max(1, most))
        while run.poll() is None and time.monotonic() - start < limit and count_logged_steps(folder) < steps:
            time.sleep(0.02)
        time.sleep(random_state.uniform(0, 0.5))
        if run.poll() is not None:
            _assert_success(run, folder)
            print_line(f"  complete before it could be killed, after {time.monotonic() - start:.1f} s")
            return
        ranks = list_rank_processes(run)
        one_process = bool(ranks) and random_state.random() < 0.5
        kill_processes(run, [random_state.choice(ranks)] if one_process else list_processes(run))
        kills -= 1
        states = sorted(path.name for path in folder.glob("*-state"))
        print_line(
            f"  {name}: killed {'one process' if one_process else 'all'} at step {count_logged_steps(folder)};"
            f" {states[-1] if states else 'no state'}, {len(list(folder.glob('.lora*')))} leftovers"
        )
    name = next(names)
    run = start_run(LAUNCH_CASES[name], data, folder)
    run.wait(600)
    print_line(f"  {name}: completed")
    _assert_success(run, folder)


def _assert_success(run: "subprocess.Popen[bytes]", folder: Path) -> None:
    if run.returncode:
        raise AssertionError((folder.parent / f"{folder.name}.log").read_text()[-4000:])


def compare(expected: Path, actual: Path) -> tuple[float, bool, bool]:
    """The largest difference of what is trained and its EMA, and whether checkpoint and all metrics are equal bits."""
    max_difference = max(
        max_relative_difference(_read_tensors(expected, name), _read_tensors(actual, name))
        for name in ("lora", "lora-ema")
    )
    expected_state, actual_state = (_read_tensors(folder, "lora-state") for folder in (expected, actual))
    same_state = expected_state.keys() == actual_state.keys() and all(
        torch.equal(expected_state[key], actual_state[key]) for key in expected_state
    )
    expected_lines, actual_lines = read_metrics(expected), read_metrics(actual)
    if (expected / "lora").is_dir():  # full training logs how far weights moved since the run was resumed
        expected_lines = [_drop_update_norms(line) for line in expected_lines]
        actual_lines = [_drop_update_norms(line) for line in actual_lines]
    return max_difference, same_state, expected_lines == actual_lines


def _drop_update_norms(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("update/")}


def _read_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Read a file of tensors, or all of those in a folder: a whole model, or a checkpoint with the parts of ranks."""
    paths = [folder / f"{name}.safetensors"] if (folder / f"{name}.safetensors").exists() else []
    paths = paths or sorted((folder / name).rglob("*.safetensors"))
    assert paths, f"{folder / name} has no tensors"
    return {f"{path.relative_to(folder)}/{key}": each for path in paths for key, each in load_file(path).items()}


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(name: str, kills: int, seed: int) -> None:
    random_state, work_folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="kills-"))
    data = write_images(work_folder / "data", {(96, 64): 9, (64, 96): 6})
    reference = {"relay": "DDP", "full relay": "full"}.get(name, name)
    start, uninterrupted = time.monotonic(), work_folder / "whole"
    uninterrupted.mkdir()
    run = start_run(LAUNCH_CASES[reference], data, uninterrupted)
    run.wait(900)
    _assert_success(run, uninterrupted)
    seconds = time.monotonic() - start
    print_line(f"{name}: {seconds:.1f} s uninterrupted; {work_folder}")

    def iter_names() -> Iterator[str]:
        names = [name]
        if name.endswith("relay"):
            cases = [each for each in LAUNCH_CASES if each.startswith("full") == name.startswith("full")]
            names = random_state.sample(cases, len(cases))
        while True:
            yield from names

    train_with_kills(iter_names(), data, work_folder / "killed", kills, seconds, random_state)
    max_difference, same_state, same_metrics = compare(uninterrupted, work_folder / "killed")
    print_line(
        f"{name}: max. difference {max_difference:.1e}, checkpoint {'equal' if same_state else 'differs'},"
        f" metrics {'equal' if same_metrics else 'differ'}"
    )
    if max_difference == 0:
        shutil.rmtree(work_folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
