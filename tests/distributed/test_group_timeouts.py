"""Timeouts of process groups, and their teardown when a run ends or fails."""

from datetime import timedelta

import pytest
from rank_processes import build_communicator, run_on_ranks

from library.distributed.process_group import build_process_group_kwargs
from library.distributed.world import World
from library.errors import RunInterrupted

pytestmark = pytest.mark.quick

ERRORS = {"bug": ValueError("bug"), "asked": RunInterrupted("asked", 0)}


def run_and_check_group(backend: str, end: str) -> tuple[bool, str]:
    """Whether the group still exists after the run; nccl's teardown waits for all ranks."""
    import torch.distributed as dist

    comm, message = build_communicator(20), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: backend)
        try:
            with comm.process_group_scope():
                if end in ERRORS:
                    raise ERRORS[end]
        except Exception as found:
            message = str(found)
        is_there = dist.is_initialized()
    if is_there:
        dist.destroy_process_group()
    return is_there, message


@pytest.mark.parametrize(
    ("backend", "end", "is_there"),
    [
        ("gloo", "", False),
        ("gloo", "bug", False),
        ("nccl", "", False),
        ("nccl", "asked", False),
        ("nccl", "bug", True),
    ],
)
def test_a_group_whose_teardown_waits_is_destroyed_only_when_all_ranks_destroy_it(backend, end, is_there):
    assert run_on_ranks(2, run_and_check_group, backend, end) == [(is_there, end)] * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_default_timeout_is_the_same_for_every_backend(device):
    assert build_process_group_kwargs(World(world_size=2, device_type=device), None).timeout == timedelta(minutes=30)


def read_timeouts(*words: str) -> set[timedelta]:
    """The timeout of every process group."""
    import torch
    import torch.distributed as dist

    from library.config import parse_config
    from library.parallel.strategy_registry import build_strategy

    strategy = build_strategy(parse_config([*words, "--ddp_timeout", "7"]).config)
    with strategy.comm.process_group_scope():
        groups = list(dist.distributed_c10d._world.pg_map)
        assert len(groups) > 1
        strategy.comm.barrier()  # otherwise rank 0, which hosts the store, could exit while rank 1 still creates groups
        return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


@pytest.mark.parametrize("words", [("--tp_size", "2"), ("--fsdp",)])
def test_ddp_timeout_reaches_every_process_group(words):
    assert run_on_ranks(2, read_timeouts, *words) == [{timedelta(minutes=7)}] * 2
