"""What is known of the network, for the moment when it does not work: interfaces, addresses, and the usual ways out."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

import psutil

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
            lines.append(f"{variable} is {told}: is it the network that all machines share?" if told else
                         f"network: on machines with several, set {variable}={value}")  # fmt: skip
    if found := list_network_interfaces():
        here = ", ".join(f"{name} {address}" for name, address in found)
        lines.append(f"networks of this machine: {here}")
    lines.append("firewall: the processes open connections to each other on any port, not only on the one they meet"
                 f" at ({env.get('MASTER_PORT', 'MASTER_PORT')})")  # fmt: skip
    if "nccl" in backend:
        lines.append("cards without a working direct link: NCCL_P2P_DISABLE=1; a network card that fails:"
                     " NCCL_IB_DISABLE=1; NCCL_DEBUG=INFO tells more")  # fmt: skip
    return lines


def list_network_interfaces() -> list[tuple[str, str]]:
    """Name and IPv4 address of each network of this machine, but for the one to itself."""
    found = psutil.net_if_addrs()
    return [(name, item.address) for name, items in sorted(found.items()) for item in items
            if item.family == socket.AF_INET and not item.address.startswith("127.")]  # fmt: skip


def find_interface_to(host: str) -> str | None:
    """Through which network this machine talks to another; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = probe.getsockname()[0]
        return next((name for name, address in list_network_interfaces() if address == own), None)
    return None
