"""On a signal a run finishes its step and saves a checkpoint; the resumed run equals an uninterrupted one."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from socket import gethostname

import psutil
import pytest
import torch
from filelock import SoftFileLease
from launched_runs import ROOT, settings, start_run, wait_for_exit, wait_until_training
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import train

from library.errors import UserError
from library.training import output_lock
from library.training.output_lock import hold_output_lock

__all__ = ["settings"]  # a fixture

ACCELERATE = str(Path(sys.executable).parent / "accelerate")


@pytest.mark.parametrize(
    ("ranks", "number", "flags", "code"),
    [
        (1, signal.SIGUSR1, ["--requeue_exit_code", "75"], 75),
        (2, signal.SIGTERM, ["--requeue_exit_code", "75"], 75),
    ],
)
def test_resume_after_a_signal_gives_equal_weights(settings, tmp_path, ranks, number, flags, code):
    """The signal goes to every process, as a scheduler sends it; ``library launch`` returns the exit code of training."""
    wrapper = () if ranks == 1 else (sys.executable, "-m", "library", "launch")
    first = start_run(ranks, settings, tmp_path / "ended", *flags, wrapper=wrapper)
    wait_until_training(first, tmp_path / "ended")
    for process in [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]:
        process.send_signal(number)
    exit_code, output = wait_for_exit(first)

    assert exit_code == code, output
    (state,) = (tmp_path / "ended").glob("lora-step*-state")
    assert f"{number.name} after step" in output and str(state) in output
    assert output.count("the same command with --auto_resume") == 1
    assert not (tmp_path / "ended" / "lora.safetensors").exists()

    for folder in ("whole", "ended"):
        run_on_ranks(ranks, train, *settings, "--output_dir", str(tmp_path / folder), "--auto_resume")
    expected, actual = (load_file(tmp_path / name / "lora.safetensors") for name in ("whole", "ended"))
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


def wait_and_kill(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until these processes end, and kill and return those that do not."""
    _, still_running = psutil.wait_procs(processes, timeout=60)
    for process in still_running:
        process.kill()
    return still_running


@pytest.mark.parametrize(("ranks", "launcher"), [(1, "accelerate launch"), (2, "torchrun"), (2, "library launch")])
def test_ranks_save_a_checkpoint_and_end_when_their_launcher_is_killed(settings, tmp_path, ranks, launcher):
    wrapper = {
        "accelerate launch": (ACCELERATE, "launch", "--cpu", "--num_processes", "1", "--no_python"),
        "torchrun": (),
        "library launch": (sys.executable, "-m", "library", "launch"),
    }[launcher]
    run = start_run(ranks, settings, tmp_path, "--max_train_steps", "100000", wrapper=wrapper)
    wait_until_training(run, tmp_path)
    others = psutil.Process(run.pid).children(recursive=True)
    assert len(others) >= ranks
    run.kill()
    still_running = wait_and_kill(others)
    output = run.communicate()[0]

    assert not still_running, output
    (state,) = tmp_path.glob("lora-step*-state")
    # The rank that reports the end may have heard of it from the other one.
    assert "has died" in output and "after step" in output and str(state) in output, output


