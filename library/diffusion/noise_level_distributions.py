"""Distributions of noise levels in training: their shifts, and the share of samples below a level; no torch.

The shares are the cumulative distributions of the densities that timestep_sampling.py samples from, in closed form.
All but ``uniform`` and ``sigma`` are mixtures of logit-normal densities: ``logit(sigma)`` is normally distributed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from ..config.schema_objective import NoiseConfig
from .timestep_shift import FLUX_DEV_SHIFT, IDEOGRAM4_SHIFT, KREA2_SHIFT, QWEN_SHIFT, TimestepShift

NUM_TRAIN_TIMESTEPS = 1000
"""Length of the noise schedule of every model but Kolors, whose process has its own, and the number of noise levels of
``sigma``."""

SHIFTS_BY_SIZE: Mapping[str, TimestepShift] = {
    "flux_shift": FLUX_DEV_SHIFT,
    "flux2_shift": FLUX_DEV_SHIFT,
    "qwen_shift": QWEN_SHIFT,
    "krea2_shift": KREA2_SHIFT,
    "ideogram4_shift": IDEOGRAM4_SHIFT,
    "nextdit_shift": FLUX_DEV_SHIFT,
    "qinglong_flux": FLUX_DEV_SHIFT,
    "qinglong_qwen": QWEN_SHIFT,
}
"""The shift by image size of each ``timestep_sampling`` that has one of its own, for any model."""

QINGLONG_SHARES: Mapping[str, tuple[float, float, float]] = {
    "qinglong_flux": (0.79, 0.11, 0.10),
    "qinglong_qwen": (0.95, 0.0, 0.05),
}
"""The shares of samples that ``qinglong`` draws as with the shift, as ``logsnr``, and at low noise."""

IDEOGRAM4_DEVIATION = 1.5
"""The standard deviation of ``logit(sigma)`` of ``ideogram4_shift``, as of the steps of the model's pipeline."""

QINGLONG_LOW_NOISE = 5.36, 1.0
"""Mean and standard deviation of the log-SNR of the samples that ``qinglong`` draws at low noise."""


@dataclass(frozen=True)
class LogitNormal:
    """A part of a mixture of logit-normal densities."""

    share: float
    mean: float
    deviation: float

    def compute_share_below(self, sigma: float) -> float:
        """Compute the share of this part's samples below a noise level between 0 and 1."""
        z = math.log(sigma / (1 - sigma)) - self.mean
        return NormalDist().cdf(z / self.deviation) if self.deviation else float(z > 0)


def build_log_snr_part(share: float, mean: float, deviation: float) -> LogitNormal:
    """Build the part whose log-SNR ``2 ln((1 - sigma) / sigma)`` has this mean and standard deviation."""
    return LogitNormal(share, -mean / 2, deviation / 2)


