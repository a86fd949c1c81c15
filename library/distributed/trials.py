"""Small real computations that show whether something works here; each raises when it does not."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn


def memory(device: str) -> list[dict[str, str | float]]:
    """Name and memory in GiB of every device of a kind."""
    if device == "cpu":
        import psutil

        told = psutil.virtual_memory()
        return [{"name": "main memory", "free": told.available / 2**30, "total": told.total / 2**30}]
    module = torch.get_device_module(device)
    found: list[dict[str, str | float]] = []
    for index in range(torch.accelerator.device_count()):
        name = module.get_device_name(index) if hasattr(module, "get_device_name") else device
        free, total = module.mem_get_info(index) if hasattr(module, "mem_get_info") else (0, 0)
        found.append({"name": str(name), "free": free / 2**30, "total": total / 2**30})
    return found


def precision(device: str, kind: str) -> str:
    """A step in this precision as accelerate computes it; what it silently replaces counts as not working."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=kind, cpu=device == "cpu")
    model = nn.Linear(64, 32)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with accelerator.autocast():
        # The model that accelerate wrapped returns fp32; what it computes in is seen inside autocast.
        inner = nn.functional.linear(torch.ones(4, 64, device=accelerator.device), model.weight)
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}[kind]
    if inner.dtype != wanted:
        raise RuntimeError(f"accelerate computes in {str(inner.dtype).removeprefix('torch.')} instead")
    accelerator.backward(inner.float().square().mean())
    optimizer.step()
    if not bool(torch.isfinite(model.weight).all()):
        raise RuntimeError("the result is not finite")
    return str(inner.dtype)


def compile_one_kernel(device: str) -> str:
    """Compile something that becomes one kernel, from nothing, and compare with the uncompiled result."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # a kernel from an earlier day would prove nothing
        _compile_and_compare(device)
        if not any(Path(folder).rglob("*")):
            raise RuntimeError("torch.compile did nothing; is it switched off by an environment variable?")
    return "inductor"


def _compile_and_compare(device: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(1024, device=device)

    def sum_of_waves(x: torch.Tensor) -> torch.Tensor:
        return (torch.sin(x) * 2 + torch.cos(x)).sum()

    compiled = torch.compile(sum_of_waves, backend="inductor")
    torch.testing.assert_close(compiled(values), sum_of_waves(values), rtol=1e-4, atol=1e-4)


def all_reduce(backend: str, device: str) -> str:
    """Form a group of one and exchange a tensor with itself."""
    from torch import distributed

    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting").as_uri()
        distributed.init_process_group(backend, init_method=meeting, rank=0, world_size=1,
                                       timeout=timedelta(seconds=30))  # fmt: skip
        value = torch.full((3,), 7.0, device=device)
        distributed.all_reduce(value)
        result = value.tolist()
        distributed.destroy_process_group()
    if result != [7.0, 7.0, 7.0]:
        raise RuntimeError(f"an all-reduce of 7 over one process gave {result}")
    return backend
