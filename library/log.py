"""Messages and progress for the person who waits: one set-up, rank 0 speaks, progress stays on one line."""

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from .errors import ConfigError

ROOT = __name__.rpartition(".")[0]
SECONDS_BETWEEN_LINES = 15.0
"""How often progress is told where there is no terminal to draw a bar on."""

_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}


def set_up(*, level: str = "INFO", file: str | None = None, simple: bool = False, quiet: bool = False,
           rank: int = 0) -> None:  # fmt: skip
    """Send this package's messages to the terminal or a file; ranks other than 0 tell only errors."""
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    to_file = file is not None and rank == 0
    handler = _file_handler(Path(str(file))) if to_file else _BesideProgress()
    handler.setFormatter(_Format(simple, colour=not to_file and sys.stderr.isatty(), rank=rank))
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if rank else "WARNING" if quiet else level)
    logger.propagate = False
    # It would send users after a package that nothing here needs.
    logging.getLogger("transformers.utils.import_utils").addFilter(_not_about_torchvision)


def _not_about_torchvision(record: logging.LogRecord) -> bool:
    return "torchvision" not in record.getMessage()


def _file_handler(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(path, mode="w", encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"--console_log_file: {path} cannot be written: {error.strerror}"]) from None


class _BesideProgress(logging.Handler):
    """Writes above a progress bar instead of into it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # as every handler does: a message that cannot be written must not end the run
            self.handleError(record)


class _Format(logging.Formatter):
    def __init__(self, simple: bool, colour: bool, rank: int):
        super().__init__("%(message)s" if simple else "%(asctime)s  %(message)s", datefmt="%H:%M:%S")
        self.colour, self.rank = colour and not simple, rank

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        if self.rank:
            text = f"[rank {self.rank}] {text}"
        colour = _COLOURS.get(record.levelno) if self.colour else None
        return f"{colour}{text}\033[0m" if colour else text


class Progress:
    """A bar on a terminal, now and then a line elsewhere, nothing when it is not wanted."""

    def __init__(self, total: int, done: int, what: str, *, wanted: bool, unit: str = "step", ends: bool = True):
        """Without ``ends``, the first and the last of all get no line of their own, as for what is mostly quick."""
        self.total, self.done, self.what, self.ends = total, done, what, ends
        self.logger = logging.getLogger(f"{ROOT}.progress")
        self.started, self.first = time.monotonic(), done
        self.told = self.started
        shown = wanted and self.logger.isEnabledFor(logging.INFO)
        self.on_terminal = shown and sys.stderr.isatty()
        self.in_lines = shown and not self.on_terminal
        self.bar = tqdm(total=total, initial=done, unit=unit, disable=not self.on_terminal, dynamic_ncols=True)
        self.bar.set_description(what)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.close()

    def expect(self, total: int) -> None:
        """There is more, or less, to do than was thought."""
        self.total = self.bar.total = total

    def advance(self, figures: Mapping[str, str], count: int = 1) -> None:
        """One or more further; ``figures`` stand beside the bar."""
        if not count:
            return
        is_end = self.done == self.first or self.done + count == self.total
        self.done += count
        if self.on_terminal:
            self.bar.set_postfix(figures, refresh=False)
            self.bar.update(count)
        now = time.monotonic()
        if self.in_lines and (now - self.told >= SECONDS_BETWEEN_LINES or (self.ends and is_end)):
            self.told = now
            seconds = (now - self.started) / (self.done - self.first) * (self.total - self.done)
            parts = [f"{self.done}/{self.total}", *(f"{name} {value}" for name, value in figures.items())]
            self.logger.info("%s %s, %s left", self.what, ", ".join(parts), clock(seconds))


def clock(seconds: float) -> str:
    """``1:02:03`` for a length of time."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
