"""Checks of settings that need the model or the engine: device maps, DeepSpeed's own file, NVMe offload."""

import ctypes
import logging
import mmap
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.types import DeviceMap
from ..distributed.deepspeed_settings import DeepSpeedSettings
from ..errors import ConfigError
from ..problems import Problem
from .device_map import iter_parent_names, list_unsplit_modules

logger = logging.getLogger(__name__)
LIBAIO_FIX = "apt install libaio-dev g++ (dnf: libaio-devel gcc-c++) and pip install ninja, or use cpu"
AllGather = Callable[[list[Problem]], Sequence[list[Problem]]]


def raise_problems(problems: Iterable[Problem], all_gather: AllGather = lambda problems: [problems]) -> None:
    """Raise if there are any; with ``all_gather``, those of any rank on all ranks (machines have their own disks)."""
    if gathered := [problem for rank_problems in all_gather(list(problems)) for problem in rank_problems]:
        raise ConfigError(gathered)


def validate_device_map(model: nn.Module, device_map: DeviceMap) -> Iterator[Problem]:
    """Check a user's map against the model, which may be on the meta device."""
    modules, devices = dict(model.named_modules()), dict(device_map.device_by_module)
    unsplit = list_unsplit_modules(model)
    for name in devices:
        if name not in modules:
            yield Problem("device_map", f"{name!r} is no module of this model")
        elif block := next((block for block in unsplit if name.startswith(f"{block}.")), None):
            yield Problem("device_map", f"{name!r} is inside of {block!r}, which cannot be split", f"map {block!r}")
    missing = [
        name for name, _ in model.named_parameters() if not any(key in devices for key in iter_parent_names(name))
    ]
    if devices and missing:
        yield Problem(
            "device_map",
            f"{len(missing)} parameters have no device, such as {missing[0]}",
            'add "": 0 for all modules that are not listed',
        )


def validate_fsdp_classes(model: nn.Module, class_names: Sequence[str]) -> Iterator[Problem]:
    """Check the launcher's classes to wrap against the modules of the model."""
    known = {type(module).__name__ for module in model.modules()}
    if unknown := ",".join(name for name in class_names if name not in known):
        yield Problem(
            "",
            f"the launcher's fsdp_transformer_layer_cls_to_wrap {unknown}: this model has no such class",
            "remove the setting to use diffusers' classes",
        )


def validate_zero_config(settings: DeepSpeedSettings) -> Iterator[Problem]:
    """Check the user's DeepSpeed file with DeepSpeed's own validation."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**settings.build_config(pin_memory=False)["zero_optimization"])
    except ValueError as error:
        faults: Any = getattr(error, "errors", list)()  # pydantic's
        for fault in faults:
            yield Problem("", f"DeepSpeed's file: zero_optimization.{'.'.join(map(str, fault['loc']))}: {fault['msg']}")
        if not faults:
            yield Problem("", f"DeepSpeed: {error}")


def validate_libaio() -> Iterator[Problem]:
    """Compile DeepSpeed's async_io, which it does when it is first used."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        builder = AsyncIOBuilder()
        is_compatible = builder.is_compatible()
        if is_compatible:
            logger.info("loading DeepSpeed's async_io, which is compiled on first use (takes minutes)")
            _warn_of_lock(builder.NAME)
            builder.load(verbose=False)
    except Exception as error:  # compilers raise exceptions of their own
        reason = str(error).partition("\n")[0]
        yield _report_nvme(f"DeepSpeed's async_io cannot be built: {reason}", LIBAIO_FIX)
        return
    if not is_compatible:
        yield _report_nvme("DeepSpeed's async_io needs libaio and a compiler", LIBAIO_FIX)


def _warn_of_lock(name: str) -> None:
    """Name the lock of a compilation, for whose end torch waits without a word, even if its process was killed."""
    from torch.utils import cpp_extension

    lock = Path(cpp_extension._get_build_directory(name, verbose=False)) / "lock"
    if lock.exists():
        message = "%s is there: waiting for another process to compile; delete it if that process was killed"
        logger.warning(message, lock)


def _report_nvme(text: str, fix: str) -> Problem:
    return Problem("offload_param_device", text, fix, value="nvme")


def validate_offload_buffers(
    offload: Any, partition_sizes: Sequence[int], trainable_numel: int, dtype: torch.dtype
) -> Iterator[Problem]:
    """Check buffer settings of the user's DeepSpeed file with which DeepSpeed would crash later."""
    largest, locked = max(partition_sizes, default=0), offload.buffer_count * offload.buffer_size * dtype.itemsize
    if offload.buffer_size < largest:
        yield Problem(
            "",
            f"DeepSpeed's file: offload_param.buffer_size is {offload.buffer_size}, and the largest"
            f" partition has {largest} elements",
            f"set {largest}, or remove it",
        )
    elif offload.buffer_count < 2:
        yield Problem("", f"DeepSpeed's file: offload_param.buffer_count is {offload.buffer_count}", "set at least 2")
    elif not can_lock_memory(locked):
        yield _report_nvme(
            f"cannot lock {locked / 2**20:.0f} MiB of memory per process",
            "raise `ulimit -l`, or lower buffer_count or buffer_size in DeepSpeed's file",
        )
    if trainable_numel > offload.max_in_cpu:
        yield Problem(
            "",
            f"DeepSpeed's file: offload_param.max_in_cpu is {offload.max_in_cpu}, and the adapter has"
            f" {trainable_numel} elements per process, which stay in memory",
            "remove it",
        )


def validate_disk_space(directory: Path, num_bytes: int) -> Iterator[Problem]:
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        yield Problem(
            "offload_param_nvme_path",
            f"not enough disk space for the model: {num_bytes / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free",
            value=str(directory.parent),
        )


def can_lock_memory(num_bytes: int) -> bool:
    """Whether this much memory can be page-locked; DeepSpeed aborts the process where it cannot."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1))
    except (OSError, OverflowError, ValueError):
        return False
    address = ctypes.c_char.from_buffer(memory)
    arguments = ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(num_bytes)
    libc: Any = ctypes.CDLL(None)
    is_locked: bool = libc.mlock(*arguments) == 0
    libc.munlock(*arguments)
    return is_locked
