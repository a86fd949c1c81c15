"""Rendezvous: ranks find each other through a store, agree on their settings, connect, and test one all-reduce."""

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

from ..errors import ConfigError, UserError
from .config_agreement import RankReport, exchange_rank_reports, format_rank_placement
from .process_group import KeyValueStore, build_process_group_kwargs
from .watchdog import abort_process, call_with_timeout, elect_reporter, is_connection_error, timeout
from .world import World, format_ranks

logger = logging.getLogger(__name__)
CONNECT_TIMEOUT_SECONDS = 60.0
"""All ranks have reported by then, so it takes this long only where the network fails, or for hundreds of ranks."""

JOIN_TIMEOUT_MINUTES = 10
TEST_MESSAGE_NUMEL = 2**18  # 1 MB
STORE_PREFIX = "rank reports"


def join_process_group(world: World, timeout_minutes: int | None, report: RankReport) -> PartialState:
    """Join the process group; raise on all ranks if some cannot start or have other settings."""
    seconds = 60.0 * (timeout_minutes or JOIN_TIMEOUT_MINUTES)
    store = open_rendezvous_store(world, timedelta(seconds=seconds))
    if store is None:
        if report.problems:
            raise ConfigError(report.problems)
        state = connect_process_group(world, timeout_minutes, None, [])
        _check_config_agreement(KeyValueStore(STORE_PREFIX), world, report, seconds)
        return state
    hostnames = _check_config_agreement(KeyValueStore(STORE_PREFIX, store), world, report, seconds)
    return connect_process_group(world, timeout_minutes, store, hostnames)


