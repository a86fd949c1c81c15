"""Loss weightings over timesteps: min-SNR-gamma, debiased estimation, v-pred-like loss; sigma_sqrt and cosmap for flow.

The losses that they weight are in losses.py.

To add a weighting: write ``(snr, value, prediction_type) -> weight`` (or ``sigmas -> weight`` for flow matching), list
it in ``SNR_WEIGHTINGS`` under the name of its option (or in ``FLOW_WEIGHTINGS`` under its ``weighting_scheme``), and
add that option to ``LossConfig`` (or ``NoiseConfig``) in ``config/schema_objective.py``, the models that it is for in
``config/validate_objective.py``, and a value to try in ``tests/unit/diffusion/test_objective_options.py``.

``snr`` is the signal-to-noise ratio; the losses of ``epsilon`` and ``v`` prediction differ by the factor ``snr + 1``.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..config.schema_objective import LossConfig, NoiseConfig
from .process import DiscreteProcess, FlowMatchingProcess, NoiseProcess

MAX_SNR = 1000.0
"""sd-scripts' cap on the SNR, which is larger at the first timesteps only."""


def min_snr_weight(snr: Tensor, gamma: float, prediction_type: str) -> Tensor:
    """``min(snr, gamma)`` as the weight of the x_0 loss (Hang et al. 2023, arXiv 2303.09556)."""
    if prediction_type == "v":
        return snr.clamp(max=gamma) / (snr + 1)
    return (gamma / snr).clamp(max=1)  # min(snr, gamma) / snr would be 0 / 0 at zero terminal SNR


def debiased_estimation_weight(snr: Tensor, enabled: float, prediction_type: str) -> Tensor:
    """``1 / sqrt(snr)`` for epsilon (Yu et al. 2023, arXiv 2310.08442), ``1 / (snr + 1)`` for v."""
    snr = snr.clamp(max=MAX_SNR)
    return 1 / (snr + 1) if prediction_type == "v" else snr.rsqrt()


def scale_v_like_noise_weight(snr: Tensor, enabled: float, prediction_type: str) -> Tensor:
    """Scale the v loss to the size that the epsilon loss would have."""
    snr = snr.clamp(max=MAX_SNR)
    return snr / (snr + 1)


def v_pred_like_weight(snr: Tensor, scale: float, prediction_type: str) -> Tensor:
    """Add ``scale`` times the equivalent v loss to the epsilon loss."""
    return 1 + scale / scale_v_like_noise_weight(snr, 1, prediction_type)


SNR_WEIGHTINGS: Mapping[str, Callable[[Tensor, float, str], Tensor]] = {
    "min_snr_gamma": min_snr_weight,
    "debiased_estimation_loss": debiased_estimation_weight,
    "scale_v_pred_loss_like_noise_pred": scale_v_like_noise_weight,
    "v_pred_like_loss": v_pred_like_weight,
}
"""The weighting for epsilon and v prediction of each option of ``LossConfig``, whose value is the second argument."""


def sigma_sqrt_weight(sigmas: Tensor) -> Tensor:
    """``1 / sigma^2``: emphasizes low noise."""
    return sigmas**-2


def cosmap_weight(sigmas: Tensor) -> Tensor:
    """Esser et al. 2024 (arXiv 2403.03206, equation 21): emphasizes mid-range noise; the mean is 1."""
    return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))


FLOW_WEIGHTINGS: Mapping[str, Callable[[Tensor], Tensor]] = {"sigma_sqrt": sigma_sqrt_weight, "cosmap": cosmap_weight}
"""The weighting for flow matching of each ``weighting_scheme``; ``logit_normal`` and ``mode`` sample timesteps."""


def compute_loss_weights(
    process: NoiseProcess, timesteps: Tensor, noise_config: NoiseConfig, loss_config: LossConfig
) -> Tensor:
    """The loss weight of each sample (B,): the product of all enabled weightings."""
    total = torch.ones_like(timesteps)
    if isinstance(process, FlowMatchingProcess):
        scheme = FLOW_WEIGHTINGS.get(noise_config.weighting_scheme or "none")
        return total if scheme is None else scheme(process.sigma(timesteps))
    snr = process.compute_weighting_snr(timesteps) if isinstance(process, DiscreteProcess) else process.snr(timesteps)
    for name, weighting in SNR_WEIGHTINGS.items():
        if value := getattr(loss_config, name):
            total = total * weighting(snr, float(value), process.prediction_type)
    return total


def find_unbounded_weightings(process: NoiseProcess, loss_config: LossConfig) -> list[str]:
    """List the enabled options whose weight is infinite at some timestep, as happens with zero terminal SNR."""
    if not isinstance(process, DiscreteProcess):
        return []
    snr = process.compute_weighting_snr(torch.arange(process.num_timesteps))
    return [
        name
        for name, weighting in SNR_WEIGHTINGS.items()
        if (value := getattr(loss_config, name))
        and not weighting(snr, float(value), process.prediction_type).isfinite().all()
    ]
