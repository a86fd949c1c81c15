"""Runs that the page starts: a queue in a file, one run at a time, each a process of its own that outlives the page."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ..atomic_files import write_atomic
from ..distributed.signals import STOP_FILE, can_send_signals
from ..errors import UserError
from ..problems import report_file
from ..training.output_lock import has_final_output
from .device_load import EnergyMeter, LoadMonitor
from .run_form import CheckedForm
from .validate_requests import HEADER, TRAINING_SCRIPT, check_can_start

WAITING, RUNNING, STOPPING, STOPPED, FINISHED, FAILED = "waiting running stopping stopped finished failed".split()
FOLDER, FILE = ".lorikeet-web", "jobs.json"
POLL_SECONDS = 0.5
MAX_JOBS_SHOWN = 30
ENERGY_SECONDS = 10.0
"""The time between two readings of the power of the cards while a run is going."""


@dataclass(frozen=True)
class Job:
    """One run of the queue."""

    id: str
    name: str
    folder: str
    command: Sequence[str]
    status: str = WAITING
    pid: int = 0
    process_started: float = 0.0
    """Tells the process from a later one with the same id."""

    code: int | None = None
    added_at: float = 0.0
    watt_hours: float | None = None
    """The energy of all cards while it ran, as far as a page watched; None if no card tells its power."""

    @property
    def log_path(self) -> Path:
        return Path(self.folder) / f"{self.name}.log"

    @property
    def stop_path(self) -> Path:
        """The file that asks the run to stop where no signal can."""
        return Path(self.folder) / f".{self.name}.stop"

    @property
    def is_active(self) -> bool:
        return self.status in (WAITING, RUNNING, STOPPING)

    def find_process(self) -> psutil.Process | None:
        """Find the process of this run, also one that an earlier page has started."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if self.pid and abs(process.create_time() - self.process_started) < 2:
                return None if process.status() == psutil.STATUS_ZOMBIE else process
        return None


