"""Long work of the page in a thread of its own: how far it is, what came of it, and the wish to stop it."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError, format_error
from ..log import PROGRESS_LISTENER


class WorkStopped(UserError):
    """The user has stopped the work; what was done until then stays."""


@dataclass
class BackgroundWork:
    """One piece of work; progress bars of the code that it runs tell how far it is."""

    title: str
    if_stopped: str
    """What is said of what was done until then."""

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
            self.problems = str(error).splitlines()
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
