"""What this machine has: its devices, processors and NUMA nodes, read without starting anything."""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

HOST = torch.device("cpu")
"""The machine's own memory."""


NUMA_NODES_DIR = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Machine:
    """Facts that no setting changes."""

    device_type: str = "cpu"
    """Kind of the accelerator; without one, the processor itself."""
    device_count: int = 0
    physical_cores: int = 1
    usable_cpus: int = 1
    numa_nodes: int = 1
    numa_affinity_problem: str = ""
    """Why accelerate could not bind a process to the NUMA node of its device; empty when it could."""


def detect_machine(environment: Mapping[str, str]) -> Machine:
    """Look around once."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator.type if accelerator is not None else "cpu"
    return Machine(
        device_type=device,
        device_count=torch.accelerator.device_count() if accelerator is not None else 0,
        physical_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        usable_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        numa_nodes=count_numa_nodes(NUMA_NODES_DIR),
        numa_affinity_problem=find_numa_affinity_problem(device, environment),
    )


def count_numa_nodes(directory: Path) -> int:
    """Nodes that have processors; 1 where the system does not tell."""
    nodes = [node for node in directory.glob("node*") if re.fullmatch(r"node\d+", node.name)]
    return max(1, sum(bool(_read_text(node / "cpulist")) for node in nodes))


def find_numa_affinity_problem(device: str, environment: Mapping[str, str]) -> str:
    """What keeps accelerate from binding processes to NUMA nodes, with the way out; empty when nothing does."""
    if device != "cuda":
        return f"accelerate does it for CUDA devices only, this is {device}"
    if not hasattr(os, "sched_setaffinity"):
        return "this operating system cannot bind a process to processors"
    package, install = ("amdsmi", "comes with ROCm") if torch.version.hip else ("pynvml", "pip install nvidia-ml-py")
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is missing ({install})"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",") != [str(index) for index in range(len(visible.split(",")))]:
        return f"accelerate counts devices from 0 and does not know of CUDA_VISIBLE_DEVICES={visible}"
    return ""


def list_device_types(machine: Machine) -> tuple[str, ...]:
    """Every kind of device that training can be tried on."""
    return ("cpu",) if machine.device_type == "cpu" else (machine.device_type, "cpu")


def list_backends(machine: Machine) -> tuple[tuple[str, str], ...]:
    """(process-group backend, device it exchanges tensors of) for all that can be tried here."""
    backends = [("gloo", "cpu")]
    if torch.distributed.is_available() and torch.distributed.is_nccl_available() and machine.device_type == "cuda":
        backends.append(("nccl", "cuda"))
    if machine.device_type == "xpu" and torch.distributed.is_xccl_available():
        backends.append(("xccl", "xpu"))
    return tuple(backends)


def get_compute_toolkit() -> str:
    """The toolkit that torch was built for."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "none (this torch computes on the CPU)"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def get_peak_memory(device: torch.device) -> int:
    """The most bytes that this process ever held on ``device``; on a processor, of the machine's memory."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "max_memory_allocated"):
        return int(module.max_memory_allocated(device))
    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", 0) or _get_peak_resident() or info.rss)


def _get_peak_resident() -> int:
    try:
        import resource
    except ImportError:  # Windows, which has told its peak above
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def get_free_memory(device: torch.device) -> int:
    """Bytes that a new tensor may take there."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def has_device_memory(device: torch.device) -> bool:
    """Whether it copies from pinned host memory by itself, on streams, and says when its memory is out."""
    return device.type in ("cuda", "xpu")


def synchronize(device: torch.device) -> None:
    """Until everything that was sent to the device is done; a processor is done already."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def get_device_name(device: torch.device) -> str:
    """What the device calls itself; nothing for a processor, of which ``platform`` knows more."""
    module = getattr(torch, device.type, None)
    return "" if device.type == "cpu" or module is None else str(module.get_device_name(device))


MIXED_PRECISION_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""Precision of the frozen model; the adapters in it are always float32."""