def test_processes_end_at_once_when_their_launcher_is_killed_before_training(settings, tmp_path):
    run = start_run(2, settings, tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / ".lora.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    others = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    still_running = wait_and_kill(others)
    assert others and not still_running, run.communicate()[0]


def test_the_end_of_a_shell_or_scheduler_that_started_the_launcher_ends_nothing():
    script = "import time; from library.distributed.launcher_monitor import find_launchers; print(find_launchers())"
    for command in ([sys.executable, "-c", script], ["sh", "-c", shlex.join([sys.executable, "-c", script])]):
        assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_second_run_with_the_same_output_name_is_refused_until_the_first_is_dead(settings, tmp_path):
    first = start_run(1, settings, tmp_path, "--max_train_steps", "100000")
    wait_until_training(first, tmp_path)
    code, output = wait_for_exit(start_run(1, settings, tmp_path))
    assert code == 2 and f"is writing to {tmp_path} with this output_name: process {first.pid} on" in output, output
    code, output = wait_for_exit(start_run(1, settings, tmp_path, "--output_name", "other", "--max_train_steps", "1"))
    assert code == 0, output

    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert (tmp_path / ".lora.lock").is_file()
    code, output = wait_for_exit(start_run(1, settings, tmp_path, "--max_train_steps", "1"))
    assert code == 0 and not list(tmp_path.glob(".*lock*")), output


def write_lock(folder: Path, pid: int, host: str) -> Path:
    """Write a lock file as filelock does, with the lease duration of ``short_leases``."""
    path = folder / ".a.lock"
    path.write_text(f"filelock/2\npid={pid}\nhost={host}\nmode=lease\ntoken=x\nduration=1.0\n")
    return path


@pytest.fixture
def short_leases(monkeypatch):
    monkeypatch.setattr(output_lock, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(output_lock, "HEARTBEAT_SECONDS", 0.2)


def get_host_name(folder: Path) -> str:
    lease = SoftFileLease(folder / "own")
    with lease:
        return lease.owner.hostname


def test_a_lock_has_one_owner_and_its_file_is_removed(short_leases, tmp_path):
    with hold_output_lock(tmp_path, "a"):
        with pytest.raises(UserError, match=f"process {os.getpid()} on {gethostname()}\\."):
            with hold_output_lock(tmp_path, "a"):
                pass
        assert (tmp_path / ".a.lock").is_file()
        with hold_output_lock(tmp_path, "b"):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["another host", "this host, in another container"])
def test_a_lock_of_another_host_is_valid_while_its_owner_refreshes_it(short_leases, host, tmp_path):
    host_name = get_host_name(tmp_path).partition("?")[0]
    lock_host = "elsewhere" if host == "another host" else f"{host_name}?pidns-f0000001"
    lock, stop = write_lock(tmp_path, 2**22 + 1, lock_host), threading.Event()

    def refresh() -> None:
        while not stop.wait(0.2):
            os.utime(lock)

    owner = threading.Thread(target=refresh)
    owner.start()
    try:
        with pytest.raises(UserError, match=f"process {2**22 + 1} on {lock_host.partition('?')[0]}"):
            with hold_output_lock(tmp_path, "a"):
                pass
    finally:
        stop.set()
        owner.join()
    start = time.monotonic()
    with hold_output_lock(tmp_path, "a"):
        assert time.monotonic() - start >= 1.0


def test_the_lock_of_a_dead_process_on_this_machine_is_taken_at_once(short_leases, tmp_path, caplog):
    write_lock(tmp_path, 2**22 + 1, get_host_name(tmp_path))
    caplog.set_level("INFO")
    with hold_output_lock(tmp_path, "a"):
        assert "heartbeat" not in caplog.text


def test_a_lock_taken_over_by_another_run_is_reported(short_leases, tmp_path, caplog):
    with hold_output_lock(tmp_path, "a"):
        (tmp_path / ".a.lock").unlink()
        successor = write_lock(tmp_path, 1, "elsewhere")
        deadline = time.monotonic() + 10
        while "the lock was lost (owner-changed)" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "another run may write files of the same name" in caplog.text
    assert successor.is_file()


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    script = (
        "import os, signal, time; from library.distributed import signals; signals.DUPLICATE_SIGNAL_SECONDS = 0.2\n"
        "with signals.StopSignals() as signals_:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)\n"
        "    print(signals_.received, flush=True); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGTERM and result.stdout == "15\n"
    assert "SIGTERM: finishing this step, then saving a checkpoint" in result.stderr


def start_launcher(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "library", "launch", *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_launch_passes_on_output_exit_code_and_signal_handlers():
    assert wait_for_exit(start_launcher(sys.executable, "-c", "print('a b'); raise SystemExit(7)")) == (7, "a b\n")
    script = "import signal; print(*(int(signal.getsignal(n) == signal.SIG_IGN) for n in (15, signal.SIGUSR1)))"
    assert wait_for_exit(start_launcher(sys.executable, "-c", script)) == (
        0,
        "0 1\n",
    )  # SIGUSR1 would kill it by default
    code, output = wait_for_exit(start_launcher("no-such-launcher", "x"))
    assert code == 2 and "no-such-launcher: cannot be started" in output
    code, output = wait_for_exit(start_launcher())
    assert code == 2 and "usage: python -m library launch" in output


def test_a_signal_before_training_ends_the_launcher():
    start = time.monotonic()
    process = start_launcher(sys.executable, "-c", "import time; print('up', flush=True); time.sleep(30)")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGUSR1)
    assert wait_for_exit(process)[0] == 128 + signal.SIGUSR1 and time.monotonic() - start < 25


def test_a_signal_is_forwarded_to_the_training_process_and_its_exit_code_is_returned():
    script = (
        "import time; from library.distributed.signals import StopSignals, report_exit_code\n"
        "with StopSignals() as signals:\n"
        "    print('up', flush=True)\n"
        "    while signals.received is None: time.sleep(0.02)\n"
        "    raise SystemExit(report_exit_code(60 + signals.received))\n"
    )
    process = start_launcher("sh", "-c", f'{shlex.join([sys.executable, "-c", script])}; echo "code $?"; exit 1')
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGTERM)
    code, output = wait_for_exit(process)
    assert code == 75 and output.endswith("code 0\n")


def test_a_signal_from_before_training_is_received_at_its_start(tmp_path, monkeypatch):
    from library.distributed import signals

    monkeypatch.setenv(signals.SUPERVISOR_DIR, str(tmp_path))
    with signals.StopSignals() as stop_signals:
        assert stop_signals.received is None
    (tmp_path / signals.SIGNAL_FILE).write_text("15")
    with signals.StopSignals() as stop_signals:
        assert stop_signals.received == signal.SIGTERM
    assert (tmp_path / f"{signals.PROCESS_PREFIX}{os.getpid()}").is_file()
    assert signals.report_exit_code(75) == 0 and (tmp_path / signals.EXIT_CODE_FILE).read_text() == "75"
    monkeypatch.delenv(signals.SUPERVISOR_DIR)
    assert signals.report_exit_code(75) == 75
