"""How far a prediction is from its target, number by number."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.schema import LossConfig
from .process import STEPS, Process


def l2(predicted: Tensor, target: Tensor) -> Tensor:
    """The square of the difference."""
    return F.mse_loss(predicted, target, reduction="none")


def l1(predicted: Tensor, target: Tensor) -> Tensor:
    """The difference without its sign."""
    return F.l1_loss(predicted, target, reduction="none")


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"l2": l2, "l1": l1}
"""What ``loss_type`` can name."""


def huber(predicted: Tensor, target: Tensor, c: Tensor) -> Tensor:
    """Pseudo-Huber, ``2 c (sqrt(d^2 + c^2) - c)``: the square below the threshold ``c``, a straight line above it."""
    return c * smooth_l1(predicted, target, c)


def smooth_l1(predicted: Tensor, target: Tensor, c: Tensor) -> Tensor:
    """``2 (sqrt(d^2 + c^2) - c)``: twice the difference above the threshold, rounded off below it."""
    difference = predicted - target
    # The same as above without a difference of nearly equal numbers, of which nothing is left where d is small.
    return 2 * difference**2 / (torch.hypot(difference, c) + c)


ROUNDED: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"huber": huber, "smooth_l1": smooth_l1}
"""The names of ``loss_type`` that have a threshold."""


def constant(t: Tensor, snr: Tensor, c: float) -> Tensor:
    """The same at all times."""
    return torch.full_like(t, c)


def exponential(t: Tensor, snr: Tensor, c: float) -> Tensor:
    """``c ** (t / 1000)``: from 1 at the picture to ``c`` at noise."""
    return torch.exp(math.log(c) * t / STEPS)


def by_snr(t: Tensor, snr: Tensor, c: float) -> Tensor:
    """``(1 - c) / (1 + r)^2 + c`` with ``r`` the ratio of noise to signal: also from 1 to ``c``."""
    return (1 - c) / (1 + snr.rsqrt()) ** 2 + c


SCHEDULES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "constant": constant,
    "exponential": exponential,
    "snr": by_snr,
}
"""What ``huber_schedule`` can name: the threshold at time ``t``, where signal and noise are in this ratio."""


def elementwise(predicted: Tensor, target: Tensor, t: Tensor, process: Process, config: LossConfig) -> Tensor:
    """The loss of each number, in float32; shape as ``predicted``."""
    predicted, target = predicted.float(), target.float()
    if config.loss_type in LOSSES:
        return LOSSES[config.loss_type](predicted, target)
    c = config.huber_scale * SCHEDULES[config.huber_schedule](t, process.snr(t), config.huber_c)
    return ROUNDED[config.loss_type](predicted, target, c.view(-1, *[1] * (predicted.ndim - 1)))
