"""Processes that see their own device only: its index is 0, whatever the local rank (SLURM's --gpus-per-task)."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from library.parallel.ddp import DDPStrategy
from library.parallel.deepspeed.engine import get_local_rank_variables


def test_ddp_gets_no_device_that_is_the_local_rank(monkeypatch):
    """accelerate's own ``prepare`` on a device without GPUs, told that it is one of four processes with GPUs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, calls, model = accelerate.Accelerator(cpu=True), [], nn.Linear(2, 2)
    monkeypatch.setattr(accelerate.Accelerator, "multi_device", property(lambda self: True))
    monkeypatch.setattr(accelerate.Accelerator, "local_process_index", property(lambda self: 3))
    monkeypatch.setattr(
        nn.parallel, "DistributedDataParallel", lambda model, **arguments: calls.append(arguments) or model
    )
    strategy = SimpleNamespace(
        accelerator=accelerator,
        comm=SimpleNamespace(world_size=1),
        straggler_monitor=SimpleNamespace(mark_gradients_ready=None),
        _disable_accelerate_compile=nullcontext,
        uses_cuda_graphs=False,
    )

    DDPStrategy.wrap(strategy, model, torch.optim.SGD(model.parameters()))
    AcceleratorState._reset_state(reset_partial_state=True)

    assert len(calls) == 1 and calls[0]["device_ids"] is None and calls[0]["output_device"] is None
    assert "ACCELERATE_BYPASS_DEVICE_MAP" not in os.environ


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda:0", {"LOCAL_RANK": 0, "OMPI_COMM_WORLD_LOCAL_RANK": 0}), ("cpu", {}), ("cuda", {})],
)
def test_the_local_rank_that_deepspeed_reads_is_its_device(device, expected, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    assert get_local_rank_variables(torch.device(device)) == expected
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK")
    assert get_local_rank_variables(torch.device("cuda", 1)) == {"LOCAL_RANK": 1}
