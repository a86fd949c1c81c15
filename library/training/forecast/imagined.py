"""Other processes that are not there: what they would send has its size, and what they would be sent is counted."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Imagined:
    """Those that share the tokens of a picture with this one."""

    rank = 0

    def __init__(self, size: int, send: Callable[[float], None]):
        """``send`` is told of bytes that would leave this process."""
        self.size, self._send = size, send

    def swapped(self, sent: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
        """So many rows go to each process, and so many come from each."""
        self._send(sent.nbytes * (1 - there[self.rank] / sum(there)))
        return sent.new_empty(sum(here), *sent.shape[1:])

    def gathered(self, part: Tensor) -> list[Tensor]:
        """The parts of all processes, which have one size."""
        self._send(float((self.size - 1) * part.nbytes))
        return [torch.empty_like(part) for _ in range(self.size)]


def around(devices: int) -> float:
    """So often a tensor leaves a device until all have the sum of theirs."""
    return 2 * (devices - 1) / devices
