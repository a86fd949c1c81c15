"""How the processes of a run come together: they call the roll, connect, and send each other a first message."""

import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import PartialState

from ..config import RunConfig
from ..errors import ConfigError, UserError
from . import config_agreement
from .process_group import KeyValueStore, build_process_group_kwargs
from .watchdog import abort_process, call_with_timeout, elect_reporter, is_connection_error, timeout
from .world import World, format_ranks

logger = logging.getLogger(__name__)


CONNECT_TIMEOUT_SECONDS = 60.0
"""All processes are there by then, so it takes long only where it does not work, or where they are hundreds."""


JOIN_TIMEOUT_MINUTES = 10


TEST_MESSAGE_NUMEL = 2**18
"""Numbers in it: one MB."""


def join_process_group(config: RunConfig, world: World, problems: list[str]) -> PartialState:
    """Join the other processes; nobody does, when some cannot start or are about to do something else."""
    if world.world_size == 1:
        _raise_problems(problems)
        return PartialState(**build_partial_state_kwargs(config, world))
    word = config_agreement.build_rank_report(config, world, problems)
    minutes = config.distributed.ddp_timeout or JOIN_TIMEOUT_MINUTES
    if (store := open_rendezvous_store(world, timedelta(minutes=minutes))) is None:
        _raise_problems(problems)
        state = connect_process_group(config, world, None, [])
        _check_config_agreement(KeyValueStore("roll call"), world, word, 60.0 * minutes)
        return state
    hosts = _check_config_agreement(KeyValueStore("roll call", store), world, word, 60.0 * minutes)
    return connect_process_group(config, world, store, hosts)


