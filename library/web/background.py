"""Long work of the page, in a thread or a process of its own: how far it is, what came of it, the wish to stop it.

``python -m library.web.background TOOL ...`` is ``python -m library TOOL ...`` with its progress in a file.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..atomic_files import replace_path
from ..cli import run_tool
from ..errors import UserError, format_error
from ..log import PROGRESS_LISTENER

PROGRESS_FILE = "LORIKEET_PROGRESS_FILE"
"""Environment variable: where a tool of the page writes how far it is."""

REPORT_SECONDS = 0.2


class WorkStopped(UserError):
    """The user has stopped the work; what was done until then stays."""


@dataclass
class BackgroundWork:
    """One piece of work; progress bars of the code that it runs tell how far it is."""

    title: str
    if_stopped: str
    """The message about what was done until a stop."""

    completed: int = 0
    total: int = 0
    is_running: bool = True
    is_stopping: bool = False
    result: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def start(self, run: Callable[["BackgroundWork"], Mapping[str, Any]]) -> "BackgroundWork":
        """Run it in a thread; it ends when ``run`` returns or raises."""
        threading.Thread(target=self._run, args=[run], name=self.title, daemon=True).start()
        return self

    def _run(self, run: Callable[["BackgroundWork"], Mapping[str, Any]]) -> None:
        PROGRESS_LISTENER.set(self.report)
        started = time.monotonic()
        try:
            self.result = run(self)
        except UserError as error:
            self.problems = list(map(str, error.problems))
        except Exception as error:  # a thread has nobody to raise to
            self.problems = [format_error(error)]
        finally:
            self.seconds, self.is_running = time.monotonic() - started, False

    def report(self, title: str, completed: int, total: int) -> None:
        """Tell how far it is; raise ``WorkStopped`` if it is to stop."""
        self.title, self.completed, self.total = title, completed, total
        if self.is_stopping:
            raise WorkStopped(f"stopped after {completed:,} of {total:,}: {self.if_stopped}")

    def export_json(self) -> dict[str, Any]:
        names = ("title", "completed", "total", "is_running", "is_stopping", "problems")
        return {**{name: getattr(self, name) for name in names}, **self.result}


def run_watched_tool(argv: Sequence[str]) -> int:
    """Run a tool, and write its progress to a file; a signal to end lets it remove what is not complete."""
    path, written_at = Path(os.environ[PROGRESS_FILE]), 0.0

    def report(title: str, completed: int, total: int) -> None:
        nonlocal written_at
        if time.monotonic() - written_at < REPORT_SECONDS:
            return
        written_at, temporary = time.monotonic(), path.with_suffix(".part")
        temporary.write_text(json.dumps({"title": title, "completed": completed, "total": total}), "utf-8")
        replace_path(temporary, path)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    PROGRESS_LISTENER.set(report)
    return run_tool(argv)


if __name__ == "__main__":
    raise SystemExit(run_watched_tool(sys.argv[1:]))
