"""``python -m library launch accelerate launch ...``: forward signals to training processes, return their exit code.

``accelerate launch`` and ``torchrun`` kill their processes 30 s after SIGTERM, die of SIGUSR1, restart processes that
ended as they were asked to, and return 1 for every exit code.  So signals go past them, straight to the training
processes, which end with 0 and leave their exit code in a directory (``distributed/signals.py``).

Launchers of several machines wait in silence for machines that never come, and start no process that could tell, so
this is told here.
"""

import logging
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from ..distributed.signals import (
    EXIT_CODE_FILE,
    PROCESS_PREFIX,
    SIGNAL_FILE,
    SUPERVISOR_DIR,
    SUPERVISOR_FILE,
    can_send_signals,
    list_stop_signals,
    read_number,
    write_number,
)
from ..errors import UserError

logger = logging.getLogger(__name__)
WATCH_INTERVAL_SECONDS = 30.0
DEFAULT_PORT = 29500  # the default of accelerate and torchrun

USAGE = """usage: python -m library launch LAUNCHER ...

Starts accelerate launch, torchrun or the like.  SIGTERM, SIGINT and SIGUSR1 are forwarded to the training processes;
if the run stops because of a signal, its exit code (--requeue_exit_code) is returned.  While machines are missing, a
line every half minute says so:

  python -m library launch accelerate launch --multi_gpu --num_processes 8 train_lora.py ... --requeue_exit_code 75"""


def run_launch(argv: Sequence[str]) -> tuple[str, int]:
    """Run the launcher; nothing is printed but help."""
    if argv and argv[0] in ("--help", "-h"):
        return USAGE, 0
    command = list(argv[1:]) if argv and argv[0] == "--" else list(argv)
    if not command:
        raise UserError(f"no launcher given\n{USAGE}")
    # A training process may still write there when the launcher has ended, and Windows removes no open file.
    with tempfile.TemporaryDirectory(prefix="lorikeet-", ignore_cleanup_errors=True) as folder:
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
        write_number(self.folder / SUPERVISOR_FILE, os.getpid())
        with self._forwarding():
            try:
                # In a session of its own it does not get the terminal's Ctrl-C a second time.
                # On Windows a process group does the same; its processes are asked to stop by a file.
                flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
                self.launcher = subprocess.Popen(command, env=environment, start_new_session=True, creationflags=flags)
            except OSError as error:
                raise UserError(f"{command[0]}: cannot be started: {error.strerror}") from None
            if hasattr(signal, "SIGUSR1"):
                signal.signal(signal.SIGUSR1, self._forward)
            code = self._wait(command)
        if (reported := read_number(self.folder / EXIT_CODE_FILE)) is not None:
            return reported
        return 128 + self.received[-1] if self.received else 128 - code if code < 0 else code

    def _wait(self, command: Sequence[str]) -> int:
        """Wait for the launcher; until it starts training processes, report the machines that it waits for."""
        assert self.launcher is not None
        meeting_point = None
        while not any(self.folder.glob(f"{PROCESS_PREFIX}*")):
            with suppress(subprocess.TimeoutExpired):
                return self.launcher.wait(WATCH_INTERVAL_SECONDS)
            if (meeting_point := meeting_point or find_meeting_point(command)) is None:
                break
            if message := meeting_point.describe_missing_machines():
                logger.warning("%s", message)
        return self.launcher.wait()

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
        for process in processes if can_send_signals() else ():  # which otherwise have seen the file
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


@dataclass(frozen=True)
class MeetingPoint:
    """The place where the launchers of several machines find each other."""

    address: str
    port: int
    num_machines: int
    machine_rank: int | None
    """``None`` with torchrun's c10d rendezvous, where machines number themselves."""

    def describe_missing_machines(self) -> str | None:
        """Say what this machine waits for; ``None`` if all machines have joined."""
        from ..distributed.rendezvous import count_joined_launchers

        where = f"{self.address}:{self.port}"
        here = f"machine {self.machine_rank} of {self.num_machines}"
        if self.machine_rank is None:
            here = f"one of {self.num_machines} machines"
        try:
            socket.create_connection((self.address, self.port), timeout=5).close()
        except OSError as error:
            return f"{here}: nothing answers at {where} ({error.strerror or error}); {self._advise_unreachable()}"
        addresses = self._list_joined_addresses()
        joined = max(count_joined_launchers(self.address, self.port), len(addresses or ()))
        if joined >= self.num_machines:
            return None
        if not joined:  # a c10d rendezvous on another machine
            return f"{here} waits at {where} for others; the log of the machine with that address counts them"
        missing = self.num_machines - joined
        which = f"{missing} machine has" if missing == 1 else f"{missing} machines have"
        if self.num_machines == 2 and self.machine_rank is not None:
            which = f"machine {1 - self.machine_rank} has"
        names = f" (joined: {', '.join(addresses)})" if addresses else ""
        rank = "" if self.machine_rank is None else ", with its own --machine_rank or --node_rank"
        return f"{here} waits at {where}: {which} not joined yet{names}; start the same command there{rank}"

    def _advise_unreachable(self) -> str:
        if self.machine_rank == 0:
            return "--main_process_ip or --master_addr must be an address of this machine"
        first = "the machine with this address" if self.machine_rank is None else "machine 0"
        return f"is {first} started, the address right, and the port open in its firewall?"

    def _list_joined_addresses(self) -> list[str] | None:
        """The machines that are connected to the store; ``None`` if it is not on this one."""
        with suppress(psutil.Error, OSError):
            connections = psutil.net_connections("tcp")
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port == self.port for each in connections):
                established = (each for each in connections if each.status == psutil.CONN_ESTABLISHED)
                return sorted(
                    {each.raddr.ip.removeprefix("::ffff:") for each in established if each.laddr.port == self.port}
                )
        return None


def find_meeting_point(command: Sequence[str]) -> MeetingPoint | None:
    """Find where running launchers of this command meet; ``None`` for one machine, unknown launchers or rendezvous."""
    from ..distributed.launch_command import parse_launch_command, predict_script_environment

    try:
        parsed = parse_launch_command(command, os.environ)
        environment = {} if parsed is None else predict_script_environment(parsed, is_running=True)
        count, rank = int(environment.get("GROUP_WORLD_SIZE", 1)), int(environment.get("GROUP_RANK", 0))
        port = int(environment.get("MASTER_PORT") or DEFAULT_PORT)
    except (UserError, ValueError):
        return None
    backend = "static" if parsed is None else parsed.options.get("rdzv_backend", "static")
    if count < 2 or backend not in ("static", "c10d") or not environment["MASTER_ADDR"]:
        return None
    return MeetingPoint(environment["MASTER_ADDR"], port, count, rank if backend == "static" else None)
