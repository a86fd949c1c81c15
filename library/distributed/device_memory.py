"""Measured memory of a device, or of this process on the CPU: the peak, and what is free.

CUDA, ROCm (whose devices are called ``cuda``) and XPU count the peak of each process.  MPS has no counter of the peak;
what its driver holds is nearest to it, since the allocator keeps what it has.
"""

import sys

import psutil
import torch


def get_peak_memory(device: torch.device) -> int:
    """Return this process's peak memory on ``device`` in bytes; for cpu, its peak resident set."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "max_memory_allocated"):
        return int(module.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", 0) or _get_peak_resident() or info.rss)


def _get_peak_resident() -> int:
    if sys.platform == "win32":  # its peak is in memory_info
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def get_free_memory(device: torch.device) -> int:
    """Return the free bytes on ``device``."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    if device.type == "mps":  # a part of the host's memory, of which Metal recommends a limit
        return max(0, int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory()))
    return int(psutil.virtual_memory().available)


def has_device_memory(device: torch.device) -> bool:
    """Whether it has memory of its own, with asynchronous copies from pinned host memory and out-of-memory errors."""
    return device.type in ("cuda", "xpu")


def get_total_memory(device: torch.device) -> int:
    """Return the bytes that ``device`` has; of MPS, what Metal recommends as the limit."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[1])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return int(psutil.virtual_memory().total)
