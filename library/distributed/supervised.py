"""A launcher watched over: requests to end go to the training processes, and their exit code comes back.

``accelerate launch`` and ``torchrun`` kill what they started half a minute after a signal, die of SIGUSR1, start
processes again that ended as they were told, and report 1 whatever these said.  So they learn nothing of it: a signal
goes past them, and the training processes end with 0 and leave their exit code in a folder.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from ..errors import UserError

VARIABLE = "LORIKEET_SUPERVISOR"
"""Names the folder in which both sides leave words for each other."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
ASKED, CODE, PROCESS = "asked", "code", "process-"


def supervise(command: Sequence[str]) -> int:
    """Run a launcher; return its exit code, or that of a run that was asked to end."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as name:
        folder, asked, launchers = Path(name), list[int](), list[subprocess.Popen[bytes]]()

        def pass_on(number: int, frame: FrameType | None) -> None:
            asked.append(number)
            _write(folder / ASKED, number)
            for launcher in launchers:
                processes = _training_below(launcher.pid, folder)
                for process in processes:
                    with suppress(psutil.Error):
                        process.send_signal(number)
                if not processes:  # nothing is trained yet that could be kept
                    launcher.terminate()

        before = {number: signal.signal(number, pass_on) for number in numbers()}
        # What is ignored is inherited.  A scheduler may send SIGUSR1 to every process, and a launcher would die of it;
        # training processes set it anew.
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            launchers.append(subprocess.Popen(command, env=os.environ | {VARIABLE: name}, start_new_session=True))
            if hasattr(signal, "SIGUSR1"):
                signal.signal(signal.SIGUSR1, pass_on)
            code = launchers[0].wait()
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror}") from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if (left := _read(folder / CODE)) is not None:
            return left
        return 128 + asked[-1] if asked else 128 - code if code < 0 else code


def numbers() -> list[int]:
    """The signals that ask a run to end, as far as this system has them."""
    return [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]


def listen() -> int | None:
    """This process takes signals from now on; the one that came before, if any."""
    if VARIABLE not in os.environ:
        return None
    folder = Path(os.environ[VARIABLE])
    _write(folder / f"{PROCESS}{os.getpid()}", 0)
    return _read(folder / ASKED)


def exit_code_for_launcher(code: int) -> int:
    """What a process that was asked to end returns; one that watches over the launcher gets the code itself."""
    if VARIABLE not in os.environ:
        return code
    _write(Path(os.environ[VARIABLE]) / CODE, code)
    return 0


def _training_below(launcher: int, folder: Path) -> list[psutil.Process]:
    """Those that take signals; others may have their numbers by now, if a launcher started processes again."""
    try:
        living = {process.pid: process for process in psutil.Process(launcher).children(recursive=True)}
    except psutil.Error:
        return []
    pids = [int(path.name.removeprefix(PROCESS)) for path in folder.glob(f"{PROCESS}*")]
    return [living[pid] for pid in pids if pid in living]


def _write(path: Path, number: int) -> None:
    with suppress(OSError):  # whoever made the folder is gone, and nobody is there to read it
        new = path.with_name(f".{path.name}-{os.getpid()}")
        new.write_text(str(number), "ascii")
        new.replace(path)


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None
