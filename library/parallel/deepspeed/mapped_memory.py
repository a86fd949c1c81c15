"""Memory of offloaded tensors in files on a fast disk, where the model itself is trained with ZeRO 3.

To DeepSpeed these tensors are in host memory.  The file of each is mapped, so that the system keeps in memory what is
being used and writes the rest to the disk.  DeepSpeed's own swapping to NVMe would hide the optimizer state from
checkpoints, and takes Adam only; a mapped tensor is one like any other, with which everything gives equal bits.
"""

import errno
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import UserError
from ...problems import Problem

MIN_BYTES = 2**20
"""The smallest size of a tensor that is moved to a file."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk that has no room."""


class MappedMemory:
    """Moves the memory of tensors to files of a folder, which have no name and vanish with the process."""

    def __init__(self, option: str, folder: str):
        """``option`` is the one that named the folder."""
        self._option, self._folder = option, Path(folder)
        self._own = set[int]()
        """Addresses of the memory that is mapped."""

    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors of host memory, and keep those together that share memory; all that do have to be given."""
        sharing = defaultdict[int, list[Tensor]](list)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" and storage.nbytes() >= MIN_BYTES:
                sharing[storage.data_ptr()].append(tensor)
        for address, group in sharing.items():
            if address not in self._own:
                self._move_storage(group)

    def move_state_after_steps(self, optimizer: Optimizer) -> None:
        """Move the state of each group of parameters as soon as a step has allocated it."""
        optimizer.register_step_post_hook(lambda optimizer, *_: self.move_state(optimizer))

    def move_state(self, optimizer: Optimizer) -> None:
        """Move what the optimizer keeps for its parameters, such as what it has just allocated in its first step."""
        self.move(value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor))

    @torch.no_grad()
    def _move_storage(self, tensors: list[Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        mapped = self._map(storage.nbytes()).untyped_storage()
        mapped.copy_(storage)
        for tensor in tensors:
            view = torch.empty(0, dtype=tensor.dtype)
            tensor.data = view.set_(mapped, tensor.storage_offset(), tensor.size(), tensor.stride())
        self._own.add(mapped.data_ptr())

    def _map(self, num_bytes: int) -> Tensor:
        try:
            descriptor, path = tempfile.mkstemp(prefix="lorikeet-memory-", dir=self._folder)
            try:
                if sys.platform == "linux":  # or a full disk would end the process in a later write
                    os.posix_fallocate(descriptor, 0, num_bytes)
                return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            finally:
                os.close(descriptor)
                os.unlink(path)
        except OSError as error:
            fix = "free some space, or name a folder of another disk" if error.errno in FULL else "name another folder"
            text = f"{self._folder}: {num_bytes / 2**20:.0f} MiB cannot be reserved: {error.strerror}"
            raise UserError(Problem(self._option, text, fix)) from None
