"""Other processes that are not there: what they would send has its size, and what they would be sent is counted."""

from collections.abc import Callable
from typing import Any

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
        apply: Any = _Swapped.apply
        return apply(sent, rows, sent.nbytes * (1 - stays), self._send), tie


class _Swapped(torch.autograd.Function):
    """What was sent goes back as a gradient."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, rows: int, count: float, send: Callable[[float], None]) -> Tensor:
        ctx.rows, ctx.count, ctx.send = sent.shape[0], count, send
        send(count)
        return sent.new_empty(rows, *sent.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Swapped.forward(ctx, gradients[0], ctx.rows, ctx.count, ctx.send), None, None, None


def around(devices: int) -> float:
    """So often a tensor leaves a device until all have the sum of theirs."""
    return 2 * (devices - 1) / devices
