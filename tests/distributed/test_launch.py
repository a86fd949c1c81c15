"""Launched processes: as many as requested, with the settings that the doctor predicts."""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launcher_cases import check_launch_command, use_environment, write_accelerate_config
from rank_processes import find_free_port

from library.tools.launch import MeetingPoint, find_meeting_point

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ACCELERATE, TORCHRUN = f"{BIN / 'accelerate'} launch", str(BIN / "torchrun")


SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from library.config import parse_config
from library.distributed.accelerator import prepare_accelerator
from library.distributed.launcher_settings import find_overridden_settings
from library.errors import UserError
loaded = parse_config(sys.argv[1:])
try:
    a = prepare_accelerator(loaded.config)
except UserError as error:
    sys.exit("STOPPED " + str(error))
total = a.reduce(torch.tensor(float(a.process_index + 1)), reduction="sum").item()
warnings = find_overridden_settings(loaded.config, loaded.locations)
layer = torch.nn.Linear(2, 2, device=a.device)
with a.autocast(): kind = str(layer(torch.ones(1, 2, device=a.device)).dtype)
result = dict(rank=a.process_index, size=a.num_processes, device=a.device.type, total=total, warnings=warnings,
              computes=kind, kind=a.distributed_type.value, precision=a.mixed_precision, folder=a.logging_dir)
sys.stdout.write("\\nRESULT " + json.dumps(result) + "\\n")
sys.stdout.flush()
a.wait_for_everyone()
a.end_training()
"""


@pytest.fixture
def start(tmp_path):
    """Start the script without the user's own settings; return the accelerator state of each rank, and the output."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(command: str, *arguments: str, **environment: str) -> tuple[list[dict], str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_"))}
        env = {**clean, "HF_HOME": str(tmp_path / "home"), **environment}
        words = [*shlex.split(command), str(tmp_path / "script.py"), *arguments]
        result = subprocess.run(words, cwd=tmp_path, timeout=90, env=env, capture_output=True, text=True)
        lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
        results = sorted((json.loads(line[7:]) for line in lines), key=lambda one: one["rank"])
        return results, result.stdout + result.stderr

    return run


def port() -> str:
    return f"--main_process_port {find_free_port()}"


def assert_two_ranks(results: list[dict], message: str) -> None:
    assert [(one["rank"], one["size"], one["total"], one["device"], one["kind"]) for one in results] == [
        (0, 2, 3.0, "cpu", "MULTI_CPU"),
        (1, 2, 3.0, "cpu", "MULTI_CPU"),
    ], message


def test_accelerate_launch_multi_gpu_starts_two_processes_with_one_logging_dir(start):
    command = f"{ACCELERATE} --multi_gpu --num_processes 2 --mixed_precision bf16 {port()}"
    results, message = start(command, "--logging_dir", "logs", ACCELERATE_USE_CPU="true")

    assert_two_ranks(results, message)
    assert results[0]["folder"] == results[1]["folder"] and results[0]["folder"].startswith("logs/2")
    assert {(one["precision"], one["computes"]) for one in results} == {("bf16", "torch.bfloat16")}


def test_torchrun_starts_two_processes(start):
    results, message = start(f"{TORCHRUN} --standalone --nproc_per_node 2")

    assert_two_ranks(results, message)


def test_num_processes_without_multi_gpu_stops_and_suggests_a_working_command(start, tmp_path):
    results, message = start(f"{ACCELERATE} --cpu --num_processes 2", "--seed", "3")
    (working,) = [line.strip() for line in message.splitlines() if line.strip().startswith("ACCELERATE_USE_CPU=true")]

    assert (
        results == []
        and "num_processes: 2 (accelerate launch --num_processes), but accelerate launch starts 1" in message
    )
    variable, command = working.split(" ", 1)
    command = command.replace("accelerate launch", f"{ACCELERATE} {port()}", 1).split(f" {tmp_path}")[0]
    assert working.endswith(f"{tmp_path / 'script.py'} --seed 3")
    assert_two_ranks(*start(command, "--seed", "3", **dict([variable.split("=")])))


def test_a_config_file_with_several_cpu_processes_stops_too(start, tmp_path):
    path = write_accelerate_config(tmp_path / "home", distributed_type="MULTI_CPU", num_processes=2, use_cpu=True)
    results, message = start(ACCELERATE)

    assert results == [] and f"num_processes: 2 ({path}), but accelerate launch starts 1" in message


