"""The queue of a sweep: one run after another, each a process of its own; what is done is kept in ``sweep.json``."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ...atomic_files import find_write_error, write_atomic
from ...demo import DEMO_CONFIG_DIR
from ...distributed.signals import STOP_FILE, can_send_signals, list_stop_signals
from ...errors import ConfigError, UserError
from ...evaluation.seed_bootstrap import Resampler
from ...log import format_duration
from ...problems import Problem, report_file
from ...report.page import RunSummary
from ...training.output_lock import has_final_output, hold_output_lock
from .check_runs import CheckedRun
from .early_stopping import find_hopeless_reason, read_measurements
from .sweep_file import Sweep

logger = logging.getLogger(__name__)
STATE_FILE = "sweep.json"
TRAINING_SCRIPT = DEMO_CONFIG_DIR.parent / "train_lora.py"
WAITING, RUNNING, FINISHED, STOPPED, FAILED = "waiting", "running", "finished", "stopped", "failed"
CAUSE_BEGIN, MAX_CAUSE_LENGTH = "train_lora: ", 300
"""How a run begins to say why it ended, before its launcher reports that it has, and how much of it is shown."""
POLL_SECONDS = 1.0
MEASUREMENT_SECONDS = 10.0
"""How often the measurements of a run are read."""


@dataclass(frozen=True)
class RunState:
    """What became of a run."""

    status: str = WAITING
    settings: Mapping[str, Any] | None = None
    """The options with which it was started: those of the sweep file, and those of the run file."""
    reason: str = ""
    """Why it was stopped, or how it failed."""
    seconds: float = 0.0
    is_kept: bool = False
    """Whether the user lets it go on although it was hopeless."""

    @property
    def is_done(self) -> bool:
        """Whether the sweep goes on with the next run; one that failed is tried again by the next start."""
        return self.status in (FINISHED, STOPPED)


class SweepState:
    """The states of all runs, in a file beside them; a run whose folder was removed has not begun."""

    def __init__(self, folder: Path):
        self.path = folder / STATE_FILE
        self.runs: dict[str, RunState] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            stored = json.loads(self.path.read_text("utf-8"))["runs"]
            states = {name: RunState(**values) for name, values in stored.items()}
            self.runs = {name: state for name, state in states.items() if (folder / name).is_dir()}

    def get(self, name: str) -> RunState:
        return self.runs.get(name, RunState())

    def set(self, name: str, state: RunState) -> None:
        self.runs[name] = state
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = {"runs": {key: asdict(each) for key, each in self.runs.items()}}
        write_atomic(self.path, (json.dumps(rows, indent=1, ensure_ascii=False) + "\n").encode())

    def find_changes(self, runs: Sequence[CheckedRun]) -> Iterator[Problem]:
        """Find runs that are done, or have begun, with other settings than the file has now."""
        for each in runs:
            state = self.get(each.run.name)
            new = _normalize(each.settings)
            if state.settings is not None and _normalize(state.settings) != new:
                old = _normalize(state.settings)
                names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
                text = f"run {each.run.name} was {state.status} with another {', '.join(names)}"
                yield report_file(self.path, text, "give another output_dir, or remove the folder of the run")


def _normalize(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON returns them."""
    normalized: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    return normalized


@contextmanager
def hold_sweep_lock(folder: Path) -> Iterator[None]:
    """Hold the folder of a sweep inside the block; raise ``UserError`` if another sweep is training in it."""
    if error := find_write_error(folder):
        raise UserError(Problem("output_dir", f"cannot write to {folder}: {error}"))
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_output_lock(folder, STATE_FILE))
        except UserError as held:
            text = f"another sweep is training the runs in {folder}, with the lock {folder / f'.{STATE_FILE}.lock'}"
            raise UserError(Problem("output_dir", text, "wait for it, or give another output_dir")) from held
        yield


def read_cause(log: Path) -> str:
    """Read what a run has said last of why it ended, from its log; empty if it has said nothing."""
    lines = log.read_text("utf-8", "replace").replace("\r", "\n").splitlines()
    begins = [index for index, line in enumerate(lines) if line.startswith(CAUSE_BEGIN)]
    if not begins:
        return ""
    indented = itertools.takewhile(lambda line: line.startswith("  "), lines[begins[-1] + 1 :])
    text = " ".join(line.strip() for line in indented)
    return text if len(text) <= MAX_CAUSE_LENGTH else f"{text[:MAX_CAUSE_LENGTH]}..."