def open_rendezvous_store(world: World, timeout: timedelta) -> Any:
    """Open the store at MASTER_ADDR; ``None`` under launchers whose address only accelerate knows."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return None
    is_hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    torch_dist: Any = dist
    try:
        # Not through dist.rendezvous(), where rank 0 would wait for all others before it could report who is missing.
        store = torch_dist.TCPStore(
            address,
            int(port),
            world.world_size,
            is_master=world.rank == 0 and not is_hosted_by_torchrun,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=not world.is_windows,  # torch for Windows is built without it
        )
    except (dist.DistError, OSError) as error:
        raise _build_unreachable_error(address, port, error) from error
    store.set_timeout(timeout)
    # A restarted group must not read the keys of the previous attempt, which some launchers leave in the store.
    return torch_dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def count_joined_launchers(address: str, port: int) -> int:
    """Count the launchers that have joined the store of a static rendezvous; 0 if it is of another kind."""
    torch_dist: Any = dist
    try:
        store = torch_dist.TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
        )
        return int(store.add("init/", 0))  # the count for which torch's store waits
    except (dist.DistError, OSError):
        return 0


def connect_process_group(world: World, timeout_minutes: int | None, store: Any, hostnames: list[str]) -> PartialState:
    """Initialize the process group and all-reduce once; a failure is reported after a minute, not after the timeout."""
    key_value_store = KeyValueStore("connect", store)
    kwargs = build_partial_state_kwargs(world, timeout_minutes)
    backend = str(kwargs.get("backend"))
    if store is not None:
        kwargs |= {"store": store, "rank": world.rank, "world_size": world.world_size}
        kwargs.pop("init_method", None)

    def abort_on_timeout() -> None:
        message = _format_connect_timeout(key_value_store, world, hostnames, backend)
        abort_process(key_value_store, message, is_local_main=not world.local_rank)

    try:
        with timeout(compute_connect_timeout(world.world_size), abort_on_timeout):
            state = PartialState(**kwargs)
            key_value_store.add(f"connected {world.rank}", 1)
            seconds = measure_all_reduce_seconds(TEST_MESSAGE_NUMEL, state.device)
    except Exception as error:
        if not is_connection_error(error):
            raise
        summary = f"the processes cannot connect to each other: {str(error).splitlines()[0]}"
        failure = UserError("\n".join([summary, *suggest_network_fixes(backend)]))
        failure.is_reported = not elect_reporter(key_value_store, is_local_main=not world.local_rank)
        raise failure from error
    logger.info("test all-reduce of 1 MB: %.2g s", seconds)
    return state


def compute_connect_timeout(world_size: int) -> float:
    """Compute the seconds after which connecting has failed."""
    return CONNECT_TIMEOUT_SECONDS + world_size // 4


def measure_all_reduce_seconds(numel: int, device: torch.device) -> float:
    """Measure the second of two all-reduces of ``numel`` floats; the first one sets up connections."""
    message = torch.zeros(numel, device=device)
    for _ in range(2):
        start = time.perf_counter()
        dist.all_reduce(message)
        message[0].item()  # waits for the device
    return time.perf_counter() - start


def build_partial_state_kwargs(world: World, timeout_minutes: int | None) -> dict[str, Any]:
    """Build the keyword arguments of ``PartialState``, which initializes the process group.  Pure."""
    group = build_process_group_kwargs(world, timeout_minutes)
    return {"cpu": world.device_type == "cpu", **(group.to_kwargs() if group is not None else {})}


def _check_config_agreement(
    key_value_store: KeyValueStore, world: World, report: RankReport, timeout_seconds: float
) -> list[str]:
    """Compare the configurations of all ranks, and return their hostnames."""
    try:
        hostnames = exchange_rank_reports(key_value_store, world.rank, world.world_size, report, timeout_seconds)
    except dist.DistError as error:  # the process that hosts the store ended
        failure = UserError(
            "lost the connection to the rendezvous store: a process stopped, its own log shows why"
            f" ({str(error).splitlines()[0]})"
        )
        failure.is_reported = bool(world.local_rank)
        raise failure from error
    logger.info("%s", format_rank_placement(hostnames))
    return hostnames


def _format_connect_timeout(key_value_store: KeyValueStore, world: World, hostnames: list[str], backend: str) -> str:
    ranks = range(world.world_size)
    missing = call_with_timeout(
        lambda: [rank for rank in ranks if not key_value_store.read_counter(f"connected {rank}")], None
    )
    who = f"; not connected: {format_ranks(missing, hostnames)}" if missing else ""
    summary = (
        f"all {world.world_size} processes have started, but a test all-reduce did not finish within"
        f" {compute_connect_timeout(world.world_size):.0f} s{who}. What usually helps:"
    )
    return "\n".join([summary, *suggest_network_fixes(backend)])


def _build_unreachable_error(address: str, port: str, error: Exception) -> UserError:
    failure = UserError(
        f"no rendezvous at {address}:{port} ({str(error).splitlines()[0]}): is the first machine started, is"
        " --main_process_ip its address, and does its firewall allow connections?"
    )
    failure.is_reported = bool(int(os.environ.get("LOCAL_RANK", "0")))
    return failure


INTERFACE_VARIABLES = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}


def suggest_network_fixes(backend: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return what usually helps when ranks find the store but cannot connect to each other."""
    env = os.environ if environment is None else environment
    lines = []
    address = env.get("MASTER_ADDR", "")
    interface = find_interface_to(address) if address else None
    for name, variable in INTERFACE_VARIABLES.items():
        if name in backend:
            lines.append(
                f"{variable} is {env[variable]}: is that the network that all machines share?"
                if env.get(variable)
                else f"network interface: on machines with several, set {variable}={interface or 'INTERFACE'}"
            )
    if interfaces := list_network_interfaces():
        lines.append(f"interfaces of this machine: {', '.join(f'{name} {address}' for name, address in interfaces)}")
    lines.append(
        f"firewall: ranks connect to each other on any port, not only on {env.get('MASTER_PORT', 'MASTER_PORT')}"
    )
    if "nccl" in backend:
        lines.append(
            "GPUs without working peer-to-peer: NCCL_P2P_DISABLE=1; failing InfiniBand: NCCL_IB_DISABLE=1;"
            " NCCL_DEBUG=INFO shows more"
        )
    return lines


def list_network_interfaces() -> list[tuple[str, str]]:
    """Return name and IPv4 address of each network interface except loopback."""
    return [
        (name, item.address)
        for name, items in sorted(psutil.net_if_addrs().items())
        for item in items
        if item.family == socket.AF_INET and not item.address.startswith("127.")
    ]


def find_interface_to(host: str) -> str | None:
    """Return the interface that routes to ``host``; sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = probe.getsockname()[0]
        return next((name for name, address in list_network_interfaces() if address == own), None)
    return None
