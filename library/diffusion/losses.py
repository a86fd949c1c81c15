"""Loss functions: L2, L1, Huber and smooth L1, with the schedules of their threshold over timesteps.

To add a loss: write ``(prediction, target, context) -> elementwise loss``, list it in ``LOSSES`` under its name, and
add the name to the choices of ``loss_type`` in ``config/schema_objective.py``.  An option of its own is one more field
there, which the function reads from ``context.config``.  ``tests/unit/diffusion/test_losses.py`` tries each option with
each loss.

Masks and the mean per sample are in ``masked_loss``, weights by timestep in ``weighting``; the weight of a sample
(``prior_loss_weight``, 0 for one that replaces an unreadable image) is set in ``dataloader.manifest_builder`` and
applied in ``training.task``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.schema_objective import LossConfig
from .process import NoiseProcess


@dataclass(frozen=True)
class LossContext:
    """The loss options and the timestep of each sample, which a loss may depend on besides prediction and target."""

    config: LossConfig
    timesteps: Tensor  # (B,), 0..1000
    process: NoiseProcess

    def compute_snr(self) -> Tensor:
        """Compute the signal-to-noise ratio of each sample (B,)."""
        return self.process.snr(self.timesteps)


LossFunction = Callable[[Tensor, Tensor, LossContext], Tensor]
"""A function of prediction and target, both float32, and the context, which returns the loss of each element."""

HuberSchedule = Callable[[LossContext], Tensor]
"""A function that returns the threshold of each sample (B,), before it is multiplied by ``huber_scale``."""


def l2(prediction: Tensor, target: Tensor, context: LossContext) -> Tensor:
    """Squared error."""
    return F.mse_loss(prediction, target, reduction="none")


def l1(prediction: Tensor, target: Tensor, context: LossContext) -> Tensor:
    """Absolute error."""
    return F.l1_loss(prediction, target, reduction="none")


def huber(prediction: Tensor, target: Tensor, context: LossContext) -> Tensor:
    """Pseudo-Huber, ``2 c (sqrt(d^2 + c^2) - c)``: quadratic below the threshold ``c``, linear above it."""
    c = compute_huber_threshold(prediction, context)
    return c * compute_smooth_absolute(prediction - target, c)


def smooth_l1(prediction: Tensor, target: Tensor, context: LossContext) -> Tensor:
    """``2 (sqrt(d^2 + c^2) - c)``: twice the absolute error above the threshold ``c``, smooth below it."""
    return compute_smooth_absolute(prediction - target, compute_huber_threshold(prediction, context))


def compute_smooth_absolute(difference: Tensor, c: Tensor) -> Tensor:
    """Compute ``2 (sqrt(d^2 + c^2) - c)`` in the form that loses no digits where ``d`` is small."""
    return 2 * difference**2 / (torch.hypot(difference, c) + c)


LOSSES: Mapping[str, LossFunction] = {"l2": l2, "l1": l1, "huber": huber, "smooth_l1": smooth_l1}
"""The loss function of each value of ``loss_type``."""


def constant_threshold(context: LossContext) -> Tensor:
    """``huber_c`` at all timesteps."""
    return torch.full_like(context.timesteps, context.config.huber_c)


def exponential_threshold(context: LossContext) -> Tensor:
    """``huber_c ** (t / 1000)``: from 1 at ``t = 0`` to ``huber_c`` at pure noise."""
    return torch.exp(math.log(context.config.huber_c) * context.timesteps / context.process.num_timesteps)


def snr_threshold(context: LossContext) -> Tensor:
    """``(1 - c) / (1 + r)^2 + c`` with ``r = 1 / sqrt(snr)``: from 1 without noise to ``c = huber_c`` at pure noise."""
    c = context.config.huber_c
    return (1 - c) / (1 + context.compute_snr().rsqrt()) ** 2 + c


HUBER_SCHEDULES: Mapping[str, HuberSchedule] = {
    "constant": constant_threshold,
    "exponential": exponential_threshold,
    "snr": snr_threshold,
}
"""The threshold of Huber and smooth L1 over the timesteps, for each value of ``huber_schedule``."""


def compute_huber_threshold(prediction: Tensor, context: LossContext) -> Tensor:
    """Compute the threshold of Huber and smooth L1 for each sample, of a shape that broadcasts to ``prediction``."""
    config = context.config
    threshold = config.huber_scale * HUBER_SCHEDULES[config.huber_schedule](context)
    return threshold.view(-1, *[1] * (prediction.ndim - 1))


def compute_elementwise_loss(prediction: Tensor, target: Tensor, context: LossContext) -> Tensor:
    """Compute the unreduced loss in float32, of the shape of ``prediction``, whatever their precision is."""
    return LOSSES[context.config.loss_type](prediction.float(), target.float(), context)
