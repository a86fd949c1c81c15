"""How much this process sent to others, as the operating system counts it."""

import os
import socket
import stat
import struct
from contextlib import suppress

import torch

from .devices import HOST

BYTES_SENT = 200
"""Where Linux, from 4.19 on, puts the number into what it tells of a TCP connection."""


def bytes_sent(device: torch.device) -> int | None:
    """Over all TCP connections that are open; nothing where the system does not tell.

    What accelerators exchange is not known: NVLink, PCIe and InfiniBand are no TCP.
    """
    if device.type != HOST.type or not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    found = [count for name in os.listdir("/proc/self/fd") if (count := _sent_by(int(name))) is not None]
    return sum(found)


def _sent_by(number: int) -> int | None:
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    return int(struct.unpack_from("Q", told, BYTES_SENT)[0])
    return None
