"""The gradients of a model in one piece of memory, which is exchanged in one go."""

import torch
import torch.distributed as dist
from torch import nn


class FlatGradients:
    """A copy of all gradients; making it may need memory, exchanging it does not."""

    def __init__(self, model: nn.Module, *, include_missing: bool = False):
        """``of_all``: of everything that learns, also what got no gradient on this process."""
        if include_missing:
            for item in model.parameters():
                if item.requires_grad and item.grad is None:
                    item.grad = torch.zeros_like(item)
        self._gradients = [item.grad for item in model.parameters() if item.grad is not None]
        self._flat = torch.cat([gradient.reshape(-1) for gradient in self._gradients])

    def all_reduce_sum(self) -> None:
        """The model's gradients become the sum over all processes."""
        self.all_reduce_mean(1)

    def all_reduce_mean(self, divisor: int) -> None:
        """The same, divided by so many."""
        dist.all_reduce(self._flat)
        self._flat /= divisor
        parts = torch.split(self._flat, [gradient.numel() for gradient in self._gradients])
        for gradient, part in zip(self._gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
