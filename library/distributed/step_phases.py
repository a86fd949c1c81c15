"""Phases of a training step: named ranges in a profile, and the place of an out-of-memory error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch.profiler import record_function

from ..dataloader.batch import PixelBatch

PHASE = "phase/"
"""Prefix of the phases' names in a profile."""

SYNCHRONIZE: ContextVar[Callable[[], None] | None] = ContextVar("synchronize", default=None)
"""Synchronizes the device; set by the profiler, so that a phase's time includes the device's work."""

OOM_MESSAGES = (
    *("_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "HIP error: out of memory", "'out of memory'"),
    *("MPS backend out of memory", "Invalid buffer size", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
)
"""Out-of-memory messages of libraries that bypass torch's allocator (BLAS, convolutions, kernels, NCCL), and of MPS and
XPU, whose errors are plain ``RuntimeError``."""


class OutOfMemory(Exception):
    """A phase of a step ran out of device or host memory."""

    def __init__(self, phase: str, batch: PixelBatch | None = None, reason: str = ""):
        super().__init__(phase, reason)
        self.phase, self.batch, self.reason = phase, batch, reason

    def strip_traceback(self) -> "OutOfMemory":
        """Return a copy without the traceback, whose frames keep the tensors of the failed step alive."""
        return OutOfMemory(self.phase, self.batch, self.reason)


@contextmanager
def record_phase(name: str, batch: PixelBatch | None = None) -> Iterator[None]:
    """Name this part of a step for torch.profiler; turn an out-of-memory error inside into ``OutOfMemory``."""
    synchronize = SYNCHRONIZE.get() or _do_nothing
    try:
        synchronize()
        with record_function(f"{PHASE}{name}"):
            yield
            synchronize()
    except Exception as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(name, batch, str(error).partition("\n")[0]) from None


def _do_nothing() -> None: ...


def find_out_of_memory(error: BaseException | None) -> Exception | None:
    """Return the error that says that memory is out: this one, or the one that torch's pipeline raises it from."""
    if not isinstance(error, Exception):
        return None
    if is_out_of_memory(error):
        return error
    is_from_pipeline = isinstance(error, RuntimeError) and str(error).lstrip().startswith("[Stage ")
    return find_out_of_memory(error.__cause__) if is_from_pipeline else None


def is_out_of_memory(error: Exception) -> bool:
    """Recognize torch's exception types, and by message those of the host's memory and of device libraries."""
    if isinstance(error, (OutOfMemory, torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    if "CUDNN_STATUS_NOT_SUPPORTED" in message:  # accelerate takes it for out of memory
        return False
    return isinstance(error, RuntimeError) and (
        should_reduce_batch_size(RuntimeError(message)) or any(part in message for part in OOM_MESSAGES)
    )
