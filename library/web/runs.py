"""Runs below the opened folders, read from the files that a run writes, wherever and however it was started."""

import glob
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..problems import report_file
from ..report.metric_series import MetricTable, is_plain_number
from ..report.page import RunSummary
from ..report.preview_grid import PreviewRow, find_preview_files
from ..training.output_lock import LEASE_SECONDS, has_final_output
from .folders import FileFinder, OpenedFolders
from .run_notes import RunNotes

METRICS_END, SUMMARY_END, LOG_END = ".metrics.jsonl", ".run.json", ".log"
TAIL_BYTES = 16_384
LISTED_METRICS = {"step", "loss/average", "speed/steps_per_second"}
LOG_BYTES = 200_000
MAX_TABLES = 24
"""The number of runs whose metrics stay in memory."""

READ_SECONDS = 0.4
"""The time that a request reads metrics; for a long file the page asks again, and draws what there is."""

DISCOVERY_SECONDS = 2.0
"""The time for which the list of runs is kept."""

_ESCAPE_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Run:
    """A run by its folder and output name, with the times of its files when it was found."""

    folder: Path
    name: str
    metrics_time: float = 0.0
    lock_time: float = 0.0
    error_time: float = 0.0

    @property
    def metrics_path(self) -> Path:
        return self.folder / f"{self.name}{METRICS_END}"

    @property
    def summary_path(self) -> Path:
        return self.folder / f"{self.name}{SUMMARY_END}"

    @property
    def log_path(self) -> Path:
        """The file to which the page writes the console of runs that it starts."""
        return self.folder / f"{self.name}{LOG_END}"

    def list_files(self) -> list[Path]:
        """The files to download, the newest first."""
        pattern = re.compile(
            rf"{re.escape(self.name)}(-\d{{6,}}|-step\d{{8,}})?(-ema)?(_(high|low)_noise)?"
            r"(\.safetensors|\.report\.html|\.before_after\.png|\.metrics\.jsonl|\.log|\.error-rank\d+\.txt|\.toml)"
        )
        files = [path for path in self.folder.iterdir() if pattern.fullmatch(path.name) and path.is_file()]
        return sorted(files, key=lambda path: -path.stat().st_mtime)

    def read_previews(self, started_at: float) -> dict[int, PreviewRow]:
        return find_preview_files(self.folder / "sample", self.name, started_at)

    def read_log(self, log_file: Path) -> str:
        """The end of the log, without the drawing of progress bars."""
        try:
            with log_file.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
                text = file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        lines = (line.rstrip().rpartition("\r")[2] for line in _ESCAPE_CODES.sub("", text).split("\n"))
        return "\n".join(lines).strip()


@dataclass(frozen=True)
class RunOverview:
    """A line of the list of runs."""

    key: str
    name: str
    folder: str
    status: str
    step: int
    steps: int | None
    loss: float | None
    steps_per_second: float | None
    changed_at: float
    is_favorite: bool = False
    note: str = ""

    @property
    def seconds_left(self) -> float | None:
        if self.status != "running" or not self.steps or not self.steps_per_second:
            return None
        return max(0.0, (self.steps - self.step) / self.steps_per_second)


