"""Every figure of a run in one file, a line of JSON for each step, whatever trackers there are."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends; a run that goes on from step n keeps the lines up to there and writes what follows anew."""

    def __init__(self, path: Path, from_step: int):
        self.path, self.is_writable = path, True
        self.previous_losses: list[float] = []
        """Those of the steps before, in a run that goes on, but for steps that were left out."""
        self._try_write(lambda: self._start_file(from_step))

    def write_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line, complete when this returns.  A file that cannot be written is told once and left behind."""
        values = {name: _to_json_value(value) for name, value in metrics.items()}
        line = json.dumps({"step": step, **values}, ensure_ascii=False) + "\n"
        if self.is_writable:
            self._try_write(lambda: self._append_line(line))

    def _start_file(self, from_step: int) -> None:
        kept = [line for line in read_metrics(self.path) if line["step"] <= from_step] if from_step else []
        self.previous_losses = [line["loss/current"] for line in kept if line.get("loss/current") is not None]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        new.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), "utf-8")
        new.replace(self.path)

    def _append_line(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _try_write(self, function: Any) -> None:
        try:
            function()
        except OSError as error:
            self.is_writable = False
            logger.warning("%s: cannot be written and is left behind: %s", self.path, error.strerror)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The figures in the file; a line that was cut off, or that something else wrote, is none."""
    try:
        texts = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in map(_parse_line, texts) if line is not None]


def _parse_line(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _to_json_value(value: Any) -> Any:
    """JSON has no word for what is no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
