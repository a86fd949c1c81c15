"""Other processes that are not there: what they would send has its size, and what they would be sent is counted."""

from collections.abc import Callable

import torch
from torch import Tensor


class Imagined:
    """Those that share the tokens of a picture with this one."""

    rank = 0

    def __init__(self, size: int, send: Callable[[float], None]):
        """``send`` is told of bytes that would leave this process."""
        self.size, self._send = size, send

    def swapped(self, sent: Tensor, tie: Tensor, whose: Tensor, rows: int, *, is_out: bool) -> tuple[Tensor, Tensor]:
        """Rows of own tokens go to each process and rows of all tokens come, or the other way round if ``is_out``."""
        stays = float((whose == self.rank).float().mean()) if is_out else 1 / self.size
        self._send(sent.nbytes * (1 - stays))
        return sent.new_empty(rows, *sent.shape[1:]), torch.empty_like(tie)


def around(devices: int) -> float:
    """So often a tensor leaves a device until all have the sum of theirs."""
    return 2 * (devices - 1) / devices
