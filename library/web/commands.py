"""Commands of the project that the page runs and waits for, such as ``plan``: each a process that can be stopped."""

import json
import os
import subprocess
import tempfile
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from .background import PROGRESS_FILE
from .validate_requests import TRAINING_SCRIPT

PROGRESS_NAME = "progress.json"
MAX_KEPT, MAX_RUNNING = 16, 2
MAX_OUTPUT_BYTES = 200_000
END_SECONDS = 10.0
"""The time that commands have to remove their unfinished files when the page ends."""


@dataclass
class Command:
    """One process and what it has printed; its settings and output are in a temporary folder."""

    process: "subprocess.Popen[bytes]"
    folder: "tempfile.TemporaryDirectory[str]"
    started_at: float
    words: Sequence[str] = ()
    is_stopped: bool = False

    def read_progress(self) -> Mapping[str, Any] | None:
        """Read how far the command has come; None if it does not report that."""
        try:
            progress: Mapping[str, Any] = json.loads((Path(self.folder.name) / PROGRESS_NAME).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return progress

    def read_output(self) -> str:
        with (Path(self.folder.name) / "output").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - MAX_OUTPUT_BYTES))
            return file.read().decode("utf-8", "replace").replace(f"{self.folder.name}{os.sep}", "")


@dataclass
class CommandRunner:
    """The commands that were started last."""

    _commands: "OrderedDict[str, Command]" = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, words: Sequence[str], settings: str | None = None) -> str:
        """Start a command, with these settings as its ``--config_file``; return the id to ask for it."""
        with self._lock:
            if sum(command.process.poll() is None for command in self._commands.values()) >= MAX_RUNNING:
                raise UserError(f"{MAX_RUNNING} commands are running already; wait for one or stop it")
            folder = tempfile.TemporaryDirectory(prefix="lorikeet-web-", ignore_cleanup_errors=True)
            words = list(words)
            if settings is not None:
                (Path(folder.name) / "run.toml").write_text(settings, "utf-8")
                words += ["--config_file", str(Path(folder.name) / "run.toml")]
            root, own = str(TRAINING_SCRIPT.parent), os.environ.get("PYTHONPATH", "")
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, own]))}
            environment["PYTHONUTF8"] = "1"  # what it prints into a file is in the code page of Windows otherwise
            environment[PROGRESS_FILE] = str(Path(folder.name) / PROGRESS_NAME)
            with (Path(folder.name) / "output").open("wb") as output:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
                )
            name = uuid.uuid4().hex[:12]
            self._commands[name] = Command(process, folder, time.monotonic(), words)
            self._forget_finished()
            return name

    def find_running(self, words: Sequence[str]) -> str | None:
        """Return the id of a command that runs already, such as for a page that was loaded again."""
        with self._lock:
            running = {name: command for name, command in self._commands.items() if command.process.poll() is None}
            return next((name for name, each in running.items() if [*each.words] == [*words]), None)

    def _forget_finished(self) -> None:
        """Forget the oldest commands that have ended, as far as there are too many; those that run are kept."""
        ended = [name for name, command in self._commands.items() if command.process.poll() is not None]
        for name in ended[: max(0, len(self._commands) - MAX_KEPT)]:
            self._commands.pop(name).folder.cleanup()

    def describe(self, name: str) -> dict[str, Any]:
        """Say whether it is running, how long, and what it has printed."""
        command = self._get(name)
        code = command.process.poll()
        return {
            "is_running": code is None,
            "is_stopped": command.is_stopped,
            "code": code,
            "seconds": time.monotonic() - command.started_at,
            "output": command.read_output(),
            "progress": command.read_progress() if code is None else None,
        }

    def stop(self, name: str) -> None:
        command = self._get(name)
        command.is_stopped = True
        command.process.terminate()

    def stop_all(self) -> None:
        """End all commands when the page ends, since nobody waits for them any more."""
        for command in self._commands.values():
            command.process.terminate()
        for command in self._commands.values():
            try:
                command.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                command.process.kill()
                command.process.wait()
            command.folder.cleanup()

    def _get(self, name: str) -> Command:
        command = self._commands.get(name)
        if command is None:
            raise UserError("this result is no longer kept; ask again")
        return command
