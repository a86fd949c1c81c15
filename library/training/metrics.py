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
        self.path, self.works = path, True
        self.losses: list[float] = []
        """Those of the steps before, in a run that goes on, but for steps that were left out."""
        self._guarded(lambda: self._begin(from_step))

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """One line, complete when this returns.  A file that cannot be written is told once and left behind."""
        values = {name: _plain(value) for name, value in figures.items()}
        line = json.dumps({"step": step, **values}, ensure_ascii=False) + "\n"
        if self.works:
            self._guarded(lambda: self._append(line))

    def _begin(self, from_step: int) -> None:
        kept = [line for line in read_lines(self.path) if line["step"] <= from_step] if from_step else []
        self.losses = [line["loss/current"] for line in kept if line.get("loss/current") is not None]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        new.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), "utf-8")
        new.replace(self.path)

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except OSError as error:
            self.works = False
            logger.warning("%s: cannot be written and is left behind: %s", self.path, error.strerror)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The figures in the file; a line that was cut off, or that something else wrote, is none."""
    try:
        texts = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in map(_line, texts) if line is not None]


def _line(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _plain(value: Any) -> Any:
    """JSON has no word for what is no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
