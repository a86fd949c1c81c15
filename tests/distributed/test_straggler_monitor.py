"""Bytes communicated in a step, and straggler detection."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from rank_processes import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_runs import train, write_images

from library.distributed.straggler import Straggler, StragglerMonitor, find_straggler


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    dataset = write_images(tmp_path_factory.mktemp("pace"), {(64, 64): 8})
    return ["--dataset_config", str(dataset), "--mixed_precision", "no", "--learning_rate", "1e-3"]


# Bytes that each rank sends in a ring per input byte, and which argument is the input.
RING = {
    "allreduce_": (0, lambda n: 2 * (n - 1) / n),
    "broadcast_": (0, lambda n: 1.0),
    "allgather_": (1, lambda n: n - 1),
    "_allgather_base_": (1, lambda n: n - 1),
    "barrier": (0, lambda n: 0),
}


class CollectiveCounter(TorchDispatchMode):
    """Counts the bytes of all collectives of the process group."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func.name().partition("::")
        if space == "c10d":
            argument_index, factor = RING[name]
            tensors = [item for item in tree_leaves(args[argument_index]) if isinstance(item, torch.Tensor)]
            self.bytes[name] += sum(item.nbytes for item in tensors) * factor(int(os.environ["WORLD_SIZE"]))
        return func(*args, **(kwargs or {}))


def measure_sent_bytes(*words: str) -> tuple[float, int, dict[str, float]]:
    """Return the bytes that this rank sends per step, the bytes of the adapter, and the bytes by collective."""
    from library.training import run

    facts, original = [], run.train

    def measured(job):
        with CollectiveCounter() as counted:
            original(job)
        facts.extend([dict(counted.bytes), sum(parameter.nbytes for parameter in job.parameters), job.plan.steps])

    run.train = measured
    train(*words)
    actual, adapter, steps = facts
    return sum(actual.values()) / steps, adapter, actual


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_communicates_little_more_than_the_lora_gradients(data, tmp_path, ranks):
    ends = run_on_ranks(
        ranks,
        measure_sent_bytes,
        *data,
        *"--train_batch_size 1 --max_train_steps 4 --network_dim 16".split(),
        "--output_dir",
        str(tmp_path),
    )
    for in_a_step, adapter, kinds in ends:
        ring = 2 * (ranks - 1) / ranks * adapter
        assert ring <= in_a_step <= 1.05 * ring, (in_a_step / ring, adapter, kinds)


def train_with_straggler(slow_rank: int, *flags: str) -> list[dict]:
    from library.training.task import DiffusionTask

    call = DiffusionTask.__call__

    def slow(self, pixels, step):
        if int(os.environ["RANK"]) == slow_rank:
            time.sleep(0.3)
        return call(self, pixels, step)

    DiffusionTask.__call__ = slow
    path = Path(train(*flags))
    return [json.loads(line) for line in (path.parent / "lora.metrics.jsonl").read_text().splitlines()]


def test_the_slowest_rank_is_reported_with_the_time_it_costs(data, tmp_path):
    lines = run_on_ranks(
        2,
        train_with_straggler,
        1,
        *data,
        *"--train_batch_size 2 --max_train_steps 11 --network_dim 2".split(),
        "--output_dir",
        str(tmp_path),
    )[0]
    reports = [line for line in lines if "speed/slowest_rank" in line]
    assert [line["step"] for line in reports] == [11]  # the first step has no measurement yet
    assert reports[0]["speed/slowest_rank"] == 1 and 0.2 < reports[0]["speed/lost_to_slowest"] < 1, reports


def test_lost_fraction_is_the_average_waiting_time_of_the_others():
    assert find_straggler([(1.0, 4.0), (3.0, 4.0), (2.0, 4.0)]) == Straggler(1, (3.0 - 1.5) / 4.0)
    assert find_straggler([(1.0, 4.0)]) is None and find_straggler([(0.0, 0.0), (0.0, 0.0)]) is None


def test_the_step_after_a_reading_is_skipped(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("library.distributed.straggler.time.perf_counter", lambda: float(next(clock)))
    pace = StragglerMonitor(torch.device("cpu"), world_size=2)
    for _ in range(3):
        pace.mark_gradients_ready()
        pace.mark_step_end()
    assert pace.pop_times() == (2.0, 4.0)  # the start of the first of three steps is unknown
    pace.mark_gradients_ready()
    pace.mark_step_end()
    assert pace.pop_times() == (0.0, 0.0)
    single = StragglerMonitor(torch.device("cpu"), world_size=1)
    for _ in range(2):
        single.mark_gradients_ready()
        single.mark_step_end()
    assert single.pop_times() == (0.0, 0.0)
