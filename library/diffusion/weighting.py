"""How much the loss counts at each time.

``snr`` is the ratio of signal to noise; losses of noise (``epsilon``) and velocity (``v``) differ by ``snr + 1``.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..config.schema_objective import LossConfig, NoiseConfig
from .process import NUM_TRAIN_TIMESTEPS, DiscreteProcess, FlowMatchingProcess, NoiseProcess

MAX_SNR = 1000.0
"""sd-scripts' limit on the ratio, which has no end at ``t = 0``."""


def min_snr_weight(snr: Tensor, gamma: float, prediction_type: str) -> Tensor:
    """``min(snr, gamma)`` as the weight of the clean picture's loss (Hang et al. 2023, arXiv 2303.09556)."""
    if prediction_type == "v":
        return snr.clamp(max=gamma) / (snr + 1)
    return (gamma / snr).clamp(max=1)  # and not min(snr, gamma) / snr, which is 0 / 0 where there is no signal


def debiased_estimation_weight(snr: Tensor, enabled: float, prediction_type: str) -> Tensor:
    """``1 / sqrt(snr)`` for noise (Yu et al. 2023, arXiv 2310.08442), ``1 / (snr + 1)`` for velocity."""
    snr = snr.clamp(max=MAX_SNR)
    return 1 / (snr + 1) if prediction_type == "v" else snr.rsqrt()


def scale_v_like_noise_weight(snr: Tensor, enabled: float, prediction_type: str) -> Tensor:
    """The loss of velocity as much as that of noise would be."""
    snr = snr.clamp(max=MAX_SNR)
    return snr / (snr + 1)


def v_pred_like_weight(snr: Tensor, scale: float, prediction_type: str) -> Tensor:
    """To the loss of noise, ``share`` of what that of velocity would be is added."""
    return 1 + scale / scale_v_like_noise_weight(snr, 1, prediction_type)


SNR_WEIGHTINGS: Mapping[str, Callable[[Tensor, float, str], Tensor]] = {
    "min_snr_gamma": min_snr_weight,
    "debiased_estimation_loss": debiased_estimation_weight,
    "scale_v_pred_loss_like_noise_pred": scale_v_like_noise_weight,
    "v_pred_like_loss": v_pred_like_weight,
}
"""Weights of diffusion models by the option that asks for them; the option's value is their second argument."""


def sigma_sqrt_weight(sigmas: Tensor) -> Tensor:
    """``1 / s^2``: little noise counts most."""
    return sigmas**-2


def cosmap_weight(sigmas: Tensor) -> Tensor:
    """Esser et al. 2024 (arXiv 2403.03206, equation 21): most in the middle, with mean 1."""
    return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))


FLOW_WEIGHTINGS: Mapping[str, Callable[[Tensor], Tensor]] = {"sigma_sqrt": sigma_sqrt_weight, "cosmap": cosmap_weight}
"""Weights of flow models by the share of noise; the other names of ``weighting_scheme`` choose times instead."""


def compute_loss_weights(
    process: NoiseProcess, timesteps: Tensor, noise_config: NoiseConfig, loss_config: LossConfig
) -> Tensor:
    """The weight of each sample's loss: all that was asked for, multiplied."""
    total = torch.ones_like(timesteps)
    if isinstance(process, FlowMatchingProcess):
        scheme = FLOW_WEIGHTINGS.get(noise_config.weighting_scheme or "none")
        return total if scheme is None else scheme(process.sigma(timesteps))
    for name, weighting in SNR_WEIGHTINGS.items():
        if amount := getattr(loss_config, name):
            total = total * weighting(process.snr(timesteps), float(amount), process.prediction_type)
    return total


def find_unbounded_weightings(process: NoiseProcess, loss_config: LossConfig) -> list[str]:
    """Options that would give some time of this process a weight without end: one where no signal is left."""
    if not isinstance(process, DiscreteProcess):
        return []
    snr = process.snr(torch.arange(NUM_TRAIN_TIMESTEPS))
    return [
        name
        for name, weighting in SNR_WEIGHTINGS.items()
        if (amount := getattr(loss_config, name))
        and not weighting(snr, float(amount), process.prediction_type).isfinite().all()
    ]