@dataclass
class JobQueue:
    """Starts waiting runs one after another; nothing is started before the first request."""

    root: Path
    jobs: list[Job] = field(default_factory=list)
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _thread: threading.Thread | None = None
    monitor: LoadMonitor = field(default_factory=LoadMonitor)
    _meters: dict[str, EnergyMeter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with suppress(OSError, ValueError, TypeError, AttributeError):
            self.jobs = [Job(**values) for values in json.loads(self._path.read_text("utf-8"))]

    @property
    def _path(self) -> Path:
        return self.root / FOLDER / FILE

    def list_jobs(self) -> list[Job]:
        """The active runs in their order, then the ended ones, the last first."""
        with self._lock:
            self._watch()
            active = [job for job in self.jobs if job.is_active]
            ended = [job for job in reversed(self.jobs) if not job.is_active]
            return [*active, *ended][:MAX_JOBS_SHOWN]

    def find_job(self, folder: Path, name: str) -> Job | None:
        """Return the last job of a run."""
        jobs = [job for job in self.jobs if (Path(job.folder), job.name) == (folder, name)]
        return jobs[-1] if jobs else None

    def add(self, form: CheckedForm, processes: int, *, is_resumed: bool = False) -> Job:
        """Write the settings and queue a run."""
        folder = form.output_dir.resolve()
        settings_file = folder / f"{form.output_name}.toml"
        check_can_start(settings_file)
        with self._lock:
            if any(job.is_active and (job.folder, job.name) == (str(folder), form.output_name) for job in self.jobs):
                raise UserError(report_file(form.output_name, "is in the queue already, or running"))
            write_atomic(settings_file, (HEADER + form.toml).encode())
            command = build_command(settings_file, processes, form.precision, is_resumed=is_resumed)
            job = Job(uuid.uuid4().hex[:12], form.output_name, str(folder), command, added_at=time.time())
            job.log_path.touch()  # from now on the run has a page
            self.jobs.append(job)
            self._save()
            self._watch()
        return job

    def stop(self, job_id: str) -> Job:
        """Remove a waiting run; ask a running one to save a checkpoint and end, or, asked again, to end at once."""
        with self._lock:
            job = self._get(job_id)
            if job.status == WAITING:
                return self._replace(job, status=STOPPED)
            process = job.find_process()
            if process is None:
                return job
            with suppress(psutil.Error, OSError):
                if can_send_signals():
                    process.send_signal(signal.SIGTERM)
                elif job.status == RUNNING:
                    job.stop_path.touch()
                else:
                    _kill_tree(process)
            return self._replace(job, status=STOPPING)

    def remove(self, job_id: str) -> None:
        """Take an ended run off the list; its files stay."""
        with self._lock:
            job = self._get(job_id)
            if not job.is_active:
                self.jobs.remove(job)
                self._save()

    def check_ended(self, folder: Path, name: str) -> None:
        """Raise ``UserError`` if a run that is to be deleted waits or runs."""
        with self._lock:
            if any(job.is_active and (Path(job.folder), job.name) == (folder, name) for job in self.jobs):
                raise UserError(report_file(name, "is in the queue or running", "stop it first"))

    def forget_run(self, folder: Path, name: str) -> None:
        """Take a run that is deleted off the list."""
        with self._lock:
            left = [job for job in self.jobs if job.is_active or (Path(job.folder), job.name) != (folder, name)]
            if len(left) < len(self.jobs):
                self.jobs = left
                self._save()

    def _watch(self) -> None:
        """Keep a thread while there is something to start or to wait for."""
        is_watched = self._thread is not None and self._thread.is_alive()
        if not is_watched and any(job.is_active for job in self.jobs):
            self._thread = threading.Thread(target=self._run_jobs, name="queue of runs", daemon=True)
            self._thread.start()

    def _run_jobs(self) -> None:
        while True:
            now, power = self._read_power()
            with self._lock:
                for job in [job for job in self.jobs if job.status in (RUNNING, STOPPING)]:
                    self._check_ended(self._measure_energy(job, now, power))
                if not any(job.status in (RUNNING, STOPPING) for job in self.jobs):
                    waiting = next((job for job in self.jobs if job.status == WAITING), None)
                    if waiting is None:
                        self._thread = None
                        return
                    self._start(waiting)
            time.sleep(POLL_SECONDS)

    def _read_power(self) -> tuple[float, float | None]:
        """Read the power if that of a run is to be counted; outside of the lock, since nvidia-smi may take long."""
        with self._lock:
            ids = {job.id for job in self.jobs if job.status in (RUNNING, STOPPING)}
            now = time.monotonic()
            is_due = any(id_ not in self._meters or now >= self._meters[id_].next_at for id_ in ids)
        return now, self.monitor.read_power() if is_due else None

    def _measure_energy(self, job: Job, now: float, power: float | None) -> Job:
        """Add the energy since the last reading, every few seconds."""
        meter = self._meters.setdefault(job.id, EnergyMeter(job.watt_hours or 0.0))
        if now < meter.next_at:
            return job
        meter.add(now, power)
        meter.next_at = now + ENERGY_SECONDS
        return self._replace(job, watt_hours=meter.watt_hours) if meter.has_power else job

    def _start(self, job: Job) -> None:
        root = str(TRAINING_SCRIPT.parent)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        environment["PYTHONUTF8"] = "1"  # what it prints into a file is in the code page of Windows otherwise
        environment[STOP_FILE] = str(job.stop_path)
        try:
            job.stop_path.unlink(missing_ok=True)  # of an earlier run
            with job.log_path.open("ab") as log:
                process = subprocess.Popen(
                    job.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C ends the page, not its runs
                )
        except OSError as error:
            with suppress(OSError):  # such as where its folder was
                job.log_path.parent.mkdir(parents=True, exist_ok=True)
                cause = f"{error.filename or job.command[0]}: cannot be started: {error.strerror}\n"
                job.log_path.write_text(cause, "utf-8")
            self._replace(job, status=FAILED)
            return
        self._processes[job.id] = process
        self._replace(job, status=RUNNING, pid=process.pid, process_started=psutil.Process(process.pid).create_time())

    def _check_ended(self, job: Job) -> None:
        process = self._processes.get(job.id)
        code = process.poll() if process is not None else None
        if process is not None and code is None:
            return
        if process is None and job.find_process() is not None:
            return
        self._processes.pop(job.id, None)
        self._meters.pop(job.id, None)
        with suppress(OSError):
            job.stop_path.unlink(missing_ok=True)
        if job.status == STOPPING:
            status = STOPPED
        elif process is None:  # of an earlier page, which alone could have read its exit code
            status = FINISHED if has_final_output(Path(job.folder), job.name) else STOPPED
        else:
            status = FINISHED if code == 0 else FAILED
        self._replace(job, status=status, code=code)

    def _get(self, job_id: str) -> Job:
        for job in self.jobs:
            if job.id == job_id:
                return job
        raise UserError("no such run in the queue; reload the page")

    def _replace(self, job: Job, **changes: Any) -> Job:
        changed = replace(job, **changes)
        self.jobs[self.jobs.index(job)] = changed
        self._save()
        return changed

    def _save(self) -> None:
        rows: list[Mapping[str, Any]] = [asdict(job) for job in self.jobs]
        with suppress(OSError):
            write_atomic(self._path, json.dumps(rows, indent=1).encode())


def _kill_tree(process: psutil.Process) -> None:
    """End a process with all that it has started."""
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    process.kill()


def build_command(settings_file: Path, processes: int, precision: str, *, is_resumed: bool = False) -> list[str]:
    """Build the command that trains, through ``python -m library launch``, so that it can be asked to stop."""
    multi = ["--multi_gpu"] if processes > 1 else []
    return [
        *(sys.executable, "-m", "library", "launch", sys.executable, "-m", "accelerate.commands.launch"),
        *("--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", precision),
        *("--dynamo_backend", "no", *multi, str(TRAINING_SCRIPT), "--config_file", str(settings_file)),
        *(["--auto_resume"] if is_resumed else []),
    ]
