"""Nobody is waited for less long than was said, and whoever leaves does not wait for those who wait for it."""

from datetime import timedelta

import pytest
from rank_processes import join_ranks, on_ranks

from library.distributed.process_group import build_process_group_kwargs
from library.distributed.world import World
from library.errors import RunInterrupted

ERRORS = {"bug": ValueError("bug"), "asked": RunInterrupted("asked", 0)}


def left_behind(backend: str, end: str) -> tuple[bool, str]:
    """Whether the group is there after a run that ended so; with nccl its end is a wait for all others."""
    import torch.distributed as dist

    comm, said = join_ranks(20), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: backend)
        try:
            with comm.process_group_scope():
                if end in ERRORS:
                    raise ERRORS[end]
        except Exception as found:
            said = str(found)
        is_there = dist.is_initialized()
    if is_there:
        dist.destroy_process_group()
    return is_there, said


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
def test_a_group_that_waits_for_the_others_is_ended_only_when_all_end_it(backend, end, is_there):
    assert on_ranks(2, left_behind, backend, end) == [(is_there, end)] * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_others_are_waited_for_equally_long_with_every_backend(device):
    assert build_process_group_kwargs(World(world_size=2, device_type=device), None).timeout == timedelta(minutes=30)


def patience(*words: str) -> set[timedelta]:
    """Of every group, how long a message in it may take."""
    import torch
    import torch.distributed as dist

    from library.config import parse_config
    from library.parallel.strategy_registry import build_strategy

    strategy = build_strategy(parse_config([*words, "--ddp_timeout", "7"]).config)
    with strategy.comm.process_group_scope():
        groups = list(dist.distributed_c10d._world.pg_map)
        assert len(groups) > 1
        strategy.comm.barrier()  # or rank 0, which hosts the store, could end while rank 1 still creates groups
        return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


@pytest.mark.parametrize("words", [("--tp_size", "2"), ("--fsdp",)])
def test_every_group_waits_as_long_as_was_said(words):
    assert on_ranks(2, patience, *words) == [{timedelta(minutes=7)}] * 2