def open_rendezvous_store(world: World, timeout: timedelta) -> Any:
    """The store that the launcher named; ``None`` under launchers whose addresses only accelerate knows."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return None
    group = build_process_group_kwargs(world, None)
    url = (group.init_method if group is not None else None) or "env://"
    torch_dist: Any = dist
    try:
        store, _, _ = next(torch_dist.rendezvous(url, world.rank, world.world_size, timeout=timeout))
    except (dist.DistError, OSError) as error:
        raise _build_unreachable_error(address, port, error) from error
    store.set_timeout(timeout)
    # A restarted group must not find the addresses of the one before, which some launchers leave in the store.
    return torch_dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def connect_process_group(config: RunConfig, world: World, store: Any, hostnames: list[str]) -> PartialState:
    """The process group, through which a first message went; what does not work is told soon, not after an hour."""
    set_torchrun_variables(world)
    board = KeyValueStore("connecting", store) if store is not None else KeyValueStore("connecting")
    kwargs = build_partial_state_kwargs(config, world)
    backend = str(kwargs.get("backend"))
    if store is not None:
        kwargs |= {"store": store, "rank": world.rank, "world_size": world.world_size}
        kwargs.pop("init_method", None)

    def abort_on_timeout() -> None:
        abort_process(
            board, _format_connect_timeout(board, world, hostnames, backend), is_local_main=not world.local_rank
        )

    try:
        with timeout(compute_connect_timeout(world.world_size), abort_on_timeout):
            state = PartialState(**kwargs)
            board.add(f"connected {world.rank}", 1)
            seconds = measure_all_reduce_seconds(TEST_MESSAGE_NUMEL, state.device)
    except Exception as error:
        if not is_connection_error(error):
            raise
        failure = UserError(
            "\n".join(
                [
                    f"the processes cannot connect to each other: {str(error).splitlines()[0]}",
                    *suggest_network_fixes(backend),
                ]
            )
        )
        failure.is_reported = not elect_reporter(board, is_local_main=not world.local_rank)
        raise failure from error
    logger.info("a first exchange of 1 MB between them took %.2g s", seconds)
    return state


def set_torchrun_variables(world: World) -> None:
    """What a launcher told under names of its own; beside an accelerator, accelerate and others look for these only."""
    if world.local_rank is not None:
        told = {
            "RANK": world.rank,
            "WORLD_SIZE": world.world_size,
            "LOCAL_RANK": world.local_rank,
            "LOCAL_WORLD_SIZE": world.local_world_size,
        }
        for name, number in told.items():
            os.environ.setdefault(name, str(number))


def compute_connect_timeout(world_size: int) -> float:
    """After which it does not work."""
    return CONNECT_TIMEOUT_SECONDS + world_size // 4


def measure_all_reduce_seconds(numel: int, device: torch.device) -> float:
    """How long a sum of so many numbers over all processes takes, when it is not the first."""
    message = torch.zeros(numel, device=device)
    for _ in range(2):
        began = time.perf_counter()
        dist.all_reduce(message)
        message[0].item()  # waits for the device
    return time.perf_counter() - began


def build_partial_state_kwargs(config: RunConfig, world: World) -> dict[str, Any]:
    """The keyword arguments of ``PartialState``, which joins the process group.  Pure."""
    group = build_process_group_kwargs(world, config.distributed.ddp_timeout)
    return {"cpu": world.device_type == "cpu", **(group.to_kwargs() if group is not None else {})}


def _check_config_agreement(
    key_value_store: KeyValueStore, world: World, report: config_agreement.RankReport, timeout_seconds: float
) -> list[str]:
    """The machines by rank."""
    try:
        hosts = config_agreement.exchange_rank_reports(
            key_value_store, world.rank, world.world_size, report, timeout_seconds
        )
    except dist.DistError as error:  # whoever kept the store ended
        failure = UserError(
            "the place where the processes meet is gone: one of them ended, and says why there"
            f" ({str(error).splitlines()[0]})"
        )
        failure.is_reported = bool(world.local_rank)
        raise failure from error
    logger.info("%s", config_agreement.format_rank_placement(hosts))
    return hosts


def _format_connect_timeout(key_value_store: KeyValueStore, world: World, hostnames: list[str], backend: str) -> str:
    """What does not work, as far as it can be known, and what to try."""
    ranks = range(world.world_size)
    absent = call_with_timeout(
        lambda: [rank for rank in ranks if not key_value_store.read_counter(f"connected {rank}")], None
    )
    who = f"; not connected: {format_ranks(absent, hostnames)}" if absent else ""
    waited = f"{compute_connect_timeout(world.world_size):.0f} s"
    return "\n".join(
        [
            f"all {world.world_size} processes are there, and a first message between them did not arrive within"
            f" {waited}{who}. What usually helps:",
            *suggest_network_fixes(backend),
        ]
    )


def _build_unreachable_error(address: str, port: str, error: Exception) -> UserError:
    failure = UserError(
        f"nothing answers at {address}:{port}, where the processes are to meet"
        f" ({str(error).splitlines()[0]}): is the first machine started, is --main_process_ip its"
        " address, and does its firewall let others in?"
    )
    failure.is_reported = bool(int(os.environ.get("LOCAL_RANK", "0")))
    return failure


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


INTERFACE_VARIABLES = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}


def suggest_network_fixes(backend: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """What usually helps when processes find each other and cannot talk."""
    env = os.environ if environment is None else environment
    lines = []
    address = env.get("MASTER_ADDR", "")
    name = find_interface_to(address) if address else None
    for kind, variable in INTERFACE_VARIABLES.items():
        if kind in backend:
            told = env.get(variable)
            value = name or "the name of the right one"
            lines.append(
                f"{variable} is {told}: is it the network that all machines share?"
                if told
                else f"network: on machines with several, set {variable}={value}"
            )
    if found := list_network_interfaces():
        here = ", ".join(f"{name} {address}" for name, address in found)
        lines.append(f"networks of this machine: {here}")
    lines.append(
        "firewall: the processes open connections to each other on any port, not only on the one they meet"
        f" at ({env.get('MASTER_PORT', 'MASTER_PORT')})"
    )
    if "nccl" in backend:
        lines.append(
            "cards without a working direct link: NCCL_P2P_DISABLE=1; a network card that fails:"
            " NCCL_IB_DISABLE=1; NCCL_DEBUG=INFO tells more"
        )
    return lines


def list_network_interfaces() -> list[tuple[str, str]]:
    """Name and IPv4 address of each network of this machine, but for the one to itself."""
    found = psutil.net_if_addrs()
    return [
        (name, item.address)
        for name, items in sorted(found.items())
        for item in items
        if item.family == socket.AF_INET and not item.address.startswith("127.")
    ]


def find_interface_to(host: str) -> str | None:
    """Through which network this machine talks to another; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = probe.getsockname()[0]
        return next((name for name, address in list_network_interfaces() if address == own), None)
    return None
