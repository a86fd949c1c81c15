"""Exponential moving average (EMA) of the adapter weights, enabled by ``ema_decay``.

Validation uses the average, which is saved as a file of its own (``NAME-ema.safetensors``); training goes on with the
weights themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AdapterEMA:
    """EMA of parameters, kept in float32 on their devices."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], decay: float, on_swap: Callable[[], None] = lambda: None
    ):
        """``on_swap`` is called whenever other values were written to the parameters."""
        self.parameters, self.decay, self._on_swap = list(parameters), decay, on_swap
        self.shadow_params = [item.detach().to(torch.float32, copy=True) for item in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after ``step`` steps; the decay warms up as a function of the step: 0.1, 0.18, 0.25 ..."""
        decay = min(self.decay, step / (step + 9))
        current = [item.detach().to(torch.float32) for item in self.parameters]
        get_ema_multi_avg_fn(decay)(self.shadow_params, current, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def swap_parameters(self) -> Iterator[None]:
        """Let the parameters hold the average within the context, and the average those of float32.

        They change places tensor by tensor, so that no second copy of a large model is needed.  Parameters of lower
        precision cannot hold the average exactly: they alone are copied.
        """
        copies = self._exchange([None] * len(self.parameters))
        try:
            yield
        finally:
            self._exchange(copies)

    @torch.no_grad()
    def _exchange(self, copies: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Restore the parameters that have a copy, swap the others; return copies of those that cannot be swapped."""
        replaced: list[torch.Tensor | None] = []
        for parameter, average, copy in zip(self.parameters, self.shadow_params, copies, strict=True):
            current = parameter.detach().clone()
            is_swapped = parameter.dtype == average.dtype
            parameter.copy_(average if copy is None else copy)
            if is_swapped:
                average.copy_(current)
            replaced.append(None if is_swapped else current)
        self._on_swap()
        return replaced
