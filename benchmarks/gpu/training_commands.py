"""Whole training runs as commands, several at once, and comparisons of their LoRA files."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..processes import ROOT, TAIL, TRAIN

RUN_SCRIPT = f"import runpy, sys; sys.argv[0] = {TRAIN[0]!r}; runpy.run_path({TRAIN[0]!r}, run_name='__main__')"
DEMO = ("--dataset_config", str(ROOT / "dataset_configs" / "demo.toml"), "--mixed_precision", "no", "--quiet")
"""The built-in model on its own images."""
TIMEOUT = 240.0
"""Seconds for all commands that are run by one call."""


@dataclass
class TrainingCommand:
    """One run, of one process or more."""

    output_dir: Path
    options: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    setup: str = ""
    """Python that runs before, in each process."""
    log: str = ""
    exit_code: int = 0

    def start(self) -> "list[subprocess.Popen[bytes]]":
        """Start its processes; more than one share the first device, as one process on each of several machines."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-c", f"{self.setup}\n{RUN_SCRIPT}", *self.options]
        argv += ["--output_dir", str(self.output_dir), "--output_name", "lora", "--overwrite"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Several of these run at once, and each would start a thread for each processor.
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 8))}
        environment = {**threads, **os.environ, **self.environment, "PYTHONPATH": path}
        processes, port = [], find_free_port()
        for rank in range(self.world_size):
            ranks = {"RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            ranks_environment = {name: str(value) for name, value in ranks.items()} if self.world_size > 1 else {}
            if self.world_size > 1:
                ranks_environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with self._get_log(rank).open("wb") as log:
                processes.append(
                    subprocess.Popen(argv, stdout=log, stderr=log, env={**environment, **ranks_environment})
                )
        return processes

    def finish(self, processes: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> None:
        """Wait for its processes; those that run at the deadline, a time of ``time.monotonic()``, are killed."""
        is_killed = False
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                is_killed = True
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        self.exit_code = next((code for code in codes if code), 0)
        failed = next((rank for rank, code in enumerate(codes) if code), 0)
        self.log = self._get_log(failed).read_text("utf-8", "replace")
        if is_killed:
            self.log += "\nkilled at its time limit"

    def _get_log(self, rank: int) -> Path:
        return self.output_dir / f"log{rank}.txt"

    def load(self) -> dict[str, torch.Tensor]:
        return load_file(self.output_dir / "lora.safetensors")

    @property
    def failure(self) -> str:
        """The last line of its log if it failed."""
        if not self.exit_code:
            return ""
        lines = [line.strip() for line in self.log[-TAIL:].splitlines() if line.strip()]
        return f"exit code {self.exit_code}: {lines[-1] if lines else ''}"[:300]


def run_commands(commands: Sequence[TrainingCommand], at_once: int | None = None, seconds: float = TIMEOUT) -> None:
    """Run commands, as many at once as there are processors for, and all within the given time."""
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(at_once or max(1, (os.cpu_count() or 1) // 2)) as pool:
        list(pool.map(lambda command: command.finish(command.start(), deadline), commands))


def compare_weights(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[int, float]:
    """Count the tensors that differ; return the largest difference, by the largest value of its tensor."""
    if actual.keys() != expected.keys():
        raise ValueError(f"the files have different tensors: {sorted(actual.keys() ^ expected.keys())[:3]}")
    differences = []
    for name, weight in expected.items():
        scale = weight.float().abs().max().clamp_min(1e-12)
        differences.append(float((actual[name].float() - weight.float()).abs().max() / scale))
    different = sum(not torch.equal(actual[name], expected[name]) for name in expected)
    return different, max(differences)


def find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
