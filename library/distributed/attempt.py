"""Try something that may hang or crash, in a process of its own, and tell how it went."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
                               errors="replace", stdin=subprocess.DEVNULL, env=_environment(os.environ),
                               start_new_session=True)  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return Attempt(False, None, f"no answer within {seconds:g} s", time.monotonic() - started)
    took = time.monotonic() - started
    if process.returncode != 0:
        return Attempt(False, None, _why(process.returncode, err), took)
    return Attempt(True, json.loads(out.rpartition("\n")[2]), "", took)


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


def _end(process: "subprocess.Popen[str]") -> None:
    """End it with all that it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()


def _why(code: int, err: str) -> str:
    """The last line of a traceback; for a crash, the signal."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}"
    return lines[-1][:300] if lines else f"ended with exit code {code}"
