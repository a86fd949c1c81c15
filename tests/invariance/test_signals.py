"""A run that is told to end finishes its step, keeps its state, and says how to go on; the next run goes on exactly."""

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

from library.checkpoint import output_lock
from library.checkpoint.output_lock import hold_output_lock
from library.errors import UserError

__all__ = ["settings"]  # a fixture


@pytest.mark.parametrize(
    ("ranks", "number", "words", "code"),
    [
        (1, signal.SIGUSR1, ["--requeue_exit_code", "75"], 75),
        (2, signal.SIGTERM, ["--requeue_exit_code", "75"], 75),
    ],
)
def test_a_signal_keeps_the_state_and_the_next_run_goes_on_exactly(settings, tmp_path, ranks, number, words, code):
    """As a scheduler sends it, to every process; the launcher, which reports 1, has one that watches over it."""
    under = () if ranks == 1 else (sys.executable, "-m", "library", "launch")
    first = start_run(ranks, settings, tmp_path / "ended", *words, wrapper=under)
    wait_until_training(first, tmp_path / "ended")
    for process in [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]:
        process.send_signal(number)
    found, text = wait_for_exit(first)

    assert found == code, text
    (state,) = (tmp_path / "ended").glob("lora-step*-state")
    assert f"{number.name} after step" in text and str(state) in text
    assert text.count("the same command with --auto_resume") == 1
    assert not (tmp_path / "ended" / "lora.safetensors").exists()

    for folder in ("whole", "ended"):
        run_on_ranks(ranks, train, *settings, "--output_dir", str(tmp_path / folder), "--auto_resume")
    one, other = (load_file(tmp_path / name / "lora.safetensors") for name in ("whole", "ended"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_second_run_in_the_same_folder_is_refused_and_a_dead_one_is_not_waited_for(settings, tmp_path):
    first = start_run(1, settings, tmp_path, "--max_train_steps", "100000")
    wait_until_training(first, tmp_path)
    code, text = wait_for_exit(start_run(1, settings, tmp_path))
    assert code == 2 and f"is writing to {tmp_path} with this output_name: process {first.pid} on" in text, text
    code, text = wait_for_exit(start_run(1, settings, tmp_path, "--output_name", "other", "--max_train_steps", "1"))
    assert code == 0, text

    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert (tmp_path / ".lora.lock").is_file()
    code, text = wait_for_exit(start_run(1, settings, tmp_path, "--max_train_steps", "1"))
    assert code == 0 and not list(tmp_path.glob(".*lock*")), text


def write_lock(folder: Path, pid: int, host: str) -> Path:
    """As filelock writes a lease of the length that ``short_leases`` sets."""
    path = folder / ".a.lock"
    path.write_text(f"filelock/2\npid={pid}\nhost={host}\nmode=lease\ntoken=x\nduration=1.0\n")
    return path


@pytest.fixture
def short_leases(monkeypatch):
    monkeypatch.setattr(output_lock, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(output_lock, "HEARTBEAT_SECONDS", 0.2)


def own_host(folder: Path) -> str:
    lease = SoftFileLease(folder / "own")
    with lease:
        return lease.owner.hostname


def test_a_lock_is_held_by_one_and_leaves_nothing(short_leases, tmp_path):
    with hold_output_lock(tmp_path, "a"):
        with pytest.raises(UserError, match=f"process {os.getpid()} on {gethostname()}\\."):
            with hold_output_lock(tmp_path, "a"):
                pass
        assert (tmp_path / ".a.lock").is_file()
        with hold_output_lock(tmp_path, "b"):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
@pytest.mark.parametrize("host", ["elsewhere", "this, in another container"])
def test_a_lock_from_elsewhere_holds_as_long_as_its_owner_refreshes_it(short_leases, host, tmp_path):
    own = own_host(tmp_path).partition("?")[0]
    name = host if host == "elsewhere" else f"{own}?pidns-f0000001"
    lock, is_over = write_lock(tmp_path, 2**22 + 1, name), threading.Event()

    def refresh() -> None:
        while not is_over.wait(0.2):
            os.utime(lock)

    owner = threading.Thread(target=refresh)
    owner.start()
    try:
        with pytest.raises(UserError, match=f"process {2**22 + 1} on {name.partition('?')[0]}"):
            with hold_output_lock(tmp_path, "a"):
                pass
    finally:
        is_over.set()
        owner.join()
    began = time.monotonic()
    with hold_output_lock(tmp_path, "a"):
        assert time.monotonic() - began >= 1.0


def test_the_lock_of_a_dead_process_on_this_machine_is_not_waited_for(short_leases, tmp_path, caplog):
    write_lock(tmp_path, 2**22 + 1, own_host(tmp_path))
    caplog.set_level("INFO")
    with hold_output_lock(tmp_path, "a"):
        assert "heartbeat" not in caplog.text


def test_a_lock_that_another_run_took_over_is_told(short_leases, tmp_path, caplog):
    with hold_output_lock(tmp_path, "a"):
        (tmp_path / ".a.lock").unlink()
        successor = write_lock(tmp_path, 1, "elsewhere")
        deadline = time.monotonic() + 10
        while "the lock was lost (owner-changed)" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "another run may write files of the same name" in caplog.text
    assert successor.is_file()


def test_a_second_signal_ends_at_once(tmp_path):
    script = (
        "import os, signal, time; from library.distributed import signals; signals.DUPLICATE_SIGNAL_SECONDS = 0.2\n"
        "with signals.StopSignals() as signals_:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)\n"
        "    print(signals_.received, flush=True); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM and done.stdout == "15\n"
    assert "SIGTERM: the step is finished" in done.stderr


def supervised(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "library", "launch", *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_a_launcher_that_nobody_ends_is_watched_without_a_trace():
    assert wait_for_exit(supervised(sys.executable, "-c", "print('a b'); raise SystemExit(7)")) == (7, "a b\n")
    heard = "import signal; print(*(int(signal.getsignal(n) == signal.SIG_IGN) for n in (15, signal.SIGUSR1)))"
    assert wait_for_exit(supervised(sys.executable, "-c", heard)) == (0, "0 1\n")  # it would die of SIGUSR1 at once
    code, text = wait_for_exit(supervised("no-such-launcher", "x"))
    assert code == 2 and "no-such-launcher: cannot be started" in text
    code, text = wait_for_exit(supervised())
    assert code == 2 and "usage: python -m library launch" in text


def test_before_anything_is_trained_the_launcher_is_ended():
    start = time.monotonic()
    process = supervised(sys.executable, "-c", "import time; print('up', flush=True); time.sleep(30)")
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
    process = supervised("sh", "-c", f'{shlex.join([sys.executable, "-c", script])}; echo "code $?"; exit 1')
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGTERM)
    code, text = wait_for_exit(process)
    assert code == 75 and text.endswith("code 0\n")


def test_a_signal_that_came_before_training_began_is_known_when_it_does(tmp_path, monkeypatch):
    from library.distributed import signals

    monkeypatch.setenv(signals.SUPERVISOR_DIR, str(tmp_path))
    with signals.StopSignals() as received:
        assert received.received is None
    (tmp_path / signals.SIGNAL_FILE).write_text("15")
    with signals.StopSignals() as received:
        assert received.received == signal.SIGTERM
    assert (tmp_path / f"{signals.PROCESS_PREFIX}{os.getpid()}").is_file()
    assert signals.report_exit_code(75) == 0 and (tmp_path / signals.EXIT_CODE_FILE).read_text() == "75"
    monkeypatch.delenv(signals.SUPERVISOR_DIR)
    assert signals.report_exit_code(75) == 75
