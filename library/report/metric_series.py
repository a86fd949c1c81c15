"""Read ``NAME.metrics.jsonl``, which has one JSON line of metrics for each step, whatever trackers are used.

A run may have millions of steps, so series are kept in buckets of neighboring steps (mean, minimum and maximum), whose
width doubles when there are too many: memory and drawing cost the same for any length, and a file that grows is read
on from where it was read to.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

MAX_BUCKETS = 1500
READ_BYTES = 2**20
Points = list[tuple[float, float]]
FORMER_PREFIXES = {
    "loss/time/": "loss/timestep/",
    "validation/time/": "validation/timestep/",
    "validation/base/time/": "validation/base/timestep/",
}
"""The current prefixes of metrics by those that version 0.1 wrote, so that its files are read as they are."""

Numbers = NDArray[np.float64]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all lines; incomplete and foreign ones are skipped."""
    try:
        texts = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in map(_parse_line, texts) if line is not None]


def _parse_line(text: str | bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and _is_step(values.get("step")) else None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def is_plain_number(value: Any) -> bool:
    """Whether it can be drawn: no NaN, no infinity, and sums of many do not overflow."""
    return (type(value) is float or type(value) is int) and -1e300 < value < 1e300


def _get_current_name(name: str) -> str:
    """Return the name that this version gives to a metric."""
    former = next((prefix for prefix in FORMER_PREFIXES if name.startswith(prefix)), "")
    return FORMER_PREFIXES[former] + name.removeprefix(former) if former else name


class MetricSeries:
    """One metric over the steps, in at most ``MAX_BUCKETS`` buckets."""

    def __init__(self) -> None:
        self.width = 1  # steps of a bucket
        self.last: float = float("nan")
        self._index: NDArray[np.int64] = np.zeros(0, np.int64)
        self._columns: Numbers = np.zeros((5, 0))  # last step, minimum, maximum, sum, count

    def append(self, steps: Iterable[int], values: Iterable[float]) -> None:
        """Append values in the order of their steps."""
        step, value = np.asarray(steps, np.float64), np.asarray(values, np.float64)
        self.last = float(value[-1])
        columns = np.stack([step, value, value, value, np.ones_like(value)])
        self._index = np.concatenate([self._index, (step // self.width).astype(np.int64)])
        self._columns = np.concatenate([self._columns, columns], axis=1)
        self._merge_equal()
        while len(self._index) > MAX_BUCKETS:
            self.width, self._index = self.width * 2, self._index // 2
            self._merge_equal()

    def _merge_equal(self) -> None:
        starts = np.flatnonzero(np.diff(self._index, prepend=-1))
        functions = (np.maximum, np.minimum, np.maximum, np.add, np.add)
        if len(starts) < len(self._index):
            rows = [function.reduceat(row, starts) for function, row in zip(functions, self._columns, strict=True)]
            self._index, self._columns = self._index[starts], np.stack(rows)

    @property
    def steps(self) -> list[float]:
        """The last step of each bucket."""
        return [float(step) for step in self._columns[0]]

    @property
    def means(self) -> list[float]:
        return [float(value) for value in self._columns[3] / self._columns[4]]

    @property
    def bounds(self) -> tuple[list[float], list[float]] | None:
        """The least and the largest value of each bucket; None while each bucket is one step."""
        if self.width == 1:
            return None
        return [float(value) for value in self._columns[1]], [float(value) for value in self._columns[2]]

    @property
    def points(self) -> Points:
        return list(zip(self.steps, self.means, strict=True))

    def compute_mean(self, after: float, until: float) -> float | None:
        """Compute the mean of the buckets that end in this range of steps."""
        chosen = (self._columns[0] > after) & (self._columns[0] <= until)
        count = self._columns[4][chosen].sum()
        return float(self._columns[3][chosen].sum() / count) if count else None


@dataclass
class MetricTable:
    """All metrics of a run, as far as they were read."""

    path: Path
    series: defaultdict[str, MetricSeries] = field(default_factory=lambda: defaultdict(MetricSeries))
    last_step: int = 0
    num_lines: int = 0
    num_skipped_steps: int = 0
    offset: int = 0
    size: int = 0
    _inode: int = -1
    _rest: bytes = b""

    def read_new_lines(self, seconds: float = float("inf")) -> bool:
        """Read what was added, for about ``seconds``; return whether the end was reached.

        A file that was replaced, as by a run that resumes, is read from the start.
        """
        until = time.monotonic() + seconds
        try:
            with self.path.open("rb") as file:
                self._start_over_if_replaced(file)
                file.seek(self.offset)
                while data := file.read(READ_BYTES):
                    self.offset += len(data)
                    self._add_lines(data)
                    if time.monotonic() >= until:
                        break
        except FileNotFoundError:
            return True
        return self.offset >= self.size

    def _start_over_if_replaced(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self.offset:
            self.series.clear()
            self.last_step = self.num_lines = self.num_skipped_steps = self.offset = 0
            self._rest = b""
        self._inode, self.size = status.st_ino, status.st_size

    def _add_lines(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: defaultdict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for line in map(_parse_line, lines):
            if line is None:
                continue
            step = line.pop("step")
            self.num_lines += 1
            for name, value in line.items():
                if is_plain_number(value):
                    steps, values = found[name]
                    steps.append(step)
                    values.append(value)
                elif name == "loss/current":
                    self.num_skipped_steps += 1
            self.last_step = step
        for name, (steps, values) in found.items():
            self.series[_get_current_name(name)].append(steps, values)

    def find_names(self, prefix: str) -> list[str]:
        """Return the names of all metrics with this prefix, sorted."""
        return sorted(name for name in self.series if name.startswith(prefix))

    def get_last(self, name: str) -> float | None:
        """Return the latest value of a metric."""
        return self.series[name].last if name in self.series else None
