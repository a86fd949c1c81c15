"""What a run measures of itself, in ``NAME.evaluation.jsonl``: a line for each evaluated step.

A line has the values of every picture, and not only their means, so that several steps and runs can be judged later as
``python -m library evaluate`` judges files, with the same seeds drawn for all.  Its basis says what it was measured
with: the base model, the pictures, captions and models; only lines of one basis can be compared.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_files import write_atomic
from ..problems import Problem, report_file
from .embedding_metrics import Array
from .file_metrics import METRICS, FileMetrics, MetricStatistic
from .seed_bootstrap import MeanStatistic, PairStatistic, ShareStatistic, Statistic

logger = logging.getLogger(__name__)
RECORD_END = ".evaluation.jsonl"
Basis = Mapping[str, Any]
_KINDS: Mapping[str, type] = {"mean": MeanStatistic, "share": ShareStatistic, "pairs": PairStatistic}


@dataclass(frozen=True)
class RecordedStep:
    """An evaluated step of a run."""

    step: int
    started_at: float
    """When the run started, which tells it from an earlier one of its name."""
    basis: Basis
    statistics: Mapping[str, MetricStatistic]

    def export_line(self) -> str:
        """Export the step as a line of JSON; numbers are read back as they were, to the bit."""
        statistics = {
            name: {"group": each.group, **_export_statistic(each.statistic)} for name, each in self.statistics.items()
        }
        values = {"step": self.step, "started_at": self.started_at, "basis": self.basis, "statistics": statistics}
        return json.dumps(values, ensure_ascii=False) + "\n"

    def to_metrics(self, run: str, file: str, validation_loss: float | None) -> FileMetrics:
        """Return the metrics as those of a LoRA file."""
        return FileMetrics(run, self.step, file, self.statistics, validation_loss)


class RecordFile:
    """The file that a run appends to; a resumed run keeps the lines of the steps that it goes on from."""

    def __init__(self, path: Path, started_at: float, from_step: int):
        self.path = path
        self.steps = [each for each in read_recorded_steps(path, started_at) if each.step <= from_step]
        self._try_write(lambda: write_atomic(path, "".join(each.export_line() for each in self.steps).encode()))

    def append(self, step: RecordedStep) -> None:
        """Add a step; a file that cannot be written is no reason to end a run."""
        self.steps.append(step)
        self._try_write(lambda: self._append_line(step.export_line()))

    def _append_line(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _try_write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            logger.warning("%s: cannot be written: %s", self.path, error.strerror)


def read_recorded_steps(path: Path, started_at: float | None = None) -> list[RecordedStep]:
    """Read the steps of a run in their order, each once; incomplete lines and those of another run are skipped."""
    try:
        texts = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = [step for step in map(_parse_line, texts) if step is not None]
    if started_at is not None:
        found = [step for step in found if abs(step.started_at - started_at) < 1e-3]
    return sorted({step.step: step for step in found}.values(), key=lambda step: step.step)


def find_basis_problems(steps_by_run: Mapping[str, list[RecordedStep]]) -> list[Problem]:
    """Say what runs were measured with that differs, so that their numbers cannot be compared."""
    bases = {run: steps[-1].basis for run, steps in steps_by_run.items() if steps}
    names = dict.fromkeys(name for basis in bases.values() for name in basis)
    problems = []
    for name in names:
        values = {run: json.dumps(basis.get(name), ensure_ascii=False) for run, basis in bases.items()}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{run}: {_shorten(value)}" for run, value in values.items())
            fix = "evaluate their LoRA files instead, without --recorded"
            problems.append(Problem("", f"the runs were measured with different {name} ({shown})", fix))
    return problems


def report_unrecorded(folder: Path, name: str) -> Problem:
    """Build the problem of a run that has not evaluated itself."""
    fix = "train with --evaluate_every_n_steps, or evaluate its files without --recorded"
    return report_file(folder / f"{name}{RECORD_END}", "the run has recorded no evaluation", fix)


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _export_statistic(statistic: Statistic) -> dict[str, Any]:
    kind = next(name for name, each in _KINDS.items() if isinstance(statistic, each))
    values = vars(statistic)
    return {"kind": kind} | {
        name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in values.items()
    }


def _parse_line(text: str) -> RecordedStep | None:
    try:
        line = json.loads(text)
        statistics = {
            name: MetricStatistic(_parse_statistic(each), str(each["group"]))
            for name, each in line["statistics"].items()
            if name in METRICS
        }
        return RecordedStep(int(line["step"]), float(line["started_at"]), dict(line["basis"]), statistics)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _parse_statistic(values: Mapping[str, Any]) -> Statistic:
    fields = {name: each for name, each in values.items() if name not in ("kind", "group")}
    built: Statistic = _KINDS[values["kind"]](**{name: _parse_value(each) for name, each in fields.items()})
    if built.shape[0] < 1:
        raise ValueError("no captions")
    return built


def _parse_value(value: Any) -> Array | float:
    return np.asarray(value, np.float64) if isinstance(value, list) else float(value)
