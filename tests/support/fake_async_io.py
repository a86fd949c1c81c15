"""A fake of DeepSpeed's async_io, which needs libaio: nothing is read or written before ``wait``.

So data that is used before ``wait``, or read into a buffer that was reused for another weight, is always wrong.
"""

from types import SimpleNamespace

import torch


class Handle:
    """The methods of ``async_io.aio_handle`` that weight offloading uses."""

    def __init__(self, **_: object):
        self.pending: list[tuple[str, torch.Tensor, str]] = []

    def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(count, dtype=like.dtype)

    def async_pread(self, buffer: torch.Tensor, path: str, _: int) -> int:
        self.pending.append(("r", buffer, path))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, _: int) -> int:
        self.pending.append(("w", buffer, path))
        return 0

    def wait(self) -> int:
        for kind, buffer, path in self.pending:
            memory = buffer.view(torch.uint8).numpy()
            with open(path, f"{kind}b") as file:
                if kind == "w":
                    file.write(memory.tobytes())
                else:
                    assert file.readinto(memory) == len(memory)
        count, self.pending = len(self.pending), []
        return count


class Builder:
    """The methods of ``AsyncIOBuilder`` that weight offloading uses."""

    def is_compatible(self) -> bool:
        return True

    def load(self, verbose: bool = True) -> SimpleNamespace:
        return SimpleNamespace(aio_handle=Handle)
