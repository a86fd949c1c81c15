"""At which times a model is trained: densities over 0..1, as functions of one uniform number ``u`` for each sample.

Each is the quantile function of its density (``u = 0.5`` gives the median), so what a sample draws does not depend on
its batch, and a validation can ask for fixed quantiles.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Size, Tensor

from ..config.schema_objective import NoiseConfig
from .process import FLUX_DEV_SHIFT, NUM_TRAIN_TIMESTEPS, FlowMatchingProcess, NoiseProcess, apply_shift

MIN_SIGMA = 1e-6
"""No share of noise is smaller: at 0 the ratio of signal to noise has no end."""


def uniform_quantile(u: Tensor, noise_config: NoiseConfig) -> Tensor:
    """Every time equally often."""
    return u


def sigmoid_quantile(u: Tensor, noise_config: NoiseConfig) -> Tensor:
    """The sigmoid of a normal number times ``sigmoid_scale``: the middle more often than the ends."""
    return torch.sigmoid(noise_config.sigmoid_scale * torch.special.ndtri(u))


def logit_normal_quantile(u: Tensor, noise_config: NoiseConfig) -> Tensor:
    """The sigmoid of a normal number with mean ``logit_mean``, above 0 for more noise, and spread ``logit_std``."""
    return torch.sigmoid(noise_config.logit_mean + noise_config.logit_std * torch.special.ndtri(u))


def mode_quantile(u: Tensor, noise_config: NoiseConfig) -> Tensor:
    """Esser et al. 2024 (arXiv 2403.03206, equation 20), turned to grow with ``u``; the density is symmetric."""
    return u + noise_config.mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)


WEIGHTING_SCHEME_QUANTILES: Mapping[str, Callable[[Tensor, NoiseConfig], Tensor]] = {
    "logit_normal": logit_normal_quantile,
    "mode": mode_quantile,
}
"""Names of ``weighting_scheme`` that choose times; under the other names ``sigma`` draws them uniformly."""


def sigma_quantile(u: Tensor, noise_config: NoiseConfig, process: FlowMatchingProcess, num_tokens: int) -> Tensor:
    """One of the 1000 levels of diffusers' flow scheduler, by the density that ``weighting_scheme`` names."""
    density = WEIGHTING_SCHEME_QUANTILES.get(noise_config.weighting_scheme or "none", uniform_quantile)
    level = (NUM_TRAIN_TIMESTEPS * density(u, noise_config)).floor().clamp(0, NUM_TRAIN_TIMESTEPS - 1) + 1
    return apply_shift(level / NUM_TRAIN_TIMESTEPS, _get_shift_factor(noise_config, process, num_tokens))


def shift_quantile(u: Tensor, noise_config: NoiseConfig, process: FlowMatchingProcess, num_tokens: int) -> Tensor:
    """``sigmoid``, moved by ``discrete_flow_shift`` or, without it, as the model's own pipeline moves its times."""
    return apply_shift(sigmoid_quantile(u, noise_config), _get_shift_factor(noise_config, process, num_tokens))


def flux_shift_quantile(u: Tensor, noise_config: NoiseConfig, process: FlowMatchingProcess, num_tokens: int) -> Tensor:
    """``sigmoid``, moved by the size of the picture as FLUX.1 dev does, whatever the model says."""
    return apply_shift(sigmoid_quantile(u, noise_config), FLUX_DEV_SHIFT.compute_factor(num_tokens))


TIMESTEP_SAMPLINGS: Mapping[str, Callable[[Tensor, NoiseConfig, FlowMatchingProcess, int], Tensor]] = {
    "uniform": lambda u, noise, process, tokens: uniform_quantile(u, noise),
    "sigmoid": lambda u, noise, process, tokens: sigmoid_quantile(u, noise),
    "sigma": sigma_quantile,
    "shift": shift_quantile,
    "flux_shift": flux_shift_quantile,
}
"""What ``timestep_sampling`` can name: the share of noise of a flow model from ``u`` and the model's own shift."""


def compute_timesteps(u: Tensor, noise_config: NoiseConfig, process: NoiseProcess, latents_shape: Size) -> Tensor:
    """``t`` on 0..1000 for each ``u``, for latents of this shape, within ``min_timestep`` and ``max_timestep``."""
    low, high = (
        noise_config.min_timestep or 0,
        NUM_TRAIN_TIMESTEPS if noise_config.max_timestep is None else noise_config.max_timestep,
    )
    if not isinstance(process, FlowMatchingProcess):
        return (low + (high - low) * u).floor().float()
    s = TIMESTEP_SAMPLINGS[noise_config.flow_timestep_sampling](
        u, noise_config, process, process.count_tokens(latents_shape)
    )
    return (low + (high - low) * s).clamp(min=NUM_TRAIN_TIMESTEPS * MIN_SIGMA).float()


def sample_quantiles_and_noise(generators: Sequence[torch.Generator], shape: Size) -> tuple[Tensor, Tensor]:
    """``u`` and normal noise of this shape for each generator.

    The noise does not depend on how times are chosen: ``u`` takes whole thousandths before it and the rest after it.
    """
    coarse, noise, fine = [], [], []
    for generator in generators:
        coarse.append(torch.randint(0, NUM_TRAIN_TIMESTEPS, (), generator=generator))
        noise.append(torch.randn(shape, generator=generator))
        fine.append(torch.rand((), generator=generator))
    return combine_quantile(torch.stack(coarse), torch.stack(fine)), torch.stack(noise)


def combine_quantile(thousandths: Tensor, rest: Tensor) -> Tensor:
    """``u`` of so many whole thousandths and a part of the next; never 0 or 1, where normal numbers have no quantile.

    ``rest`` is a number of ``torch.rand`` in float32, which knows steps of 2^-24.
    """
    return (thousandths + rest.double() + 2.0**-25) / NUM_TRAIN_TIMESTEPS


def _get_shift_factor(noise_config: NoiseConfig, process: FlowMatchingProcess, num_tokens: int) -> float:
    return noise_config.discrete_flow_shift or process.shift.compute_factor(num_tokens)
