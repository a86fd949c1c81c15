"""Timestep sampling: uniform, sigmoid, shifts, log-SNR and its mixtures, the logit-normal and mode densities of SD3.

Each sampling is the quantile function of its density, applied to one uniform number ``u`` per sample (``u = 0.5`` gives
the median).  So a sample's timestep does not depend on its batch, and validation can use fixed quantiles.
The same densities as cumulative distributions are in noise_levels.py, the formulas of the shifts in
timestep_shift.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Size, Tensor

from ..config.schema_objective import NoiseConfig
from ..randomness import Purpose, derive_rng
from .noise_levels import NoiseDistribution
from .process import NUM_TRAIN_TIMESTEPS, FlowMatchingProcess, NoiseProcess, apply_shift

MIN_SIGMA = 1e-6
"""Lower bound of sigma: the SNR is infinite at 0."""

MIN_DEVIATION = 1e-12
"""Lower bound of the deviation in a mixture, where an option is 0 and all samples are at one level."""

NUM_BISECTIONS = 60
"""Halvings of the interval that contains a quantile of a mixture; float64 has no more digits."""


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


def sigma_quantile(u: Tensor, distribution: NoiseDistribution, num_tokens: int) -> Tensor:
    """One of the 1000 sigmas of diffusers' flow scheduler, with the density set by ``weighting_scheme``."""
    noise_config = distribution.noise_config
    density = WEIGHTING_SCHEME_QUANTILES.get(noise_config.weighting_scheme or "none", uniform_quantile)
    level = (NUM_TRAIN_TIMESTEPS * density(u, noise_config)).floor().clamp(0, NUM_TRAIN_TIMESTEPS - 1) + 1
    return apply_shift(level / NUM_TRAIN_TIMESTEPS, distribution.compute_factor(num_tokens))


def shifted_uniform_quantile(u: Tensor, distribution: NoiseDistribution, num_tokens: int) -> Tensor:
    """``uniform`` with the shift of the distribution, which is 1 for ``uniform`` itself."""
    return apply_shift(u, distribution.compute_factor(num_tokens))


def shifted_sigmoid_quantile(u: Tensor, distribution: NoiseDistribution, num_tokens: int) -> Tensor:
    """``sigmoid`` with the shift of the distribution, which is 1 for ``sigmoid`` itself."""
    return apply_shift(sigmoid_quantile(u, distribution.noise_config), distribution.compute_factor(num_tokens))


def mixture_quantile(u: Tensor, distribution: NoiseDistribution, num_tokens: int) -> Tensor:
    """The inverse of the cumulative distribution of a mixture of logit-normal densities, found by bisection."""
    mixture, z = distribution.build_mixture(num_tokens), torch.special.ndtri(u.double())
    parts = torch.stack([part.mean + part.deviation * z for part in mixture])
    low, high = parts.amin(0), parts.amax(0)
    for _ in range(NUM_BISECTIONS if len(mixture) > 1 else 0):
        middle = (low + high) / 2
        below = torch.zeros_like(middle)
        for part in mixture:
            below += part.share * torch.special.ndtr((middle - part.mean) / max(part.deviation, MIN_DEVIATION))
        is_below = below < u
        low, high = low.where(~is_below, middle), high.where(is_below, middle)
    return torch.sigmoid((low + high) / 2)


TIMESTEP_SAMPLINGS: Mapping[str, Callable[[Tensor, NoiseDistribution, int], Tensor]] = {
    **dict.fromkeys(("uniform", "nextdit_shift"), shifted_uniform_quantile),
    **dict.fromkeys(
        ("sigmoid", "shift", "flux_shift", "flux2_shift", "qwen_shift", "krea2_shift"), shifted_sigmoid_quantile
    ),
    **dict.fromkeys(("logsnr", "qinglong_flux", "qinglong_qwen"), mixture_quantile),
    "sigma": sigma_quantile,
}
"""The quantile function of each ``timestep_sampling``: sigma from ``u``, the distribution and the tokens."""


def compute_timesteps(u: Tensor, noise_config: NoiseConfig, process: NoiseProcess, latents_shape: Size) -> Tensor:
    """Timesteps on 0..1000 for each ``u``, between ``min_timestep`` and ``max_timestep``."""
    low = noise_config.min_timestep or 0
    high = process.num_timesteps if noise_config.max_timestep is None else noise_config.max_timestep
    if not isinstance(process, FlowMatchingProcess):
        return (low + (high - low) * u).floor().float()
    distribution = NoiseDistribution(noise_config.get_timestep_sampling(), noise_config, process.shift)
    num_tokens, sampling = process.count_tokens(latents_shape), TIMESTEP_SAMPLINGS[distribution.sampling]
    if distribution.is_cut:
        below, above = (distribution.compute_whole_share_below(end, num_tokens) for end in distribution.range)
        t = NUM_TRAIN_TIMESTEPS * sampling(below + (above - below) * u, distribution, num_tokens)
    else:
        t = low + (high - low) * sampling(u, distribution, num_tokens)
    return t.clamp(min=max(low, NUM_TRAIN_TIMESTEPS * MIN_SIGMA), max=high).float()


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


def draw_timestep_buckets(seed: int, num_buckets: int, sample_numbers: Sequence[int]) -> list[int]:
    """Draw which of ``num_buckets`` equally likely parts of the distribution each sample of a run is in.

    The samples are numbered in the order of the run; of each ``num_buckets`` in a row, one is in each part.
    """
    orders = {number // num_buckets: list(range(num_buckets)) for number in sample_numbers}
    for block, order in orders.items():
        derive_rng(seed, Purpose.TIMESTEP_BUCKETS, block).shuffle(order)
    return [orders[number // num_buckets][number % num_buckets] for number in sample_numbers]


def combine_quantile(thousandths: Tensor, rest: Tensor) -> Tensor:
    """``u`` from whole thousandths and a fraction of the next; never 0 or 1, where ``ndtri`` is infinite.

    ``rest`` comes from float32 ``torch.rand``, a multiple of 2^-24.
    """
    return (thousandths + rest.double() + 2.0**-25) / NUM_TRAIN_TIMESTEPS
