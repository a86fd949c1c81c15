"""Loss functions (L2, L1, Huber, smooth L1 with their threshold schedules), masks, and the reduction per sample.

The weight of a sample (``prior_loss_weight``, 0 for one that replaces an unreadable image) is applied in
``training.task``; weights by timestep are in ``weighting``.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.schema_objective import LossConfig
from .process import NUM_TRAIN_TIMESTEPS, NoiseProcess


def l2(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared error per element."""
    return F.mse_loss(prediction, target, reduction="none")


def l1(prediction: Tensor, target: Tensor) -> Tensor:
    """Absolute error per element."""
    return F.l1_loss(prediction, target, reduction="none")


PLAIN_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"l2": l2, "l1": l1}
"""Values of ``loss_type`` without a threshold."""


def huber(prediction: Tensor, target: Tensor, c: Tensor) -> Tensor:
    """Pseudo-Huber, ``2 c (sqrt(d^2 + c^2) - c)``: quadratic below the threshold ``c``, linear above it."""
    return c * smooth_l1(prediction, target, c)


def smooth_l1(prediction: Tensor, target: Tensor, c: Tensor) -> Tensor:
    """``2 (sqrt(d^2 + c^2) - c)``: twice the absolute error above the threshold, smooth below it."""
    difference = prediction - target
    # Algebraically the same as above, without the cancellation for small differences.
    return 2 * difference**2 / (torch.hypot(difference, c) + c)


THRESHOLD_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"huber": huber, "smooth_l1": smooth_l1}
"""Values of ``loss_type`` with a threshold."""


def constant_threshold(timesteps: Tensor, snr: Tensor, c: float) -> Tensor:
    """``c`` at all timesteps."""
    return torch.full_like(timesteps, c)


def exponential_threshold(timesteps: Tensor, snr: Tensor, c: float) -> Tensor:
    """``c ** (t / 1000)``: from 1 at ``t = 0`` to ``c`` at pure noise."""
    return torch.exp(math.log(c) * timesteps / NUM_TRAIN_TIMESTEPS)


def snr_threshold(timesteps: Tensor, snr: Tensor, c: float) -> Tensor:
    """``(1 - c) / (1 + r)^2 + c`` with ``r = 1 / sqrt(snr)``: also from 1 to ``c``."""
    return (1 - c) / (1 + snr.rsqrt()) ** 2 + c


HUBER_SCHEDULES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "constant": constant_threshold,
    "exponential": exponential_threshold,
    "snr": snr_threshold,
}
"""``huber_schedule`` -> threshold from the timesteps, their SNR, and ``huber_c``."""


def compute_elementwise_loss(
    prediction: Tensor, target: Tensor, timesteps: Tensor, process: NoiseProcess, config: LossConfig
) -> Tensor:
    """The unreduced loss in float32, of the shape of ``prediction``."""
    prediction, target = prediction.float(), target.float()
    if config.loss_type in PLAIN_LOSSES:
        return PLAIN_LOSSES[config.loss_type](prediction, target)
    c = config.huber_scale * HUBER_SCHEDULES[config.huber_schedule](timesteps, process.snr(timesteps), config.huber_c)
    return THRESHOLD_LOSSES[config.loss_type](prediction, target, c.view(-1, *[1] * (prediction.ndim - 1)))


def resize_mask_to_latents(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Average pixel masks (B, 1, height, width) in 0..255 to latent resolution (B, 1, H, W) in 0..1."""
    return F.interpolate(mask.float() / 255, size=size, mode="area")


def reduce_loss_per_sample(loss: Tensor, mask: Tensor | None, *, normalize_by_area: bool = False) -> Tensor:
    """Reduce an elementwise loss (B, C, H, W) to the mean per sample (B,).

    As in sd-scripts the mean is over all elements, so an image whose mask covers a quarter has a quarter of the loss.
    ``normalize_by_area`` divides by the mask's area instead, so every image counts the same; empty masks give 0.
    """
    if mask is None:
        return loss.flatten(1).mean(1)
    means = (loss * mask).flatten(1).mean(1)
    if not normalize_by_area:
        return means
    area = mask.flatten(1).mean(1)
    return means / area.where(area > 0, 1)
