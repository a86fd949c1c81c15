"""How far a prediction is from its target, number by number."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.schema_objective import LossConfig
from .process import NUM_TRAIN_TIMESTEPS, NoiseProcess


def l2(prediction: Tensor, target: Tensor) -> Tensor:
    """The square of the difference."""
    return F.mse_loss(prediction, target, reduction="none")


def l1(prediction: Tensor, target: Tensor) -> Tensor:
    """The difference without its sign."""
    return F.l1_loss(prediction, target, reduction="none")


PLAIN_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"l2": l2, "l1": l1}
"""What ``loss_type`` can name."""


def huber(prediction: Tensor, target: Tensor, c: Tensor) -> Tensor:
    """Pseudo-Huber, ``2 c (sqrt(d^2 + c^2) - c)``: the square below the threshold ``c``, a straight line above it."""
    return c * smooth_l1(prediction, target, c)


def smooth_l1(prediction: Tensor, target: Tensor, c: Tensor) -> Tensor:
    """``2 (sqrt(d^2 + c^2) - c)``: twice the difference above the threshold, rounded off below it."""
    difference = prediction - target
    # The same as above without a difference of nearly equal numbers, of which nothing is left where d is small.
    return 2 * difference**2 / (torch.hypot(difference, c) + c)


THRESHOLD_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"huber": huber, "smooth_l1": smooth_l1}
"""The names of ``loss_type`` that have a threshold."""


def constant_threshold(timesteps: Tensor, snr: Tensor, c: float) -> Tensor:
    """The same at all times."""
    return torch.full_like(timesteps, c)


def exponential_threshold(timesteps: Tensor, snr: Tensor, c: float) -> Tensor:
    """``c ** (t / 1000)``: from 1 at the picture to ``c`` at noise."""
    return torch.exp(math.log(c) * timesteps / NUM_TRAIN_TIMESTEPS)


def snr_threshold(timesteps: Tensor, snr: Tensor, c: float) -> Tensor:
    """``(1 - c) / (1 + r)^2 + c`` with ``r`` the ratio of noise to signal: also from 1 to ``c``."""
    return (1 - c) / (1 + snr.rsqrt()) ** 2 + c


HUBER_SCHEDULES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "constant": constant_threshold,
    "exponential": exponential_threshold,
    "snr": snr_threshold,
}
"""What ``huber_schedule`` can name: the threshold at time ``t``, where signal and noise are in this ratio."""


def compute_elementwise_loss(
    prediction: Tensor, target: Tensor, timesteps: Tensor, process: NoiseProcess, config: LossConfig
) -> Tensor:
    """The loss of each number, in float32; shape as ``predicted``."""
    prediction, target = prediction.float(), target.float()
    if config.loss_type in PLAIN_LOSSES:
        return PLAIN_LOSSES[config.loss_type](prediction, target)
    c = config.huber_scale * HUBER_SCHEDULES[config.huber_schedule](timesteps, process.snr(timesteps), config.huber_c)
    return THRESHOLD_LOSSES[config.loss_type](prediction, target, c.view(-1, *[1] * (prediction.ndim - 1)))


def resize_mask_to_latents(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks of pixels (B, 1, height, width) in bytes, as shares (B, 1, H, W) of what each latent covers."""
    return F.interpolate(mask.float() / 255, size=size, mode="area")


def reduce_loss_per_sample(loss: Tensor, mask: Tensor | None, *, normalize_by_area: bool = False) -> Tensor:
    """One number for each sample (B,) of an elementwise loss (B, C, H, W).

    As in sd-scripts the mean is over all elements, so that a picture of which a mask leaves a quarter weighs a quarter.
    ``by_area`` divides by the area of the mask instead, so that each picture weighs the same; one of which nothing is
    left weighs nothing.
    """
    if mask is None:
        return loss.flatten(1).mean(1)
    means = (loss * mask).flatten(1).mean(1)
    if not normalize_by_area:
        return means
    area = mask.flatten(1).mean(1)
    return means / area.where(area > 0, 1)
