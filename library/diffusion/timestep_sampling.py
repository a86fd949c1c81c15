"""Timestep sampling: uniform, sigmoid, shifts, log-SNR and its mixtures, the logit-normal and mode densities of SD3.

Each sampling is the quantile function of its density, applied to one uniform number ``u`` per sample (``u = 0.5`` gives
the median).  So a sample's timestep does not depend on its batch, and validation can use fixed quantiles.
The same densities as cumulative distributions are in noise_level_distributions.py, the formulas of the shifts in
timestep_shift.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor

from ..config.schema_objective import NoiseConfig
from ..randomness import Purpose, derive_rng
from .noise_level_distributions import NUM_TRAIN_TIMESTEPS, LogitNormal, NoiseDistribution
from .process import FlowMatchingProcess, NoiseProcess, apply_shift

MIN_SIGMA = 1e-6
"""Lower bound of sigma: the SNR is infinite at 0."""

MIN_DEVIATION = 1e-12
"""Lower bound of the deviation in a mixture, where an option is 0 and all samples are at one level."""

NUM_BISECTIONS = 60
"""Halvings of the interval that contains a quantile of a mixture; float64 has no more digits."""

TABLE_END, TABLE_INTERVALS = 7.0, 4096
"""The last quantile ``z`` in the table of a mixture, which goes from its negative, and the number of its intervals."""

TABLE_ACCURACY = 5e-7
"""The largest error of ``logit(sigma)`` halfway between two values of a table; elsewhere, quantiles are bisected."""


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
    """The inverse of the cumulative distribution of a mixture of logit-normal densities."""
    mixture, z = distribution.build_mixture(num_tokens), torch.special.ndtri(u.double())
    if len(mixture) == 1:
        return torch.sigmoid(mixture[0].mean + mixture[0].deviation * z)
    if mixture not in distribution.mixture_tables:
        distribution.mixture_tables[mixture] = build_mixture_table(mixture)
    table: MixtureTable = distribution.mixture_tables[mixture]
    return torch.sigmoid(table.interpolate_logits(u, z))


def bisect_mixture_logits(u: Tensor, z: Tensor, mixture: Sequence[LogitNormal]) -> Tensor:
    """Find ``logit(sigma)`` of quantiles of a mixture by bisection; ``z`` are the quantiles of a normal density."""
    parts = torch.stack([part.mean + part.deviation * z for part in mixture])
    low, high = parts.amin(0), parts.amax(0)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        below = torch.zeros_like(middle)
        for part in mixture:
            below += part.share * torch.special.ndtr((middle - part.mean) / max(part.deviation, MIN_DEVIATION))
        is_below = below < u
        low, high = low.where(~is_below, middle), high.where(is_below, middle)
    return (low + high) / 2


@dataclass(frozen=True, eq=False)
class MixtureTable:
    """``logit(sigma)`` of a mixture at equally spaced quantiles ``z`` of a normal density, for cubic interpolation."""

    mixture: tuple[LogitNormal, ...]
    values: Tensor
    slopes: Tensor
    """The derivatives of the values by their index."""
    is_smooth: Tensor
    """Whether interpolation is accurate between each value and the next; it is not around a part without deviation."""

    def interpolate_logits(self, u: Tensor, z: Tensor) -> Tensor:
        """Interpolate at quantiles ``u``, which are ``z`` of a normal density; bisect where it is not accurate."""
        position = (z / TABLE_END + 1) * (len(self.is_smooth) / 2)
        index = position.floor().clamp(0, len(self.is_smooth) - 1).long()
        logits = self.interpolate_cubic(index, position - index)
        is_inexact = ~self.is_smooth[index] | (z.abs() > TABLE_END)
        if bool(is_inexact.any()):
            logits[is_inexact] = bisect_mixture_logits(u[is_inexact], z[is_inexact], self.mixture)
        return logits

    def interpolate_cubic(self, index: Tensor, fraction: Tensor) -> Tensor:
        """Evaluate the cubic Hermite polynomials between the values at ``index`` and the next ones."""
        rest, start, end = 1 - fraction, self.values[index], self.values[index + 1]
        ends = start * rest**2 * (1 + 2 * fraction) + end * fraction**2 * (1 + 2 * rest)
        return ends + fraction * rest * (self.slopes[index] * rest - self.slopes[index + 1] * fraction)


def build_mixture_table(mixture: tuple[LogitNormal, ...]) -> MixtureTable:
    """Bisect the values of the table, and those halfway between, which tell where interpolation is accurate."""
    z = torch.linspace(-TABLE_END, TABLE_END, 2 * TABLE_INTERVALS + 1, dtype=torch.float64)
    logits = bisect_mixture_logits(torch.special.ndtr(z), z, mixture)
    values, halfway = logits[::2], logits[1::2]
    density = torch.zeros_like(values)
    for part in mixture:
        deviation = max(part.deviation, MIN_DEVIATION)
        density += part.share / deviation * torch.exp(-(((values - part.mean) / deviation) ** 2) / 2)
    slopes = torch.exp(-(z[::2] ** 2) / 2) / density * (2 * TABLE_END / TABLE_INTERVALS)
    table = MixtureTable(mixture, values, slopes, torch.ones(TABLE_INTERVALS, dtype=torch.bool))
    errors = table.interpolate_cubic(torch.arange(TABLE_INTERVALS), torch.full_like(halfway, 0.5)) - halfway
    return replace(table, is_smooth=errors.abs() < TABLE_ACCURACY)


TIMESTEP_SAMPLINGS: Mapping[str, Callable[[Tensor, NoiseDistribution, int], Tensor]] = {
    **dict.fromkeys(("uniform", "nextdit_shift"), shifted_uniform_quantile),
    **dict.fromkeys(
        ("sigmoid", "shift", "flux_shift", "flux2_shift", "qwen_shift", "krea2_shift"), shifted_sigmoid_quantile
    ),
    **dict.fromkeys(("logsnr", "ideogram4_shift", "qinglong_flux", "qinglong_qwen"), mixture_quantile),
    "sigma": sigma_quantile,
}
"""The quantile function of each ``timestep_sampling``: sigma from ``u``, the distribution and the tokens."""


def build_distribution(noise_config: NoiseConfig, process: FlowMatchingProcess) -> NoiseDistribution:
    """Build the distribution of the noise levels of a flow-matching model."""
    return NoiseDistribution(noise_config.get_timestep_sampling(), noise_config, process.shift)


def compute_timesteps(
    u: Tensor,
    noise_config: NoiseConfig,
    process: NoiseProcess,
    latents_shape: Size,
    distribution: NoiseDistribution | None = None,
) -> Tensor:
    """Compute the timesteps on 0..1000 for each ``u``, between ``min_timestep`` and ``max_timestep``.

    A run passes its ``distribution`` each time, which keeps the tables of mixtures.
    """
    low = noise_config.min_timestep or 0
    high = process.num_timesteps if noise_config.max_timestep is None else noise_config.max_timestep
    if not isinstance(process, FlowMatchingProcess):
        return (low + (high - low) * u).floor().float()
    distribution = distribution or build_distribution(noise_config, process)
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
