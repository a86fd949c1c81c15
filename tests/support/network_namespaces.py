"""Two machines on one: network namespaces with host names of their own and a cable between them, as root on Linux."""

import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("gpu-a", "gpu-b")
ETC = Path("/etc/netns")
TUN, NO_HEADER, SET_NAME = 0x0001, 0x1000, 0x400454CA
PACKET = 65536


def why_not() -> str:
    """What is missing here; empty where it works."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"there is no {missing[0]} here"
    done = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "network namespaces are not allowed here"


class Machines:
    """Inside, ``start`` starts a program on one of them; ``rate`` such as 20mbit, ``delay`` in seconds and one way."""

    def __init__(self, rate: str = "", delay: float = 0.0):
        self.rate, self.delay = rate, delay
        self.spaces = [f"{name}-{os.getpid()}" for name in NAMES]
        self.links = ["va", "vb"]
        self.interface: str | None = None  # another network than the right one
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._ends = threading.Event()
        self._forwarder: threading.Thread | None = None

    def __enter__(self) -> "Machines":
        for space in self.spaces:
            run("ip", "netns", "add", space)
            (ETC / space).mkdir(parents=True)  # what lies there is seen in /etc
            names = zip(("127.0.0.1", *self.addresses), ("localhost", *NAMES), strict=True)
            (ETC / space / "hosts").write_text("".join(f"{address} {name}\n" for address, name in names))
            run("ip", "-n", space, "link", "set", "lo", "up")
        if self.delay:
            self.links = ["ta", "tb"]
            files = [self._tun(space, link) for space, link in zip(self.spaces, self.links, strict=True)]
            self._forwarder = threading.Thread(target=self._forward, args=files, daemon=True)
            self._forwarder.start()
        else:
            first, second = self.spaces
            run(*f"ip link add va netns {first} type veth peer name vb netns {second}".split())
        for space, link, address in zip(self.spaces, self.links, self.addresses, strict=True):
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", space, "link", "set", link, "up")
            if self.rate:
                limit = f"tbf rate {self.rate} burst 32kbit latency 400ms"
                run(*f"tc -n {space} qdisc add dev {link} root {limit}".split())
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._forwarder is not None:
            self._forwarder.join()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)
            shutil.rmtree(ETC / space, ignore_errors=True)

    def start(self, machine: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """A program there, in a session of its own; what it says goes into ``log``."""
        name, interface = NAMES[machine], self.interface or self.links[machine]
        with log.open("wb") as file:
            inside = f"ip netns exec {self.spaces[machine]} unshare --uts sh -c".split()
            return subprocess.Popen(
                [*inside, f'hostname {name}; exec "$@"', "sh", *command],
                cwd=ROOT,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=clean_environment() | {"GLOO_SOCKET_IFNAME": interface, "ACCELERATE_USE_CPU": "true"},
            )

    def cut(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        run("ip", "-n", self.spaces[1], "link", "set", self.links[1], "down")

    def sent(self, machine: int) -> int:
        """Bytes that went out of a machine."""
        counter = f"/sys/class/net/{self.links[machine]}/statistics/tx_bytes"
        return int(run("ip", "netns", "exec", self.spaces[machine], "cat", counter))

    def _tun(self, space: str, link: str) -> int:
        """A network card whose packets come to this program; made here, and moved."""
        file = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(file, SET_NAME, struct.pack("16sH", link.encode(), TUN | NO_HEADER))
        run("ip", "link", "set", link, "netns", space, "mtu", "9000")
        return file

    def _forward(self, one: int, other: int) -> None:
        """Each packet comes out at the other side, later."""
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._ends.is_set():
            wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
            for file in select.select([one, other], [], [], wait)[0]:
                if self._ends.is_set():
                    return
                number += 1
                there = other if file == one else one
                heapq.heappush(waiting, (time.monotonic() + self.delay, number, there, os.read(file, PACKET)))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, there, packet = heapq.heappop(waiting)
                with suppress(OSError):  # the other card is not switched on yet: the packet is lost, as on a cable
                    os.write(there, packet)


def run(*words: str) -> str:
    """A command that has to work."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def clean_environment() -> dict[str, str]:
    """Without what belongs to another launcher."""
    ours = ("ACCELERATE_", "MASTER_", "TORCHELASTIC_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    return kept | {"OMP_NUM_THREADS": "1"}


Launcher = Callable[[int, str, int], list[str]]
"""Number of the machine, address and port of the first -> what is written before the script."""
During = Callable[[list[subprocess.Popen[bytes]]], None]


def by_flags(machine: int, address: str, port: int) -> list[str]:
    """``accelerate launch``, with one process on each machine."""
    flags = (
        f"--multi_gpu --num_machines 2 --machine_rank {machine} --num_processes 2 --main_process_ip {address} "
        f"--main_process_port {port} --mixed_precision no --dynamo_backend no"
    )
    return [*accelerate_launch(), *flags.split()]


def accelerate_launch() -> list[str]:
    """The one that belongs to this Python."""
    return [str(Path(sys.executable).parent / "accelerate"), "launch"]


def launch(
    machines: Machines,
    script: list[str],
    logs: Path,
    port: int,
    launcher: Launcher = by_flags,
    seconds: float = 240,
    during: During | None = None,
) -> tuple[list[int], list[str]]:
    """Start a script on both machines; exit codes, and what each said."""
    texts = [logs / f"{name}.log" for name in NAMES]
    processes = [
        machines.start(machine, [*launcher(machine, machines.addresses[0], port), *script], texts[machine])
        for machine in (0, 1)
    ]
    try:
        if during is not None:
            during(processes)
        deadline = time.monotonic() + seconds
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    return codes, [text.read_text("utf-8", "replace") for text in texts]
