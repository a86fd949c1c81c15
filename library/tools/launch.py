"""``python -m library launch accelerate launch ...``: forward signals to training processes, return their exit code.

``accelerate launch`` and ``torchrun`` kill their processes 30 s after SIGTERM, die of SIGUSR1, restart processes that
ended as they were asked to, and return 1 for every exit code.  So signals go past them, straight to the training
processes, which end with 0 and leave their exit code in a directory (``distributed/signals.py``).
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from ..distributed.signals import (
    EXIT_CODE_FILE,
    PROCESS_PREFIX,
    SIGNAL_FILE,
    SUPERVISOR_DIR,
    list_stop_signals,
    read_number,
    write_number,
)
from ..errors import UserError

USAGE = """usage: python -m library launch LAUNCHER ...

Starts accelerate launch, torchrun or the like.  SIGTERM, SIGINT and SIGUSR1 are forwarded to the training processes;
if the run stops because of a signal, its exit code (--requeue_exit_code) is returned:

  python -m library launch accelerate launch --multi_gpu --num_processes 8 train_lora.py ... --requeue_exit_code 75"""


def run_launch(argv: Sequence[str]) -> tuple[str, int]:
    """Run the launcher; nothing is printed but help."""
    if argv and argv[0] in ("--help", "-h"):
        return USAGE, 0
    command = list(argv[1:]) if argv and argv[0] == "--" else list(argv)
    if not command:
        raise UserError(f"no launcher given\n{USAGE}")
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as folder:
        return "", Supervisor(Path(folder)).run(command)


class Supervisor:
    """Runs one launcher; ``folder`` is shared with its training processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []

    def run(self, command: Sequence[str]) -> int:
        """Return the exit code of a run that was stopped by a signal, else that of the launcher."""
        environment = os.environ | {SUPERVISOR_DIR: str(self.folder)}
        with self._forwarding():
            try:
                # In a session of its own it does not get the terminal's Ctrl-C a second time.
                self.launcher = subprocess.Popen(command, env=environment, start_new_session=True)
            except OSError as error:
                raise UserError(f"{command[0]}: cannot be started: {error.strerror}") from None
            if hasattr(signal, "SIGUSR1"):
                signal.signal(signal.SIGUSR1, self._forward)
            code = self.launcher.wait()
        if (reported := read_number(self.folder / EXIT_CODE_FILE)) is not None:
            return reported
        return 128 + self.received[-1] if self.received else 128 - code if code < 0 else code

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._forward) for number in list_stop_signals()}
        # The launcher inherits what is ignored: schedulers may send SIGUSR1 to every process, and it would die of it.
        # Training processes set their own handler.
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        write_number(self.folder / SIGNAL_FILE, number)  # for processes that register later
        if self.launcher is None:
            return
        processes = self._find_training_processes(self.launcher.pid)
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)
        if not processes:  # nothing is trained yet that could be saved
            self.launcher.terminate()

    def _find_training_processes(self, launcher: int) -> list[psutil.Process]:
        """Return the registered processes below the launcher; others may have got the ids of ended ones."""
        try:
            children = {process.pid: process for process in psutil.Process(launcher).children(recursive=True)}
        except psutil.Error:
            return []
        registered = [int(path.name.removeprefix(PROCESS_PREFIX)) for path in self.folder.glob(f"{PROCESS_PREFIX}*")]
        return [children[pid] for pid in registered if pid in children]
