"""Emulate two machines: network namespaces with their own host names and a link between them, as root on Linux."""

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


def describe_missing_support() -> str:
    """Say why network namespaces cannot be used here; empty if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"the program {missing[0]} is not installed"
    result = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return "" if result.returncode == 0 else "network namespaces are not allowed here"


class Machines:
    """Context manager for two machines; ``rate`` such as 20mbit limits the bandwidth, ``delay`` is one way, in seconds."""

    def __init__(self, rate: str = "", delay: float = 0.0):
        self.rate, self.delay = rate, delay
        self.spaces = [f"{name}-{os.getpid()}" for name in NAMES]
        self.links = ["va", "vb"]
        self.interface: str | None = None  # the interface to use instead of the link
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._ends = threading.Event()
        self._forwarder: threading.Thread | None = None

    def __enter__(self) -> "Machines":
        for space in self.spaces:
            run_command("ip", "netns", "add", space)
            (ETC / space).mkdir(parents=True)  # mounted over /etc inside the namespace
            names = zip(("127.0.0.1", *self.addresses), ("localhost", *NAMES), strict=True)
            (ETC / space / "hosts").write_text("".join(f"{address} {name}\n" for address, name in names))
            run_command("ip", "-n", space, "link", "set", "lo", "up")
        if self.delay:
            self.links = ["ta", "tb"]
            files = [self._create_tun(space, link) for space, link in zip(self.spaces, self.links, strict=True)]
            self._forwarder = threading.Thread(target=self._forward, args=files, daemon=True)
            self._forwarder.start()
        else:
            first, second = self.spaces
            run_command(*f"ip link add va netns {first} type veth peer name vb netns {second}".split())
        for space, link, address in zip(self.spaces, self.links, self.addresses, strict=True):
            run_command("ip", "-n", space, "addr", "add", f"{address}/24", "dev", link)
            run_command("ip", "-n", space, "link", "set", link, "up")
            if self.rate:
                limit = f"tbf rate {self.rate} burst 32kbit latency 400ms"
                run_command(*f"tc -n {space} qdisc add dev {link} root {limit}".split())
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._forwarder is not None:
            self._forwarder.join()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)
            shutil.rmtree(ETC / space, ignore_errors=True)

    def start_process(self, machine: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program on a machine, in its own session, with its output in ``log``."""
        name, interface = NAMES[machine], self.interface or self.links[machine]
        with log.open("wb") as file:
            inside = f"ip netns exec {self.spaces[machine]} unshare --uts sh -c".split()
            return subprocess.Popen(
                [*inside, f'hostname {name}; exec "$@"', "sh", *command],
                cwd=ROOT,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=build_clean_environment() | {"GLOO_SOCKET_IFNAME": interface, "ACCELERATE_USE_CPU": "true"},
            )

    def disconnect(self) -> None:
        """Take the link down without closing any connection."""
        run_command("ip", "-n", self.spaces[1], "link", "set", self.links[1], "down")

    def count_sent_bytes(self, machine: int) -> int:
        """Read how many bytes a machine has sent."""
        counter = f"/sys/class/net/{self.links[machine]}/statistics/tx_bytes"
        return int(run_command("ip", "netns", "exec", self.spaces[machine], "cat", counter))

    def _create_tun(self, space: str, link: str) -> int:
        """Create a TUN interface whose packets this program reads, and move it into the namespace."""
        file = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(file, SET_NAME, struct.pack("16sH", link.encode(), TUN | NO_HEADER))
        run_command("ip", "link", "set", link, "netns", space, "mtu", "9000")
        return file

    def _forward(self, one: int, other: int) -> None:
        """Forward each packet to the other interface after the delay."""
        pending: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._ends.is_set():
            wait = max(0.0, pending[0][0] - time.monotonic()) if pending else 0.2
            for file in select.select([one, other], [], [], wait)[0]:
                if self._ends.is_set():
                    return
                number += 1
                target = other if file == one else one
                heapq.heappush(pending, (time.monotonic() + self.delay, number, target, os.read(file, PACKET)))
            while pending and pending[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(pending)
                with suppress(OSError):  # the other interface is not up yet: the packet is lost
                    os.write(target, packet)


def run_command(*words: str) -> str:
    """Run a command that must succeed, and return its output."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def build_clean_environment() -> dict[str, str]:
    """The environment without the variables of other launchers."""
    ours = ("ACCELERATE_", "MASTER_", "TORCHELASTIC_")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    return environment | {"OMP_NUM_THREADS": "1"}


Launcher = Callable[[int, str, int], list[str]]
"""(machine rank, address and port of the main machine) -> the launch command before the script."""
During = Callable[[list[subprocess.Popen[bytes]]], None]


def build_flags_command(machine: int, address: str, port: int) -> list[str]:
    """Build an ``accelerate launch`` command with one process per machine."""
    flags = (
        f"--multi_gpu --num_machines 2 --machine_rank {machine} --num_processes 2 --main_process_ip {address} "
        f"--main_process_port {port} --mixed_precision no --dynamo_backend no"
    )
    return [*get_accelerate_command(), *flags.split()]


def get_accelerate_command() -> list[str]:
    """The ``accelerate launch`` of this Python environment."""
    return [str(Path(sys.executable).parent / "accelerate"), "launch"]


def launch_on_both_machines(
    machines: Machines,
    script: list[str],
    logs: Path,
    port: int,
    launcher: Launcher = build_flags_command,
    seconds: float = 240,
    during: During | None = None,
) -> tuple[list[int], list[str]]:
    """Run a script on both machines; return exit codes and outputs."""
    log_files = [logs / f"{name}.log" for name in NAMES]
    processes = [
        machines.start_process(machine, [*launcher(machine, machines.addresses[0], port), *script], log_files[machine])
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
    return codes, [text.read_text("utf-8", "replace") for text in log_files]
