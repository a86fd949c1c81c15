"""Programs that a bench starts: several processes as one group, none of which outlives the bench."""

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SECONDS_TO_FOLLOW = 60.0
"""That other processes have when one has ended with an error."""
SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Ended:
    """One process of a group."""

    code: int
    said: str
    errors: str


def with_library() -> dict[str, str]:
    """The environment for programs of a bench, which may run in any folder."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def together(count: int, words: Sequence[str]) -> list[Ended]:
    """So many of the same Python program, which know each other as a launcher would have told them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="lorikeet-bench-") as name:
        everybody = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                     "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # fmt: skip
        places = [{"RANK": rank, "LOCAL_RANK": rank, **everybody} for rank in range(count)]
        with started(words, places, Path(name)) as processes:
            until = math.inf
            while any(process.poll() is None for process in processes) and time.monotonic() < until:
                if any(process.poll() for process in processes):
                    until = min(until, time.monotonic() + SECONDS_TO_FOLLOW)
                time.sleep(SECONDS_BETWEEN_LOOKS)
        return [Ended(process.returncode, *(_text(Path(name) / f"{kind}-{rank}") for kind in ("said", "errors")))
                for rank, process in enumerate(processes)]  # fmt: skip


@contextmanager
def started(words: Sequence[str], places: Sequence[Mapping[str, object]],
            folder: Path) -> Iterator[list["subprocess.Popen[bytes]"]]:  # fmt: skip
    """One for each of ``places``, by which their environments differ; what is left of them in the end is killed.

    What they say goes into files in ``folder``: nobody has to read it for them to go on.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, place in enumerate(places):
            environment = {**with_library(), **{name: str(value) for name, value in place.items()}}
            with (open(folder / f"said-{number}", "wb") as said, open(folder / f"errors-{number}", "wb") as errors,
                  _interrupted_afterwards()):  # fmt: skip
                processes.append(subprocess.Popen([sys.executable, *words], stdout=said, stderr=errors,
                                                  env=environment))  # fmt: skip
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """An interrupt that comes inside counts at the end: nobody would know the process that was just being started."""
    obey = signal.getsignal(signal.SIGINT)
    if not callable(obey) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, obey)
    for number, frame in came[:1]:
        obey(number, frame)


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")
