"""Where no process can send a signal to another one, as on Windows, files ask runs to stop."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from library.distributed import signals
from library.tools import launch
from library.web import jobs
from library.web.jobs import RUNNING, STOPPING, Job, JobQueue

ROOT = Path(__file__).resolve().parents[3]
TRAINING = """
import time
from library.distributed import signals
signals.can_send_signals = lambda: False
with signals.StopSignals() as stop:
    print("up", flush=True)
    while stop.received is None:
        time.sleep(0.02)
    raise SystemExit(signals.report_exit_code(60 + stop.received))
"""


@pytest.fixture
def without_signals(monkeypatch):
    for module in (signals, launch, jobs):
        monkeypatch.setattr(module, "can_send_signals", lambda: False)
    monkeypatch.setattr(signals, "WATCH_SECONDS", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def wait_until(is_true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true()


def test_a_file_asks_a_run_to_stop(without_signals, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(signals.STOP_FILE, str(tmp_path / ".mika.stop"))
    with signals.StopSignals() as stop:
        time.sleep(0.1)
        assert stop.received is None
        (tmp_path / ".mika.stop").touch()
        assert wait_until(lambda: stop.received == signal.SIGTERM)

    assert "finishing this step, then saving a checkpoint" in capfd.readouterr().err
    assert wait_until(lambda: "stop files" not in [thread.name for thread in threading.enumerate()])


def test_nothing_is_watched_where_signals_can_be_sent(tmp_path, monkeypatch):
    (tmp_path / ".mika.stop").touch()
    monkeypatch.setenv(signals.STOP_FILE, str(tmp_path / ".mika.stop"))
    with signals.StopSignals() as stop:
        time.sleep(0.1)
        assert stop.received is None and "stop files" not in [thread.name for thread in threading.enumerate()]


def test_the_supervisor_asks_by_its_file_and_returns_the_exit_code_of_the_run(without_signals, tmp_path, monkeypatch):
    supervisor, codes = launch.Supervisor(tmp_path), []
    monkeypatch.setattr(signal, "signal", lambda number, handler: signal.SIG_DFL)  # handlers are of the main thread
    command = [sys.executable, "-c", TRAINING]
    thread = threading.Thread(target=lambda: codes.append(supervisor.run(command)))
    thread.start()
    assert wait_until(lambda: any(tmp_path.glob(f"{signals.PROCESS_PREFIX}*")), 60)
    supervisor._forward(int(signal.SIGTERM), None)
    thread.join(60)

    assert codes == [60 + signal.SIGTERM]


def test_the_page_asks_by_a_file_and_ends_the_run_when_asked_again(without_signals, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = psutil.Process(process.pid).create_time()
    job = Job("a", "mika", str(tmp_path), [], status=RUNNING, pid=process.pid, process_started=started)
    queue = JobQueue(tmp_path, [job])
    try:
        assert queue.stop("a").status == STOPPING
        assert job.stop_path.exists() and process.poll() is None
        queue.stop("a")
        assert process.wait(20) != 0
    finally:
        process.kill()
        process.wait()
