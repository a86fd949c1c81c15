"""Phases of a step: named in a profile, and named by an error when the device runs out of memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch.profiler import record_function

from ..data.batch import PixelBatch

PHASE = "phase/"
"""How the names of phases begin in a profile."""


SYNCHRONIZE: ContextVar[Callable[[], None] | None] = ContextVar("synchronize", default=None)
"""Waits for the device; set by a profiler, so that the time of a phase includes the device's work."""


class OutOfMemory(Exception):
    """The device, or the machine, had no memory left for a part of a step."""

    def __init__(self, phase: str, batch: PixelBatch | None = None, reason: str = ""):
        super().__init__(phase, reason)
        self.phase, self.batch, self.reason = phase, batch, reason

    def strip_traceback(self) -> "OutOfMemory":
        """The same without the frames that it came through, which hold on to the memory that is missing."""
        return OutOfMemory(self.phase, self.batch, self.reason)


@contextmanager
def record_phase(name: str, batch: PixelBatch | None = None) -> Iterator[None]:
    """Name this part of a step for torch.profiler; raise ``OutOfMemory`` of the innermost phase that has none left."""
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


OOM_MESSAGES = ("_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "HIP error: out of memory", "'out of memory'")
"""What is said by those that take memory of a device past torch: for matrices, convolutions, kernels, messages."""


def is_out_of_memory(error: Exception) -> bool:
    """Devices have a type for it; the machine's own memory and libraries of devices have a sentence."""
    if isinstance(error, (OutOfMemory, torch.OutOfMemoryError, MemoryError)):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and (
        should_reduce_batch_size(RuntimeError(said)) or any(mark in said for mark in OOM_MESSAGES)
    )
