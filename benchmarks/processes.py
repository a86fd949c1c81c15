"""Programs that a benchmark starts: training commands up to their first step, and workers under torchrun.

None of them outlives the benchmark.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from library.errors import ConfigError, UserError
from library.log import configure_logging
from library.problems import load_problem

from .synthetic_run import build_run

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [str(ROOT / "train_lora.py")]
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
TAIL = 3000
"""Characters of a failed program's stderr that are shown."""


@contextmanager
def start_python(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """Start a Python program that can import this repository; terminate it in the end, with its own children."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, **(environment or {}), "PYTHONPATH": path},
    )
    assert process.stderr is not None
    try:
        yield process
    finally:
        process.terminate()  # not killed: torchrun has to terminate its workers
        process.stderr.close()
        process.wait()


def measure_first_step(arguments: Sequence[str], *, stop: bool) -> float:
    """Run a training program, to its end unless ``stop``; return the seconds until it logs its first step."""
    start, seconds, lines = time.perf_counter(), None, list[str]()
    with start_python(arguments) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if seconds is None and "training 1/" in line:
                seconds = time.perf_counter() - start
                if stop:
                    process.kill()
        process.wait()
    if seconds is None or (process.returncode and not stop):
        raise UserError(f"{' '.join(arguments)[:200]} failed:\n{''.join(lines)[-TAIL:]}")
    return seconds


def run_workers(
    function: str,
    options: Mapping[str, Any],
    training_options: Sequence[str],
    world_size: int,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Build a run on each rank and call ``function`` ("module:name") with it; return what it returns on each rank."""
    launcher = [] if world_size == 1 else [*TORCHRUN, f"--nproc-per-node={world_size}"]
    with tempfile.TemporaryDirectory() as name:
        worker = ["-m", __name__, name, function, json.dumps(options), *training_options]
        with start_python([*launcher, *worker], environment) as process:
            _, errors = process.communicate()
        results = [json.loads(path.read_text("utf-8")) for path in sorted(Path(name).glob("*.json"))]
    if rejected := [result["problems"] for result in results if "problems" in result]:
        raise ConfigError(map(load_problem, rejected[0]))
    if process.returncode:
        raise UserError(f"a worker of {function} failed:\n{errors[-TAIL:]}")
    return [result["result"] for result in results]


def run_worker(argv: Sequence[str]) -> int:
    """Be one of the workers: write the result, or why the options were rejected, to a file."""
    directory, function, options, *training_options = argv
    rank = int(os.environ.get("RANK", "0"))
    rank_directory = Path(directory) / f"rank{rank:04d}"
    rank_directory.mkdir()
    configure_logging(quiet=True, simple=True, rank=rank)
    try:
        with build_run(training_options, rank_directory) as run:
            content = {"result": resolve_name(function)(run, **json.loads(options))}
    except ConfigError as error:
        content = {"problems": [problem.export_json() for problem in error.problems]}
    rank_directory.with_suffix(".json").write_text(json.dumps(content), encoding="utf-8")
    return 2 if "problems" in content else 0


if __name__ == "__main__":
    raise SystemExit(run_worker(sys.argv[1:]))
