"""Measure the same job with different training options: step time, throughput, bytes on the wire, peak memory.

Each variant is trained in processes of its own, so that none inherits the memory of another; variants take turns.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from library.distributed.device_memory import get_peak_memory
from library.distributed.devices import synchronize
from library.errors import ConfigError
from library.problems import Problem

from .processes import run_workers
from .report import Measurement, compute_ratios
from .synthetic_run import reset_peak_memory

if TYPE_CHECKING:
    from library.training.state import TrainingRun

BYTES_SENT = 200
"""Offset of tcpi_bytes_sent in Linux's struct tcp_info, from 4.19 on."""
Trainings = dict[str, list[list[dict[str, Any]]]]
"""What ``measure_steps`` returned, by variant, repetition and rank."""


def compare_variants(
    variants: Mapping[str, Sequence[str]], *, world_size: int, steps: int, repetitions: int
) -> list[Measurement]:
    """Train each variant, given as all of its training options; a variant that is rejected is reported as such."""
    trainings: Trainings = {name: [] for name in variants}
    rejected: dict[str, list[Problem]] = {}
    for _ in range(repetitions):
        for name in [name for name in variants if name not in rejected]:
            try:
                ranks = run_workers("benchmarks.variants:measure_steps", {"steps": steps}, variants[name], world_size)
                trainings[name].append(ranks)
            except ConfigError as error:
                rejected[name] = error.problems
    measured = [name for name in variants if name not in rejected]
    if not measured:
        raise ConfigError(problem for problems in rejected.values() for problem in problems)
    measurements = [each for name in measured for each in report_variant(name, trainings, measured[0])]
    reasons = {name: "; ".join(map(str, problems)) for name, problems in rejected.items()}
    return [*measurements, *(Measurement(name, [], note=f"not measured: {why}") for name, why in reasons.items())]


def measure_steps(run: "TrainingRun", steps: int) -> dict[str, Any]:
    """Train ``steps`` steps of warmup and as many more; return what this rank measured of the latter."""
    from library.training.loop import train

    timer = StepTimer(steps)
    run.callbacks = [timer]
    train(run)
    (start, images_before, sent_before, _), (end, images, sent, peak) = timer.marks
    return {
        "seconds": (end - start) / steps,
        "images": (images - images_before) / steps,
        "sent": None if sent is None or sent_before is None else (sent - sent_before) / steps / 1e6,
        "peak": peak / 1e9,
    }


class StepTimer:
    """Callback that reads clock, images, bytes sent and peak memory every ``steps`` steps."""

    id = "step_timer"
    is_deferrable = False

    def __init__(self, steps: int):
        self.steps = steps
        self.marks: list[tuple[float, int, int | None, int]] = []

    def should_run(self, run: "TrainingRun") -> bool:
        return run.state.step % self.steps == 0

    def on_train_begin(self, run: "TrainingRun") -> None: ...

    def __call__(self, run: "TrainingRun") -> None:
        device = run.strategy.device
        synchronize(device)
        sent = count_bytes_sent() if device.type == "cpu" else None  # NVLink, PCIe and InfiniBand are no TCP
        self.marks.append((time.perf_counter(), run.state.samples, sent, get_peak_memory(device)))
        reset_peak_memory(device)


def count_bytes_sent() -> int | None:
    """Count the bytes that this process sent over its open TCP connections, as Linux counts them; None elsewhere."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    for connection in psutil.Process().net_connections("tcp"):
        with socket.socket(fileno=os.dup(connection.fd)) as duplicate:
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", info, BYTES_SENT)[0]
    return total


def report_variant(name: str, trainings: Trainings, baseline: str) -> Iterator[Measurement]:
    """Report a variant, compared to the baseline round by round."""
    seconds = [max(rank["seconds"] for rank in ranks) for ranks in trainings[name]]
    yield Measurement(f"{name}: step time", seconds, "s")
    if name != baseline:
        baseline_seconds = [max(rank["seconds"] for rank in ranks) for ranks in trainings[baseline]]
        yield Measurement(f"{name}: step time / {baseline}", compute_ratios(seconds, baseline_seconds), "x")
    images = [ranks[0]["images"] for ranks in trainings[name]]
    yield Measurement(f"{name}: throughput", compute_ratios(images, seconds), "images/s")
    if len(trainings[name][0]) > 1 and all(rank["sent"] is not None for ranks in trainings[name] for rank in ranks):
        sent = [sum(rank["sent"] for rank in ranks) for ranks in trainings[name]]
        yield Measurement(f"{name}: bytes on the wire, all ranks", sent, "MB/step")
    peaks, baseline_peaks = (
        [max(rank["peak"] for rank in ranks) for ranks in trainings[each]] for each in (name, baseline)
    )
    note = "" if name == baseline else f"{min(baseline_peaks) - min(peaks):+.3f} GB saved"
    yield Measurement(f"{name}: peak memory per process", peaks, "GB", note=note)
