"""How long it takes to plan: for 64 processes, and with very many entries."""

import gc
import tracemalloc
from array import array

import numpy as np

from ..data.batches import BatchPlan, BucketSamples
from .bench_figure import Figure, interleaved
from .bench_scale import Scale

RANKS, BATCH, BUCKETS = 64, 4, 30
SECONDS = 2.0


def measured(scale: Scale) -> list[Figure]:
    """From buckets to batches, without any file."""
    target = SECONDS if scale.pictures == 100_000 else None
    return [*_planned(scale.pictures, scale.repetitions, target), *_planned(scale.entries, scale.repetitions, None)]


def _planned(count: int, repetitions: int, target: float | None) -> list[Figure]:
    buckets = _buckets(count)
    name = f"plan of {count:,} pictures for {RANKS} processes"
    seconds = interleaved({"start": lambda: _start(buckets), "walk": lambda: _walk(buckets)}, max(5, repetitions))
    return [
        Figure(f"{name}: until the first batch", seconds["start"], "s", target),
        Figure(f"{name}: every batch of an epoch", seconds["walk"], "s", target),
        Figure(f"{name}: memory", (_memory(buckets) / 1e6,), "MB"),
    ]


def _start(buckets: list[BucketSamples]) -> BatchPlan:
    plan = BatchPlan(buckets, RANKS, 1, 0)
    plan.micro_batch(0)
    return plan


def _buckets(count: int) -> list[BucketSamples]:
    """The entries of a plan are spread over as many buckets as sd-scripts has."""
    which = np.random.Generator(np.random.Philox(0)).integers(0, BUCKETS, count)
    found = []
    for number in range(BUCKETS):
        samples = array("q", np.flatnonzero(which == number).tolist())
        found.append(BucketSamples((64 * (number + 1), 512), samples, array("q", [1] * len(samples)), BATCH))
    return found


def _walk(buckets: list[BucketSamples]) -> int:
    """What every process is given in one epoch."""
    plan = _start(buckets)
    return sum(len(batch.share(rank, RANKS).samples) for step in range(plan.steps_per_epoch)
               for batch in plan.step(step) for rank in range(RANKS))  # fmt: skip


def _memory(buckets: list[BucketSamples]) -> float:
    """Of the plan with one epoch laid out, without the buckets it is made of."""
    gc.collect()
    tracemalloc.start()
    plan = _start(buckets)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del plan
    return used