def test_gradient_accumulation_set_only_for_accelerate_stops(start):
    results, message = start(f"{ACCELERATE} --gradient_accumulation_steps 4")

    assert (
        results == []
        and "STOPPED gradient_accumulation_steps: 4 (accelerate launch --gradient_accumulation_steps)" in message
    )
    results, message = start(sys.executable, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    assert results == [] and "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 4" in message


def test_fp16_on_a_cpu_is_refused_or_warned_about(start):
    results, message = start(sys.executable, "--mixed_precision", "fp16")
    assert results == [] and "STOPPED --mixed_precision fp16: not supported on a CPU" in message

    results, message = start(f"{ACCELERATE} --mixed_precision fp16")
    assert [(one["precision"], one["computes"]) for one in results] == [("no", "torch.float32")], message
    assert any("not supported on a CPU; training uses fp32" in line for line in results[0]["warnings"])


LAUNCHED_FOR_REAL = [
    ("", "bf16", ""),
    ("bf16", "no", "no"),
    ("no", "bf16", ""),
    pytest.param("bf16", "", "", marks=pytest.mark.slow),
    pytest.param("", "no", "bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("flag", "file", "code"), LAUNCHED_FOR_REAL)
def test_a_launched_accelerator_has_what_the_doctor_predicts(flag, file, code, start, tmp_path, monkeypatch):
    use_environment(monkeypatch, tmp_path / "home")
    if file:
        write_accelerate_config(tmp_path / "home", mixed_precision=file)
    flags, arguments = f"--mixed_precision {flag}" if flag else "", ["--mixed_precision", code] if code else []
    results, message = start(f"{ACCELERATE} {flags}", *arguments)
    command = shlex.join([*f"accelerate launch {flags}".split(), "script.py", *arguments])
    setting = check_launch_command(command)[0]["mixed_precision"]

    assert [one["precision"] for one in results] == [setting.value], message
    assert results[0]["computes"] == {"no": "torch.float32", "bf16": "torch.bfloat16"}[setting.value]
    sources = {"--mixed": code, "accelerate launch": flag, str(tmp_path): file}
    present = [(location, value) for location, value in sources.items() if value]
    assert setting.source.startswith(present[0][0]) and len(setting.overridden) == len(present) - 1
    # A launch flag may override accelerate's file; our option in addition to either is refused.
    disagree = bool(code) and len({value for _, value in present}) > 1
    assert ([setting.warning] if disagree else []) == results[0]["warnings"]


WATCHED = f"""
import logging, sys
sys.path.insert(0, {str(ROOT)!r})
from library.tools import launch
launch.WATCH_INTERVAL_SECONDS = 2
logging.basicConfig(format="%(message)s")
sys.exit(launch.run_launch(sys.argv[1:])[1])
"""


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        (ACCELERATE, "--multi_gpu --num_machines 2 --num_processes 2 --main_process_ip 127.0.0.1 --main_process_port"),
        (TORCHRUN, "--nnodes 2 --nproc_per_node 1 --master_addr 127.0.0.1 --master_port"),
    ],
)
def test_machines_that_have_not_joined_are_named_until_they_come(launcher, flags, start_watched):
    port = find_free_port()
    rank = "machine_rank" if launcher == ACCELERATE else "node_rank"
    second = start_watched(f"{launcher} {flags} {port} --{rank} 1")
    line = f"machine 1 of 2: nothing answers at 127.0.0.1:{port} (Connection refused); is machine 0 started"
    assert second.read_until("machine 1").startswith(line)
    second.stop()
    port = find_free_port()  # nothing of the first attempt is left there
    first = start_watched(f"{launcher} {flags} {port} --{rank} 0")
    line = f"machine 0 of 2 waits at 127.0.0.1:{port}: machine 1 has not joined yet"
    assert first.read_until("machine 0 of 2 waits").startswith(line)
    second = start_watched(f"{launcher} {flags} {port} --{rank} 1")
    assert [machine.process.wait(60) for machine in (first, second)] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_meeting_point_is_found_while_the_launcher_listens_there(rank):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        flags = f"--multi_gpu --num_machines 3 --num_processes 6 --main_process_ip 127.0.0.1 --main_process_port {port}"
        command = f"{ACCELERATE} {flags} --machine_rank {rank} train_lora.py"
        assert find_meeting_point(shlex.split(command)) == MeetingPoint("127.0.0.1", port, 3, rank)


def test_machines_of_a_c10d_rendezvous_have_no_number(start_watched):
    port = find_free_port()
    flags = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id 7 --rdzv_endpoint 127.0.0.1:{port}"
    first = start_watched(f"{TORCHRUN} {flags}")
    line = first.read_until("one of 2 machines waits")
    assert "1 machine has not joined yet (joined: 127.0.0.1); start the same command there\n" in line
    second = start_watched(f"{TORCHRUN} {flags}")
    assert [machine.process.wait(60) for machine in (first, second)] == [0, 0]


class WatchedLauncher:
    """A launcher under ``library launch``."""

    def __init__(self, words: list[str], environment: dict[str, str]):
        command = [sys.executable, "-c", WATCHED, *words]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def read_until(self, start: str) -> str:
        """Return the first line that begins like this; a launcher that prints none is stopped after two minutes."""
        lines = []
        timer = threading.Timer(120, self.process.terminate)
        timer.start()
        for line in self.process.stderr:
            if line.startswith(start):
                timer.cancel()
                return line
            lines.append(line)
        raise AssertionError(f"no line starts with {start}: {''.join(lines)}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=60)


@pytest.fixture
def start_watched(tmp_path):
    """Start a launcher of a script that does nothing; stop it at the end."""
    (tmp_path / "script.py").write_text("")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_"))}
    environment = {**clean, "HF_HOME": str(tmp_path / "home"), "ACCELERATE_USE_CPU": "true"}
    started: list[WatchedLauncher] = []

    def start(command: str) -> WatchedLauncher:
        started.append(WatchedLauncher([*shlex.split(command), str(tmp_path / "script.py")], environment))
        return started[-1]

    yield start
    for launcher in started:
        launcher.stop()
