"""Set the learning rates of a step, and read those that had an effect, for optimizers that estimate their own, too."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def set_learning_rates(optimizer: torch.optim.Optimizer, peak_lrs: Sequence[float], factor: float) -> None:
    """Set the learning rate of every group to its peak times ``factor``; in place for tensors, as compile needs."""
    for group, peak in zip(optimizer.param_groups, peak_lrs, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(peak * factor)
        elif group["lr"] is not None:
            group["lr"] = peak * factor


def get_learning_rates(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Mapping[str, Any]:
    """The effective learning rate of each group, including the ``d`` that learning-rate-free optimizers estimate."""
    return {
        name: group["lr"] * group.get("d", 1.0)
        for name, group in zip(names, optimizer.param_groups, strict=True)
        if group["lr"] is not None
    }
