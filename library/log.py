"""Logging and progress bars: one configuration, messages of rank 0 only, progress on one line."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tqdm import tqdm

from .errors import FileError
from .problems import Problem

T = TypeVar("T")
ROOT_LOGGER_NAME = __name__.rpartition(".")[0]
PROGRESS_LOG_INTERVAL = 15.0
"""Seconds between progress lines when there is no terminal to draw a bar on."""

_LEVEL_COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}


def configure_logging(
    *, level: str = "INFO", file: str | None = None, simple: bool = False, quiet: bool = False, rank: int = 0
) -> None:
    """Send this package's messages to the terminal or a file; ranks other than 0 log only errors."""
    logger = logging.getLogger(ROOT_LOGGER_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    to_file = file is not None and rank == 0
    handler = _open_log_file(Path(str(file))) if to_file else _TqdmHandler()
    handler.setFormatter(_LogFormatter(simple, use_color=not to_file and sys.stderr.isatty(), rank=rank))
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if rank else "WARNING" if quiet else level)
    logger.propagate = False
    # It recommends torchvision, which nothing here needs.
    logging.getLogger("transformers.utils.import_utils").addFilter(_drop_torchvision_messages)


def _drop_torchvision_messages(record: logging.LogRecord) -> bool:
    return "torchvision" not in record.getMessage()


def _open_log_file(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(path, mode="w", encoding="utf-8")
    except OSError as error:
        raise FileError([Problem("console_log_file", f"{path} cannot be written: {error.strerror}")]) from None


class _TqdmHandler(logging.Handler):
    """Write above the progress bar instead of into it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # a message that cannot be written must not end the run
            self.handleError(record)


class _LogFormatter(logging.Formatter):
    def __init__(self, simple: bool, use_color: bool, rank: int):
        super().__init__("%(message)s" if simple else "%(asctime)s  %(message)s", datefmt="%H:%M:%S")
        self.use_color, self.rank = use_color and not simple, rank

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        if self.rank:
            text = f"[rank {self.rank}] {text}"
        color = _LEVEL_COLORS.get(record.levelno) if self.use_color else None
        return f"{color}{text}\033[0m" if color else text


PROGRESS_LISTENER: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("progress_listener", default=None)
"""Gets description, completed and total of the progress bars of its thread; what it raises ends their work."""


class ProgressBar:
    """A progress bar on a terminal, and log lines elsewhere.

    ``log_first_and_last`` logs a line for the first and the last update, whatever the time.
    """

    def __init__(
        self,
        total: int,
        initial: int,
        description: str,
        *,
        enabled: bool,
        unit: str = "step",
        log_first_and_last: bool = True,
    ):
        self.total, self.completed, self.description = total, initial, description
        self.log_first_and_last = log_first_and_last
        self.logger = logging.getLogger(f"{ROOT_LOGGER_NAME}.progress")
        self.initial, self.last_logged_at = initial, time.monotonic()
        self.first_update: tuple[float, int] | None = None
        """Time and count after the first update, which starts workers, compiles and allocates: no measure of speed."""
        is_shown = enabled and self.logger.isEnabledFor(logging.INFO)
        self.draws_bar = is_shown and sys.stderr.isatty()
        self.logs_lines = is_shown and not self.draws_bar
        self.bar = tqdm(total=total, initial=initial, unit=unit, disable=not self.draws_bar, dynamic_ncols=True)
        self.bar.set_description(description)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.close()

    def set_total(self, total: int) -> None:
        self.total = self.bar.total = total

    def update(self, metrics: Mapping[str, str], count: int = 1) -> None:
        """Advance by ``count``, and show the metrics next to the bar."""
        if not count:
            return
        if (listener := PROGRESS_LISTENER.get()) is not None:
            listener(self.description, self.completed + count, self.total)
        is_end = self.completed == self.initial or self.completed + count == self.total
        self.completed += count
        if self.draws_bar:
            self.bar.set_postfix(metrics, refresh=False)
            self.bar.update(count)
        now = time.monotonic()
        if self.logs_lines and (
            now - self.last_logged_at >= PROGRESS_LOG_INTERVAL or (self.log_first_and_last and is_end)
        ):
            self.last_logged_at = now
            parts = [f"{self.completed}/{self.total}", *(f"{name} {value}" for name, value in metrics.items())]
            if self.first_update is not None:
                since, count_before = self.first_update
                seconds = (now - since) / (self.completed - count_before) * (self.total - self.completed)
                parts.append(f"{format_duration(seconds)} left")
            self.logger.info("%s %s", self.description, ", ".join(parts))
        self.first_update = self.first_update or (now, self.completed)


def iter_with_progress(items: Sequence[T], description: str, unit: str) -> Iterator[T]:
    """Iterate over the items with a progress bar."""
    with ProgressBar(len(items), 0, description, enabled=True, unit=unit, log_first_and_last=False) as progress:
        for item in items:
            yield item
            progress.update({})


def format_duration(seconds: float) -> str:
    """Format seconds as ``1:02:03``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