@dataclass(frozen=True)
class NoiseDistribution:
    """The distribution of noise levels of a flow-matching model: a ``timestep_sampling`` and its options."""

    sampling: str
    noise_config: NoiseConfig
    default_shift: TimestepShift
    """The shift of ``shift`` and ``sigma`` without ``discrete_flow_shift``."""
    mixture_tables: dict[tuple["LogitNormal", ...], Any] = field(default_factory=dict, compare=False, repr=False)
    """The quantiles of the mixtures sampled from so far, which timestep_sampling.py tabulates once for each size."""

    @property
    def range(self) -> tuple[float, float]:
        """The noise levels of ``min_timestep`` and ``max_timestep``."""
        low, high = self.noise_config.min_timestep, self.noise_config.max_timestep
        return (low or 0) / NUM_TRAIN_TIMESTEPS, (NUM_TRAIN_TIMESTEPS if high is None else high) / NUM_TRAIN_TIMESTEPS

    @property
    def is_cut(self) -> bool:
        """Whether the distribution is cut at the ends of its range instead of scaled into it."""
        return self.noise_config.preserve_distribution_shape and self.sampling != "sigma"

    def compute_factor(self, num_tokens: int) -> float:
        """Compute the shift for an image of this many tokens."""
        if self.sampling in SHIFTS_BY_SIZE:
            return SHIFTS_BY_SIZE[self.sampling].compute_factor(num_tokens)
        if self.sampling in ("shift", "sigma"):
            return self.noise_config.discrete_flow_shift or self.default_shift.compute_factor(num_tokens)
        return 1.0

    def build_mixture(self, num_tokens: int) -> tuple[LogitNormal, ...]:
        """Build the mixture of the distribution; empty for ``uniform``, ``nextdit_shift`` and ``sigma``.

        A shift adds its logarithm to ``logit(sigma)``.
        """
        noise = self.noise_config
        if self.sampling in ("uniform", "nextdit_shift", "sigma"):
            return ()
        if self.sampling == "logsnr":
            return (build_log_snr_part(1.0, noise.logit_mean, noise.logit_std),)
        if self.sampling == "ideogram4_shift":
            return (LogitNormal(1.0, math.log(self.compute_factor(num_tokens)), IDEOGRAM4_DEVIATION),)
        shifted, other, low = QINGLONG_SHARES.get(self.sampling, (1.0, 0.0, 0.0))
        parts = (
            LogitNormal(shifted, math.log(self.compute_factor(num_tokens)), noise.sigmoid_scale),
            build_log_snr_part(other, noise.logit_mean, noise.logit_std),
            build_log_snr_part(low, *QINGLONG_LOW_NOISE),
        )
        return tuple(part for part in parts if part.share)

    def compute_share_below(self, sigma: float, num_tokens: int) -> float:
        """Compute the share of samples below a noise level, between ``min_timestep`` and ``max_timestep``."""
        low, high = self.range
        if not self.is_cut:
            return self.compute_whole_share_below((sigma - low) / (high - low), num_tokens)
        below, above = (self.compute_whole_share_below(end, num_tokens) for end in (low, high))
        return (self.compute_whole_share_below(min(max(sigma, low), high), num_tokens) - below) / (above - below)

    def compute_share_in_range(self, num_tokens: int) -> float:
        """Compute the share of samples of the whole distribution that ``min_timestep`` and ``max_timestep`` leave."""
        below, above = (self.compute_whole_share_below(end, num_tokens) for end in self.range)
        return above - below

    def compute_whole_share_below(self, sigma: float, num_tokens: int) -> float:
        """Compute the share of samples below a noise level without ``min_timestep`` and ``max_timestep``."""
        if not 0 < sigma < 1:
            return float(sigma >= 1)
        if mixture := self.build_mixture(num_tokens):
            return math.fsum(part.share * part.compute_share_below(sigma) for part in mixture)
        factor = self.compute_factor(num_tokens)
        unshifted = sigma / (factor - (factor - 1) * sigma)
        if self.sampling != "sigma":
            return unshifted
        num_below = math.ceil(NUM_TRAIN_TIMESTEPS * unshifted - 1e-9) - 1
        density = WEIGHTING_SCHEME_SHARES.get(self.noise_config.weighting_scheme or "none")
        share = num_below / NUM_TRAIN_TIMESTEPS
        return share if density is None else density(share, self.noise_config)

    def compute_mean_share_below(self, sigma: float, samples_by_tokens: Mapping[int, float]) -> float:
        """Compute the share of samples below a noise level; the samples of each size are counted by its tokens."""
        counts = samples_by_tokens.items()
        below = math.fsum(count * self.compute_share_below(sigma, tokens) for tokens, count in counts)
        return below / sum(samples_by_tokens.values())


def find_quantile(share: float, compute_share: Callable[[float], float]) -> float:
    """Find by bisection the value between 0 and 1 at which an increasing function of it reaches a share."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_share(middle) < share else (low, middle)
    return (low + high) / 2


def _compute_logit_normal_share(value: float, noise_config: NoiseConfig) -> float:
    if not 0 < value < 1:
        return float(value >= 1)
    return LogitNormal(1.0, noise_config.logit_mean, noise_config.logit_std).compute_share_below(value)


def _compute_mode_share(value: float, noise_config: NoiseConfig) -> float:
    scale = noise_config.mode_scale
    return find_quantile(value, lambda u: u + scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u))


WEIGHTING_SCHEME_SHARES: Mapping[str, Callable[[float, NoiseConfig], float]] = {
    "logit_normal": _compute_logit_normal_share,
    "mode": _compute_mode_share,
}
"""The cumulative distribution of each ``weighting_scheme`` that changes the density of ``sigma``."""
