"""Timestep sampling: uniform, sigmoid, shift, flux_shift, and the logit-normal and mode densities of SD3.

Each sampling is the quantile function of its density, applied to one uniform number ``u`` per sample (``u = 0.5`` gives
the median).  So a sample's timestep does not depend on its batch, and validation can use fixed quantiles.
The shift by resolution of flow models is computed in process.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Size, Tensor

from ..config.schema_objective import NoiseConfig
from .process import FLUX_DEV_SHIFT, NUM_TRAIN_TIMESTEPS, FlowMatchingProcess, NoiseProcess, apply_shift

MIN_SIGMA = 1e-6
"""Lower bound of sigma: the SNR is infinite at 0."""


def uniform_quantile(u: Tensor, noise_config: NoiseConfig) -> Tensor:
    """Uniform over all timesteps."""
    return u


def sigmoid_quantile(u: Tensor, noise_config: NoiseConfig) -> Tensor:
    """``sigmoid(sigmoid_scale * z)`` with ``z`` normal: emphasizes the middle."""
    return torch.sigmoid(noise_config.sigmoid_scale * torch.special.ndtri(u))


def logit_normal_quantile(u: Tensor, noise_config: NoiseConfig) -> Tensor:
    """``sigmoid(z)`` with ``z`` normal of mean ``logit_mean`` (above 0: more noise) and deviation ``logit_std``."""
    return torch.sigmoid(noise_config.logit_mean + noise_config.logit_std * torch.special.ndtri(u))


def mode_quantile(u: Tensor, noise_config: NoiseConfig) -> Tensor:
    """Esser et al. 2024 (arXiv 2403.03206, equation 20), mirrored to increase with ``u``; the density is symmetric."""
    return u + noise_config.mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)


WEIGHTING_SCHEME_QUANTILES: Mapping[str, Callable[[Tensor, NoiseConfig], Tensor]] = {
    "logit_normal": logit_normal_quantile,
    "mode": mode_quantile,
}
"""Values of ``weighting_scheme`` that change the density of ``sigma``; it is uniform for the others."""


def sigma_quantile(u: Tensor, noise_config: NoiseConfig, process: FlowMatchingProcess, num_tokens: int) -> Tensor:
    """One of the 1000 sigmas of diffusers' flow scheduler, with the density set by ``weighting_scheme``."""
    density = WEIGHTING_SCHEME_QUANTILES.get(noise_config.weighting_scheme or "none", uniform_quantile)
    level = (NUM_TRAIN_TIMESTEPS * density(u, noise_config)).floor().clamp(0, NUM_TRAIN_TIMESTEPS - 1) + 1
    return apply_shift(level / NUM_TRAIN_TIMESTEPS, _get_shift_factor(noise_config, process, num_tokens))


def shift_quantile(u: Tensor, noise_config: NoiseConfig, process: FlowMatchingProcess, num_tokens: int) -> Tensor:
    """``sigmoid``, shifted by ``discrete_flow_shift``, or by default as the model's own scheduler does."""
    return apply_shift(sigmoid_quantile(u, noise_config), _get_shift_factor(noise_config, process, num_tokens))


def flux_shift_quantile(u: Tensor, noise_config: NoiseConfig, process: FlowMatchingProcess, num_tokens: int) -> Tensor:
    """``sigmoid`` with the resolution-dependent shift of FLUX.1 dev, for any model."""
    return apply_shift(sigmoid_quantile(u, noise_config), FLUX_DEV_SHIFT.compute_factor(num_tokens))


TIMESTEP_SAMPLINGS: Mapping[str, Callable[[Tensor, NoiseConfig, FlowMatchingProcess, int], Tensor]] = {
    "uniform": lambda u, noise, process, tokens: uniform_quantile(u, noise),
    "sigmoid": lambda u, noise, process, tokens: sigmoid_quantile(u, noise),
    "sigma": sigma_quantile,
    "shift": shift_quantile,
    "flux_shift": flux_shift_quantile,
}
"""The quantile function of each ``timestep_sampling``: sigma from ``u``, the options, the process and the tokens."""


def compute_timesteps(u: Tensor, noise_config: NoiseConfig, process: NoiseProcess, latents_shape: Size) -> Tensor:
    """Timesteps on 0..1000 for each ``u``, between ``min_timestep`` and ``max_timestep``."""
    low = noise_config.min_timestep or 0
    high = NUM_TRAIN_TIMESTEPS if noise_config.max_timestep is None else noise_config.max_timestep
    if not isinstance(process, FlowMatchingProcess):
        return (low + (high - low) * u).floor().float()
    sampling = TIMESTEP_SAMPLINGS[noise_config.flow_timestep_sampling]
    s = sampling(u, noise_config, process, process.count_tokens(latents_shape))
    return (low + (high - low) * s).clamp(min=NUM_TRAIN_TIMESTEPS * MIN_SIGMA).float()


def sample_quantiles_and_noise(generators: Sequence[torch.Generator], shape: Size) -> tuple[Tensor, Tensor]:
    """Draw ``u`` and Gaussian noise of this shape from each generator.

    The noise does not depend on the timestep sampling: whole thousandths of ``u`` are drawn before it, the rest after.
    """
    coarse, noise, fine = [], [], []
    for generator in generators:
        coarse.append(torch.randint(0, NUM_TRAIN_TIMESTEPS, (), generator=generator))
        noise.append(torch.randn(shape, generator=generator))
        fine.append(torch.rand((), generator=generator))
    return combine_quantile(torch.stack(coarse), torch.stack(fine)), torch.stack(noise)


def combine_quantile(thousandths: Tensor, rest: Tensor) -> Tensor:
    """``u`` from whole thousandths and a fraction of the next; never 0 or 1, where ``ndtri`` is infinite.

    ``rest`` comes from float32 ``torch.rand``, a multiple of 2^-24.
    """
    return (thousandths + rest.double() + 2.0**-25) / NUM_TRAIN_TIMESTEPS


def _get_shift_factor(noise_config: NoiseConfig, process: FlowMatchingProcess, num_tokens: int) -> float:
    return noise_config.discrete_flow_shift or process.shift.compute_factor(num_tokens)
