"""The machine: accelerators, CPUs and NUMA nodes, detected without initializing a device.

Backend flags of torch are set here as well, those of ``--deterministic`` and of attention; TF32 and
``cudnn.benchmark`` stay at torch's defaults.
"""

import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

HOST = torch.device("cpu")
"""The device whose memory is the host's."""

NUMA_NODES_DIR = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Machine:
    """The hardware, independent of settings."""

    device_type: str = "cpu"
    """The type of the accelerator, or cpu without one."""
    device_count: int = 0
    physical_cores: int = 1
    usable_cpus: int = 1
    numa_nodes: int = 1
    numa_affinity_problem: str = ""
    """The reason why accelerate cannot bind a process to the NUMA node of its device; empty if it can."""
    lacks_numa_package: bool = False
    """Whether the reason is a package that accelerate needs for that, and stops without."""


def detect_machine(environment: Mapping[str, str]) -> Machine:
    """Detect the hardware of this machine."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator.type if accelerator is not None else "cpu"
    return Machine(
        device_type=device,
        device_count=torch.accelerator.device_count() if accelerator is not None else 0,
        physical_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        usable_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        numa_nodes=count_numa_nodes(NUMA_NODES_DIR),
        numa_affinity_problem=find_numa_affinity_problem(device, environment),
        lacks_numa_package=device == "cuda" and importlib.util.find_spec(_get_numa_package()) is None,
    )


def get_accelerator_or_host() -> torch.device:
    """Return the accelerator of this machine, for work of one process; the host without one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return HOST if accelerator is None else accelerator


def count_numa_nodes(directory: Path) -> int:
    """Count the nodes that have CPUs; 1 where the system does not list them."""
    nodes = [node for node in directory.glob("node*") if re.fullmatch(r"node\d+", node.name)]
    return max(1, sum(bool(_read_text(node / "cpulist")) for node in nodes))


_NUMA_PACKAGES = {"amdsmi": "comes with ROCm", "pynvml": "pip install nvidia-ml-py"}
"""The package with which accelerate finds the NUMA node of a device, and where it comes from."""


def _get_numa_package() -> str:
    return "amdsmi" if torch.version.hip else "pynvml"


def find_numa_affinity_problem(device: str, environment: Mapping[str, str]) -> str:
    """Return why accelerate cannot bind processes to NUMA nodes, with a fix; empty if it can."""
    if device != "cuda":
        return f"accelerate supports it for CUDA devices only, this is {device}"
    if not hasattr(os, "sched_setaffinity"):
        return "this operating system has no CPU affinity"
    if importlib.util.find_spec(package := _get_numa_package()) is None:
        return f"the package {package} is missing ({_NUMA_PACKAGES[package]})"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",") != [str(index) for index in range(len(visible.split(",")))]:
        return f"accelerate counts devices from 0 and ignores CUDA_VISIBLE_DEVICES={visible}"
    return ""


def list_device_types(machine: Machine) -> tuple[str, ...]:
    """List the device types that training can run on."""
    return ("cpu",) if machine.device_type == "cpu" else (machine.device_type, "cpu")


def list_backends(machine: Machine) -> tuple[tuple[str, str], ...]:
    """List (process-group backend, device type of its tensors) for every backend available here."""
    backends = [("gloo", "cpu")]
    if torch.distributed.is_available() and torch.distributed.is_nccl_available() and machine.device_type == "cuda":
        backends.append(("nccl", "cuda"))
    if machine.device_type == "xpu" and torch.distributed.is_xccl_available():
        backends.append(("xccl", "xpu"))
    return tuple(backends)


def get_compute_toolkit() -> str:
    """Return the toolkit that torch was built for."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if xpu := getattr(torch.version, "xpu", None):
        return f"oneAPI {xpu}"
    return "Metal" if torch.backends.mps.is_built() else "none (a CPU build of torch)"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device; no effect for cpu."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def supports_bf16() -> bool:
    """Whether this machine computes bf16 without emulation; a machine without a GPU does, MPS from macOS 14 on."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return not torch.backends.mps.is_available() or bool(torch.backends.mps.is_macos_or_newer(14, 0))


def enable_deterministic_kernels() -> None:
    """Let torch use deterministic kernels only; operations that have none raise an error which names them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS reads when a device is first used
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # no memory is read before it is written
    torch.backends.cudnn.benchmark = False


def disable_cudnn_attention() -> None:
    """Keep ``scaled_dot_product_attention`` from choosing cuDNN, whose backward can give NaN or read invalid memory.

    torch 2.11 and later prefers it on Hopper and Blackwell.  ``--attn_mode cudnn`` asks for it in each call.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def get_device_name(device: torch.device) -> str:
    """Return the product name of the device; empty for cpu."""
    module: Any = getattr(torch, device.type, None)
    if device.type == "mps":  # which torch gives no name
        return f"GPU of {platform.processor() or platform.machine()} (Metal)"
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else ""


MIXED_PRECISION_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""The dtype of the frozen model; adapters are float32, unless ``--full_bf16`` casts them."""