@dataclass
class RunReader:
    """Finds runs and keeps what was read of them."""

    folders: OpenedFolders
    _finder: FileFinder = field(init=False)
    _runs: dict[str, Run] = field(default_factory=dict)
    _found_at: float = -1e9
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tables: "OrderedDict[Path, tuple[MetricTable, threading.Lock]]" = field(default_factory=OrderedDict)
    _overviews: dict[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)
    _summaries: dict[Path, tuple[float, RunSummary | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._finder = FileFinder(self.folders, (METRICS_END, SUMMARY_END, ".lock"), ".error-rank")

    def find_runs(self) -> dict[str, Run]:
        """Find all runs, by their key in addresses."""
        with self._lock:
            if time.monotonic() - self._found_at > DISCOVERY_SECONDS:
                self._runs = {self._make_key(run): run for run in _discover_runs(self._finder)}
                self._found_at = time.monotonic()
            return self._runs

    def list_folders(self) -> list[Path]:
        """List the folders that are looked through."""
        return [folder for folder, _ in self._finder.iter_folders()]

    def forget_list(self) -> None:
        """Look for runs again at the next request, since files were moved."""
        self._found_at = -1e9

    def get_run(self, key: str) -> Run:
        """Return one run, which need not have been listed before; raise ``UserError`` if it has no files."""
        path = self.folders.resolve_key(key)
        files = [path.with_name(f"{path.name}{end}") for end in (METRICS_END, SUMMARY_END, LOG_END)]
        if not any(self.folders.contains(file) and file.is_file() for file in files):
            raise UserError(report_file(self.folders.format_path(path), "no run of this name"))
        lock, errors = path.with_name(f".{path.name}.lock"), path.parent.glob(f"{glob.escape(path.name)}.error-rank*")
        error_time = max(map(_get_time, errors), default=0.0)
        return Run(path.parent, path.name, _get_time(files[0]), _get_time(lock), error_time)

    def list_overviews(self) -> list[RunOverview]:
        """List all runs, those that changed last first."""
        overviews = [self.describe(key, run) for key, run in self.find_runs().items()]
        return sorted(overviews, key=lambda run: (run.status != "running", -run.changed_at))

    def describe(self, key: str, run: Run) -> RunOverview:
        """Describe a run by the last lines of its metrics."""
        known = self._overviews.get(key)
        if known is None or known[0] != run.metrics_time:
            known = self._overviews[key] = (run.metrics_time, _read_last_metrics(run.metrics_path))
        last, summary = known[1], self.read_summary(run)
        steps, step = None if summary is None else summary.steps, int(last.get("step", 0))
        notes = RunNotes.read(run.folder, run.name)
        return RunOverview(
            key=key,
            name=run.name,
            folder=self.folders.format_path(run.folder),
            status=_find_status(run, step, steps),
            step=step,
            steps=steps,
            loss=last.get("loss/average"),
            steps_per_second=last.get("speed/steps_per_second"),
            changed_at=max(run.metrics_time, _get_time(run.summary_path)),
            is_favorite=notes.is_favorite,
            note=notes.text,
        )

    def read_summary(self, run: Run) -> RunSummary | None:
        """Read what the run wrote at its start; None of runs of version 0.1."""
        written_at = _get_time(run.summary_path)
        known = self._summaries.get(run.summary_path)
        if known is None or known[0] != written_at:
            known = self._summaries[run.summary_path] = (written_at, RunSummary.read(run.summary_path))
        return known[1]

    def read_table(self, run: Run, seconds: float = READ_SECONDS) -> tuple[MetricTable, bool]:
        """Read the metrics on; also return whether the end was reached."""
        with self._lock:
            new = MetricTable(run.metrics_path), threading.Lock()
            table, lock = self._tables.setdefault(run.metrics_path, new)
            self._tables.move_to_end(run.metrics_path)
            while len(self._tables) > MAX_TABLES:
                self._tables.popitem(last=False)
        with lock:
            return table, table.read_new_lines(seconds)

    def find_log(self, run: Run) -> Path | None:
        """Return the file with the messages of a run, if it is in an opened folder."""
        summary = self.read_summary(run)
        configured = summary.all_settings.get("console_log_file") if summary is not None else None
        for path in [run.log_path, *([Path(configured)] if configured else [])]:
            if self.folders.contains(path) and path.is_file():
                return path
        return None

    def _make_key(self, run: Run) -> str:
        return self.folders.make_key(run.folder / run.name)


def _discover_runs(finder: FileFinder) -> Iterator[Run]:
    for folder, names in finder.iter_folders():
        found = [name.removesuffix(end) for end in (METRICS_END, SUMMARY_END) for name in names if name.endswith(end)]
        for name in dict.fromkeys(found):
            errors = [folder / other for other in names if other.startswith(f"{name}.error-rank")]
            times = _get_time(folder / f"{name}{METRICS_END}"), _get_time(folder / f".{name}.lock")
            yield Run(folder, name, *times, max(map(_get_time, errors), default=0.0))


def _find_status(run: Run, step: int, steps: int | None) -> str:
    """A run holds a lock and refreshes it every few seconds."""
    if time.time() - run.lock_time < LEASE_SECONDS:
        return "running"
    if (steps is not None and step >= steps) or has_final_output(run.folder, run.name):
        return "finished"
    return "failed" if run.error_time > run.metrics_time else "stopped"


def _read_last_metrics(path: Path) -> dict[str, float]:
    """Read the last value of each metric that is listed, from the end of the file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    values: dict[str, float] = {}
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(line)
            pairs = parsed.items() if isinstance(parsed, dict) else ()
            values = {name: value for name, value in pairs if is_plain_number(value)} | values
        if LISTED_METRICS <= values.keys():
            break
    return values


def _get_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def compare_settings(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """List the settings that are not the same in all runs; an empty text is the default."""
    names = dict.fromkeys(name for settings in summaries for name in settings)
    rows = [(name, [_format_setting(settings.get(name)) for settings in summaries]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _format_setting(value: Any) -> str:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
