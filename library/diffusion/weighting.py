"""How much the loss counts at each time.

``snr`` is the ratio of signal to noise; losses of noise (``epsilon``) and velocity (``v``) differ by ``snr + 1``.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..config.schema import LossConfig, NoiseConfig
from .process import STEPS, Discrete, FlowMatching, Process

MOST = 1000.0
"""sd-scripts' limit on the ratio, which has no end at ``t = 0``."""


def min_snr(snr: Tensor, gamma: float, prediction: str) -> Tensor:
    """``min(snr, gamma)`` as the weight of the clean picture's loss (Hang et al. 2023, arXiv 2303.09556)."""
    if prediction == "v":
        return snr.clamp(max=gamma) / (snr + 1)
    return (gamma / snr).clamp(max=1)  # and not min(snr, gamma) / snr, which is 0 / 0 where there is no signal


def debiased(snr: Tensor, switch: float, prediction: str) -> Tensor:
    """``1 / sqrt(snr)`` for noise (Yu et al. 2023, arXiv 2310.08442), ``1 / (snr + 1)`` for velocity."""
    snr = snr.clamp(max=MOST)
    return 1 / (snr + 1) if prediction == "v" else snr.rsqrt()


def like_noise(snr: Tensor, switch: float, prediction: str) -> Tensor:
    """The loss of velocity as much as that of noise would be."""
    snr = snr.clamp(max=MOST)
    return snr / (snr + 1)


def like_velocity(snr: Tensor, share: float, prediction: str) -> Tensor:
    """To the loss of noise, ``share`` of what that of velocity would be is added."""
    return 1 + share / like_noise(snr, 1, prediction)


WEIGHTINGS: Mapping[str, Callable[[Tensor, float, str], Tensor]] = {
    "min_snr_gamma": min_snr,
    "debiased_estimation_loss": debiased,
    "scale_v_pred_loss_like_noise_pred": like_noise,
    "v_pred_like_loss": like_velocity,
}
"""Weights of diffusion models by the option that asks for them; the option's value is their second argument."""


def sigma_sqrt(s: Tensor) -> Tensor:
    """``1 / s^2``: little noise counts most."""
    return s**-2


def cosmap(s: Tensor) -> Tensor:
    """Esser et al. 2024 (arXiv 2403.03206, equation 21): most in the middle, with mean 1."""
    return 2 / (math.pi * (1 - 2 * s + 2 * s**2))


SCHEMES: Mapping[str, Callable[[Tensor], Tensor]] = {"sigma_sqrt": sigma_sqrt, "cosmap": cosmap}
"""Weights of flow models by the share of noise; the other names of ``weighting_scheme`` choose times instead."""


def weights(process: Process, t: Tensor, noise: NoiseConfig, loss: LossConfig) -> Tensor:
    """The weight of each sample's loss: all that was asked for, multiplied."""
    total = torch.ones_like(t)
    if isinstance(process, FlowMatching):
        scheme = SCHEMES.get(noise.weighting_scheme or "none")
        return total if scheme is None else scheme(process.sigma(t))
    for name, weighting in WEIGHTINGS.items():
        if amount := getattr(loss, name):
            total = total * weighting(process.snr(t), float(amount), process.prediction)
    return total


def endless(process: Process, loss: LossConfig) -> list[str]:
    """Options that would give some time of this process a weight without end: one where no signal is left."""
    if not isinstance(process, Discrete):
        return []
    snr = process.snr(torch.arange(STEPS))
    return [name for name, weighting in WEIGHTINGS.items()
            if (amount := getattr(loss, name))
            and not weighting(snr, float(amount), process.prediction).isfinite().all()]  # fmt: skip