class RunQueue:
    """Runs what is not done yet, watches the run, and stops it where it is hopeless."""

    def __init__(self, sweep: Sweep, runs: Sequence[CheckedRun]):
        self.sweep, self.runs, self.state = sweep, runs, SweepState(sweep.output_dir)
        self.received: int | None = None
        self.resampler = Resampler()
        if problems := list(self.state.find_changes(runs)):
            raise ConfigError(problems)

    def run_all(self) -> Iterator[str]:
        """Train every run, and yield a line for each."""
        with self._forwarding():
            for number, each in enumerate(self.runs, 1):
                name, before = each.run.name, self.state.get(each.run.name)
                if before.is_done:
                    yield f"run {number} of {len(self.runs)}, {name}: {before.status} before"
                    continue
                yield f"run {number} of {len(self.runs)}, {name}: log in {self._get_log(each)}"
                self._wait_for_other_process(each)
                state = before  # where a signal came meanwhile
                if self.received is None:
                    state = self._find_finished(each, before) or self._train(each, before)
                self.state.set(name, state)
                reason = f": {state.reason}" if state.reason else ""
                status = "interrupted" if state.status == WAITING else state.status
                yield f"run {name}: {status} after {format_duration(state.seconds)}{reason}"
                if self.received is not None:
                    yield f"{signal.Signals(self.received).name}: the same command goes on where the sweep was stopped"
                    return

    def _wait_for_other_process(self, each: CheckedRun) -> None:
        """Wait for a run that goes on after the sweep that had started it was killed."""
        folder, name, is_told = self.sweep.get_folder(each.run), each.run.name, False
        folder.mkdir(parents=True, exist_ok=True)
        while self.received is None:
            try:
                with hold_output_lock(folder, name):
                    return
            except UserError as error:
                if not is_told:
                    logger.info("waiting for a process of an earlier sweep: %s", error)
                is_told = True
                time.sleep(POLL_SECONDS)

    def _find_finished(self, each: CheckedRun, before: RunState) -> RunState | None:
        """Return the state of a run that has finished after the sweep that had started it was killed; else None."""
        is_ours = before.settings is not None and before.status in (RUNNING, WAITING)
        if is_ours and has_final_output(self.sweep.get_folder(each.run), each.run.name):
            return replace(before, status=FINISHED)
        return None

    def _train(self, each: CheckedRun, before: RunState) -> RunState:
        """Train one run to its end, until it is hopeless, or until the sweep is asked to stop."""
        name, started_at = each.run.name, time.monotonic()
        state = replace(before, status=RUNNING, settings=each.settings, reason="")
        self.state.set(name, state)
        process, reason, read_at = self._start(each), "", started_at
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if self.received is not None and not reason:
                reason = "the sweep was stopped"
                self._ask_to_stop(each, process)
            elif not reason and time.monotonic() - read_at >= MEASUREMENT_SECONDS:
                read_at = time.monotonic()
                if reason := self._find_hopeless_reason(each):
                    logger.info("run %s is hopeless and is stopped: %s", name, reason)
                    self._ask_to_stop(each, process)
        state = replace(state, seconds=round(before.seconds + time.monotonic() - started_at, 1))
        self._get_stop_file(each).unlink(missing_ok=True)
        if process.returncode == 0:
            return replace(state, status=FINISHED)
        if self.received is not None:
            return replace(state, status=WAITING)
        if reason:
            return replace(state, status=STOPPED, reason=reason)
        cause = read_cause(self._get_log(each)) or f"exit code {process.returncode}"
        return replace(state, status=FAILED, reason=f"{cause}; see {self._get_log(each)}")

    def _start(self, each: CheckedRun) -> "subprocess.Popen[bytes]":
        """Start a run through ``python -m library launch``, so that it can be asked to stop."""
        count, precision = self.sweep.num_processes, each.config.distributed.mixed_precision or "no"
        command = [
            *(sys.executable, "-m", "library", "launch", sys.executable, "-m", "accelerate.commands.launch"),
            *("--num_processes", str(count), "--num_machines", "1", "--mixed_precision", precision),
            *("--dynamo_backend", "no", *(["--multi_gpu"] if count > 1 else [])),
            *(str(TRAINING_SCRIPT), *each.argv),
        ]
        paths = [str(TRAINING_SCRIPT.parent), os.environ.get("PYTHONPATH")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}
        environment[STOP_FILE] = str(self._get_stop_file(each).absolute())
        self._get_log(each).parent.mkdir(parents=True, exist_ok=True)
        self._get_stop_file(each).unlink(missing_ok=True)
        with self._get_log(each).open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _find_hopeless_reason(self, each: CheckedRun) -> str:
        """Say why a run is to be stopped; empty if it is not."""
        if not self.sweep.stop_hopeless or self.state.get(each.run.name).is_kept:
            return ""
        folder = self.sweep.get_folder(each.run)
        summary = RunSummary.read(folder / f"{each.run.name}.run.json")
        others = {
            other.run.name: read_measurements(self.sweep.get_folder(other.run), other.run.name)
            for other in self.runs
            if other.run.name != each.run.name and self.state.get(other.run.name).is_done
        }
        if summary is None or not others:
            return ""
        own = read_measurements(folder, each.run.name)
        return find_hopeless_reason(own, others, summary.steps, self.resampler)

    def _ask_to_stop(self, each: CheckedRun, process: "subprocess.Popen[bytes]") -> None:
        """Let the run save a checkpoint and end."""
        if can_send_signals():
            process.send_signal(signal.SIGTERM)
        else:
            self._get_stop_file(each).touch()

    def _get_log(self, each: CheckedRun) -> Path:
        return self.sweep.get_folder(each.run) / f"{each.run.name}.log"

    def _get_stop_file(self, each: CheckedRun) -> Path:
        return self.sweep.get_folder(each.run) / f".{each.run.name}.stop"

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Stop the run that is trained, and then the sweep, when a signal asks for it."""

        def receive(number: int, frame: FrameType | None) -> None:
            self.received = number

        before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {
            number: signal.signal(number, receive) for number in list_stop_signals()
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def mark_for_retry(state: SweepState, name: str) -> None:
    """Let a run that was stopped as hopeless go on, and not be stopped again."""
    state.set(name, replace(state.get(name), status=WAITING, reason="", is_kept=True))
