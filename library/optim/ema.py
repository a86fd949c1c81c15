"""A running average of the adapter, which is often better than where the last steps happened to end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AdapterEMA:
    """Exponential average of parameters, in float32 beside them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float):
        self.parameters, self.decay = list(parameters), decay
        self.shadow_params: list[torch.Tensor] = [
            item.detach().to(torch.float32, copy=True) for item in self.parameters
        ]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after ``step`` steps; early on the average follows faster, for its start is no result.

        The decay is a function of the step, so there is no counter that a resumed run could lose.
        """
        decay = min(self.decay, step / (step + 9))  # 0.1, 0.18, 0.25 ... of the past in the first steps
        current = [item.detach().to(torch.float32) for item in self.parameters]
        get_ema_multi_avg_fn(decay)(self.shadow_params, current, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def swap_parameters(self) -> Iterator[None]:
        """Inside, the parameters hold the average."""
        kept = [item.detach().clone() for item in self.parameters]
        self._copy_to_parameters(self.shadow_params)
        try:
            yield
        finally:
            self._copy_to_parameters(kept)

    @torch.no_grad()
    def _copy_to_parameters(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
