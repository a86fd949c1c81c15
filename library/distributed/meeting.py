"""How the processes of a run come together: they call the roll, connect, and send each other a first message."""

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from ..config import RunConfig
from ..errors import ConfigError, UserError
from . import roll_call
from .backend import process_group
from .board import Board
from .late import answer, end_this_process, tells, watched
from .network import ways_out
from .peers import is_of_transport
from .words import ranks_in_words
from .world import World

logger = logging.getLogger(__name__)

SECONDS_TO_CONNECT = 60.0
"""All processes are there by then, so it takes long only where it does not work, or where they are hundreds."""
MINUTES_TO_COME = 10
FIRST_MESSAGE = 2**18
"""Numbers in it: one MB."""


def meet(args: RunConfig, world: World, problems: list[str]) -> PartialState:
    """Join the other processes; nobody does, when some cannot start or are about to do something else."""
    if world.size == 1:
        _refuse(problems)
        return PartialState(**group_kwargs(args, world))
    word = roll_call.own_word(args, world, problems)
    minutes = args.distributed.ddp_timeout or MINUTES_TO_COME
    if (store := meeting_point(world, timedelta(minutes=minutes))) is None:
        _refuse(problems)
        state = connected(args, world, None, [])
        _agreed(Board("roll call"), world, word, 60.0 * minutes)
        return state
    hosts = _agreed(Board("roll call", store), world, word, 60.0 * minutes)
    return connected(args, world, store, hosts)


def meeting_point(world: World, patience: timedelta) -> Any:
    """The store that the launcher named; ``None`` under launchers whose addresses only accelerate knows."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return None
    group = process_group(world, None)
    url = (group.init_method if group is not None else None) or "env://"
    torch_dist: Any = dist
    try:
        store, _, _ = next(torch_dist.rendezvous(url, world.rank, world.size, timeout=patience))
    except (dist.DistError, OSError) as error:
        raise _unanswered(address, port, error) from error
    store.set_timeout(patience)
    # A restarted group must not find the addresses of the one before, which some launchers leave in the store.
    return torch_dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def connected(args: RunConfig, world: World, store: Any, hosts: list[str]) -> PartialState:
    """The process group, through which a first message went; what does not work is told soon, not after an hour."""
    as_torchrun_tells(world)
    board = Board("connecting", store) if store is not None else Board("connecting")
    kwargs = group_kwargs(args, world)
    backend = str(kwargs.get("backend"))
    if store is not None:
        kwargs |= {"store": store, "rank": world.rank, "world_size": world.size}
        kwargs.pop("init_method", None)

    def late() -> None:
        end_this_process(board, _told(board, world, hosts, backend), is_first_here=not world.local_rank)

    try:
        with watched(seconds_to_connect(world.size), late):
            state = PartialState(**kwargs)
            board.add(f"connected {world.rank}", 1)
            seconds = exchange_seconds(FIRST_MESSAGE, state.device)
    except Exception as error:
        if not is_of_transport(error):
            raise
        failure = UserError("\n".join([f"the processes cannot connect to each other: {str(error).splitlines()[0]}",
                                       *ways_out(backend)]))  # fmt: skip
        failure.is_told = not tells(board, is_first_here=not world.local_rank)
        raise failure from error
    logger.info("a first exchange of 1 MB between them took %.2g s", seconds)
    return state


def as_torchrun_tells(world: World) -> None:
    """What a launcher told under names of its own; beside an accelerator, accelerate and others look for these only."""
    if world.local_rank is not None:
        told = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank,
                "LOCAL_WORLD_SIZE": world.local_size}  # fmt: skip
        for name, number in told.items():
            os.environ.setdefault(name, str(number))


def seconds_to_connect(processes: int) -> float:
    """After which it does not work."""
    return SECONDS_TO_CONNECT + processes // 4


def exchange_seconds(numbers: int, device: torch.device) -> float:
    """How long a sum of so many numbers over all processes takes, when it is not the first."""
    message = torch.zeros(numbers, device=device)
    for _ in range(2):
        began = time.perf_counter()
        dist.all_reduce(message)
        message[0].item()  # waits for the device
    return time.perf_counter() - began


def group_kwargs(args: RunConfig, world: World) -> dict[str, Any]:
    """The keyword arguments of ``PartialState``, which joins the process group.  Pure."""
    group = process_group(world, args.distributed.ddp_timeout)
    return {"cpu": world.device == "cpu", **(group.to_kwargs() if group is not None else {})}


def _agreed(board: Board, world: World, word: roll_call.Word, seconds: float) -> list[str]:
    """The machines by rank."""
    try:
        hosts = roll_call.call(board, world.rank, world.size, word, seconds)
    except dist.DistError as error:  # whoever kept the store ended
        failure = UserError("the place where the processes meet is gone: one of them ended, and says why there"
                            f" ({str(error).splitlines()[0]})")  # fmt: skip
        failure.is_told = bool(world.local_rank)
        raise failure from error
    logger.info("%s", roll_call.layout(hosts))
    return hosts


def _told(board: Board, world: World, hosts: list[str], backend: str) -> str:
    """What does not work, as far as it can be known, and what to try."""
    ranks = range(world.size)
    absent = answer(lambda: [rank for rank in ranks if not board.count(f"connected {rank}")], None)
    who = f"; not connected: {ranks_in_words(absent, hosts)}" if absent else ""
    waited = f"{seconds_to_connect(world.size):.0f} s"
    return "\n".join([f"all {world.size} processes are there, and a first message between them did not arrive within"
                      f" {waited}{who}. What usually helps:", *ways_out(backend)])  # fmt: skip


def _unanswered(address: str, port: str, error: Exception) -> UserError:
    failure = UserError(f"nothing answers at {address}:{port}, where the processes are to meet"
                        f" ({str(error).splitlines()[0]}): is the first machine started, is --main_process_ip its"
                        " address, and does its firewall let others in?")  # fmt: skip
    failure.is_told = bool(int(os.environ.get("LOCAL_RANK", "0")))
    return failure


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)
