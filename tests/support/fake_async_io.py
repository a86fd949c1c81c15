"""A fake of DeepSpeed's async_io, which needs libaio: nothing is read or written before ``wait``.

So data that is used too early, or read into a buffer that was given to another weight, is wrong every time.
"""

from types import SimpleNamespace

import torch


class Handle:
    """As much of ``async_io.aio_handle`` as is used for weights."""

    def __init__(self, **_: object):
        self.waiting: list[tuple[str, torch.Tensor, str]] = []

    def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(count, dtype=like.dtype)

    def async_pread(self, buffer: torch.Tensor, path: str, _: int) -> int:
        self.waiting.append(("r", buffer, path))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, _: int) -> int:
        self.waiting.append(("w", buffer, path))
        return 0

    def wait(self) -> int:
        for kind, buffer, path in self.waiting:
            memory = buffer.view(torch.uint8).numpy()
            with open(path, f"{kind}b") as file:
                if kind == "w":
                    file.write(memory.tobytes())
                else:
                    assert file.readinto(memory) == len(memory)
        done, self.waiting = len(self.waiting), []
        return done


class Builder:
    """As much of ``AsyncIOBuilder``."""

    def is_compatible(self) -> bool:
        return True

    def load(self, verbose: bool = True) -> SimpleNamespace:
        return SimpleNamespace(aio_handle=Handle)
