"""Try something that may hang or crash, in a process of its own, and tell how it went."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]

CALL = """
import importlib, json, sys
answer = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])
sys.stdout.write("\\n" + json.dumps(answer))
"""

OF_A_LAUNCHER = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""What a trial must not inherit: it is one process that nobody launched."""


@dataclass(frozen=True)
class Attempt:
    """What came of it: an answer, or a reason."""

    ok: bool
    answer: Any
    reason: str
    seconds: float


def attempt(module: str, function: str, *arguments: str, seconds: float) -> Attempt:
    """Call ``function`` of ``module`` with texts; its answer has to fit into JSON."""
    command = [sys.executable, "-c", CALL, module, function, *arguments]
    started = time.monotonic()
    # Into files: a pipe would stay open as long as anything lives that the trial started.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                                   env=_environment(os.environ), start_new_session=True)  # fmt: skip
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Attempt(False, None, f"no answer within {seconds:g} s", time.monotonic() - started)
        finally:
            _end(process)
        took = time.monotonic() - started
        if code != 0:
            return Attempt(False, None, _why(code, _all_of(err)), took)
        last = _all_of(out).rpartition("\n")[2]
    try:
        return Attempt(True, json.loads(last), "", took)
    except json.JSONDecodeError:
        return Attempt(False, None, "ended without an answer", took)


def import_all(*modules: str) -> dict[str, str]:
    """Import each, and say why those that failed did."""
    failed = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            failed[module] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
    return failed


def found_elsewhere(name: str, folder: str) -> Attempt:
    """Where a Python that is started in another folder finds a package of this name."""
    source = f"import {name} as it; print(it.__file__ or list(it.__path__)[0])"
    try:
        done = subprocess.run([sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, timeout=60,
                              check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return Attempt(False, None, "no answer within 60 s", 60)
    return Attempt(done.returncode == 0, done.stdout.strip(), _why(done.returncode, done.stderr), 0)


def command_output(command: list[str]) -> str | None:
    """What a program says; ``None`` when it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in environment.items()
             if name not in RANK_NAMES and not name.startswith(OF_A_LAUNCHER)}  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    return {**clean, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of it, with all that it started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")


def _why(code: int, err: str) -> str:
    """The error that a traceback ends with, without the advice below it; for a crash, the signal."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}"
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines)[-1][:300] if lines else f"ended with exit code {code}"
